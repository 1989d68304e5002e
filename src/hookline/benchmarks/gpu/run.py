"""Runs the parts one after another, each in a process of its own, and prints what they report."""

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ...config import ConfigError, suggest
from ..measure import use_clock, usual_logging
from . import checks, speed
from .report import Report, Row, first_line

__all__ = ["PARTS", "Part", "markdown", "run", "run_part"]

TOTAL = 570.0
"""Seconds for all parts; one that would begin later is skipped."""


@dataclass(frozen=True)
class Part:
    """A part, which runs in its own process.

    Attributes:
        function: called with a :class:`Report`.
        limit: seconds, the start of the process included.
    """

    function: Callable[[Report], None]
    limit: float

    @property
    def title(self) -> str:
        """What it checks."""
        whole = self.function.func if isinstance(self.function, partial) else self.function
        return (whole.__doc__ or "").splitlines()[0]


PARTS = {
    "waiting": Part(checks.waiting, 90),
    "prefetch": Part(checks.prefetch, 60),
    "amp": Part(checks.amp, 60),
    "nonfinite": Part(checks.nonfinite, 60),
    "resume": Part(checks.resume, 80),
    "staging": Part(checks.staging, 60),
    "checkpoint": Part(speed.checkpoint, 120),
    "memory": Part(speed.memory, 60),
    "mlp": Part(partial(speed.steps, name="mlp"), 100),
    "convnet": Part(partial(speed.steps, name="convnet"), 120),
    "gpt": Part(partial(speed.steps, name="gpt"), 240),
    "peers": Part(speed.peers, 90),
    "float8": Part(checks.float8, 60),
}


def run(args: argparse.Namespace) -> int:
    """Run what the options of ``hookline benchmark gpu`` say, and print tables in Markdown.

    Returns:
        1 if something failed; otherwise 0, also without a GPU, where all parts are skipped.

    Raises:
        ConfigError: ``--only`` names an unknown part.
    """
    names = [name for name in args.only.split(",") if name] or list(PARTS)
    for name in names:
        if name not in PARTS:
            raise ConfigError(f"--only: there is no part {name!r}{suggest(name, PARTS) or ': see --list'}")
    if args.list:
        print("\n".join(f"{name:<12}{part.title}" for name, part in PARTS.items()))
        return 0
    missing = "" if args.device == "cpu" or torch.cuda.is_available() else "torch sees no CUDA device"
    if not args.json:
        print(f"{_machine(args.device)}\n", flush=True)
    end = time.monotonic() + TOTAL
    results: dict[str, list[Row]] = {}
    for name in names:
        part, left = PARTS[name], end - time.monotonic()
        reason = missing or ("" if left > 0 else f"no time left of {TOTAL:.0f} s")
        limit = min(part.limit, left)
        rows = [Row(name, "skipped", reason)] if reason else run_part(part.function, name, args.device, limit)
        results[name] = rows
        if not (args.json or missing):
            print(f"{name}: {part.title}\n\n{markdown(rows)}\n", flush=True)
    if args.json:
        print(json.dumps({name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}))
    else:
        print(_summary([row for rows in results.values() for row in rows]))
    return int(any(row.result == "failed" for rows in results.values() for row in rows))


def run_part(function: Callable[[Report], None], name: str, device: str, limit: float) -> list[Row]:
    """Run a part in its own process. If it crashes or hangs, the rows that it has sent are kept."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_serve, args=(other, function, device, folder))
        end = time.monotonic() + limit
        process.start()
        other.close()
        rows: list[Row] = []
        try:
            while pipe.poll(max(end - time.monotonic(), 0)):
                row = pipe.recv()
                if row is None:
                    break
                rows.append(row)
            else:
                rows.append(Row(name, "failed", f"no end within {limit:.0f} s"))
        except EOFError:
            process.join(10)
            last = (_output(folder).splitlines() or ["no output"])[-1]
            rows.append(Row(name, "failed", f"its process ended with {process.exitcode}: {last}"))
        finally:
            pipe.close()
            _end(process)
        if any(row.result == "failed" for row in rows):
            sys.stderr.write(f"Output of {name}:\n{_output(folder)[-5000:]}\n")
    return rows


def _serve(pipe: Connection, function: Callable[[Report], None], device: str, folder: str) -> None:
    """In the part's process. Its output goes to a file, which is shown if something fails."""
    os.setsid()  # so that loader workers, and runs that it started, can be ended with it
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    if device == "cuda":
        use_clock("gpu")
    else:
        torch.set_num_threads(1)
    report = Report(pipe.send, device)
    with usual_logging():
        try:
            function(report)
        except Exception as error:
            traceback.print_exc()
            pipe.send(Row("the whole part", "failed", first_line(error)))
    pipe.send(None)
    pipe.close()


def _end(process: Any) -> None:
    process.join(5)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or has not begun its own group
        process.kill()
    process.join()


def _output(folder: str) -> str:
    path = Path(folder, "output")
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _machine(device: str) -> str:
    today = datetime.date.today().strftime("%-d %B %Y")
    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "no GPU"
    return f"{today}: {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"


def markdown(rows: list[Row]) -> str:
    """Rows as a table, with a column for each number that one of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row.numbers))
    lines = [["", "result", *columns], ["---"] * (2 + len(columns))]
    for row in rows:
        result = f"{row.result}: {row.reason}" if row.reason else row.result
        numbers = [str(row.numbers.get(name, "")) for name in columns]
        lines.append([cell.replace("|", "\\|") for cell in (row.what, result, *numbers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _summary(rows: list[Row]) -> str:
    counts = [f"{sum(row.result == result for row in rows)} {result}" for result in ("passed", "failed", "skipped")]
    details = [f"{row.result}: {row.what}: {row.reason}" for row in rows if row.reason]
    return "\n".join([*details, ", ".join(counts)])
