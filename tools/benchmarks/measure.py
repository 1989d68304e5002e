"""Times of runs that take turns, in one process per checkout, and the table of their ratios.

A benchmark is a module with ``GROUPS``: for each group the steps in a round, and a function that returns the group's
runs for an empty folder. The first run does by hand what the others do with hookline.
"""

import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]

Run = Callable[[int], float]
"""Runs a number of steps and returns the seconds."""
Groups = dict[str, tuple[int, Callable[[str], dict[str, Run]]]]
Times = dict[str, list[list[float]]]
"""Seconds per step: of each row, of each worker, in each round."""


def now() -> float:
    """Return the time in seconds, after the work that was given to a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def repeated(act: Callable[[], object]) -> Run:
    """Return a run whose step is a call of ``act``."""

    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            act()
        return now() - start

    return run


class Worker:
    """The processes that have the runs of one group, with hookline of a checkout: one process, or one per rank.

    Args:
        checkout: the folder of the checkout. The code of the benchmarks is always that of this one.
        benchmark, group: the module, and one of its ``GROUPS``.
        core: the core to run on ("" for any).
        ranks: number of processes.
    """

    def __init__(self, checkout: Path, benchmark: str, group: str, core: str, ranks: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        top = Path(self._folder.name)
        for name in ("run", "hookline"):
            (top / name).mkdir()
        for part in (*(checkout / "src/hookline").iterdir(), *map(checkout.joinpath, ("config", "hooks", "engine"))):
            (top / "hookline" / part.name).symlink_to(part)
        (top / "hookline/configs").symlink_to(checkout / "configs")
        paths = [str(top), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        common = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environments = [common]
        if ranks > 1:  # as torchrun does
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        command = [sys.executable, "-c", "import measure; measure.serve()", benchmark, group, core]
        self._errors = top / "errors"
        with self._errors.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            start = partial(subprocess.Popen, command, cwd=top / "run", **pipes)
            self._processes = [start(env=environment) for environment in environments]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._folder.cleanup()

    def run(self, row: str, steps: int) -> Any:
        """Return the seconds of a run, on the slowest rank; or for ``""`` the names of the runs."""
        try:
            for process in self._processes:
                print(json.dumps([row, steps]), file=process.stdin, flush=True)
            return max(json.loads(process.stdout.readline()) for process in self._processes)
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError(f"a process ended:\n{self._errors.read_text()[-3000:]}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve() -> None:
    """Answer a :class:`Worker`, in its process. What runs print is discarded."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    benchmark, group, core = sys.argv[1:]
    if core:
        os.sched_setaffinity(0, {int(core)})

    from hookline.engine import launch

    def answer() -> None:
        runs = import_module(benchmark).GROUPS[group][1](os.getcwd())
        for line in sys.stdin:
            row, steps = json.loads(line)
            gc.collect()
            print(json.dumps(runs[row](steps) if row else list(runs)), file=answers, flush=True)

    launch(answer, int(os.environ.get("WORLD_SIZE", 1)), device="cpu")


def in_turns(workers: list[Worker], steps: int, rounds: int) -> Times:
    """Run all rows of all workers in each round, so that a slow moment of the machine affects all.

    Every other round has the reverse order, since a run can slow down the next one. A first round is not counted.
    """
    rows, *_ = [worker.run("", 0) for worker in workers]
    times: Times = {row: [[] for _ in workers] for row in rows}
    turns = [(row, index) for row in times for index in range(len(workers))]
    for number in range(rounds + 1):
        for row, index in turns if number % 2 else reversed(turns):
            seconds = workers[index].run(row, steps) / steps
            if number:
                times[row][index].append(seconds)
    return times


def table(times: Times) -> Iterator[str]:
    """Yield the lines of a table: the time of a step, its ratio to the first row, and to the other checkout.

    Times and ratios are medians; a ratio is of two times in the same round.
    """
    (base, *others), *_ = times.values()
    width = max(map(len, times))
    yield f"{'':{width}}       step   ratio" + ("      other   this/other" if others else "")
    for row, (ours, *rest) in times.items():
        line = f"{row:{width}} {_text(ours)} {_ratio(ours, base):7.3f}"
        yield line + "".join(f" {_text(theirs)} {_ratio(ours, theirs):12.3f}" for theirs in rest)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _text(times: list[float]) -> str:
    seconds = statistics.median(times)
    factor, unit = next(((f, u) for f, u in ((1, "s "), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))
    return f"{seconds * factor:7.4g} {unit}"
