"""What whole processes cost: imports, the start of a run and of a resumed run, memory, compiled steps."""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .measure import interleaved, now, use_clock, usual_logging
from .work import DIGITS, by_hand, default, digits_config, lean, tiny_config

BY_HAND = Path(__file__).with_name("digits_by_hand.py")
WORKS = ("tiny", "digits")
# What a row measures: runs one process and returns its seconds.
Act = Callable[[str], float]
_CHILD = "import sys; from hookline.benchmarks import start; start.{function}(*sys.argv[1:])"


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of whole processes: imports, ``--help``, ``--dry-run``, and a run of the digits (``--steps`` epochs)."""
    epochs = args.steps or 20
    python, train = [sys.executable, "-c"], [sys.executable, "-m", "hookline", "train"]
    digits = [*train, "--config-file", DIGITS]
    imports = "from hookline.engine import DefaultTrainer, run"
    acts: dict[str, Sequence[str]] = {
        "import torch": [*python, "import torch"],
        "import DefaultTrainer": [*python, imports],
        "train --help": [*train, "--help"],
        # torch imports torch._dynamo for the first optimizer of a process.
        "digits, imports": [*python, f"{imports}; from sklearn import datasets; import torch._dynamo"],
        "digits, --dry-run": [*digits, "--dry-run"],
        "digits, by hand": [sys.executable, str(BY_HAND), "{folder}", str(epochs)],
        "digits": [*digits, "OUTPUT_DIR", "{folder}/run", "SOLVER.MAX_ITER", f"{epochs}ep"],
    }
    base = {
        "import DefaultTrainer": "import torch",
        "digits, --dry-run": "digits, imports",
        "digits": "digits, by hand",
    }
    seconds = _seconds({name: _process(act, args.clock) for name, act in acts.items()}, args.rounds)
    return {
        name: {"seconds": round(value, 3)}
        | ({"more": round(value - seconds[base[name]], 3)} if name in base else {})
        | ({"ratio": round(value / seconds[base[name]], 3)} if name in base else {})
        for name, value in seconds.items()
    }


def resume(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the first step is done, from the start of the process and without imports, fresh and resumed."""
    results: dict[str, Any] = {}
    for name in WORKS:
        with tempfile.TemporaryDirectory() as saved:
            _child("save", name, saved)
            files = list(Path(saved).glob("model_*.pth"))
            times: dict[str, list[tuple[float, float]]] = {"fresh": [], "resumed": []}
            for _ in range(args.rounds):
                for kind, pairs in times.items():
                    with tempfile.TemporaryDirectory() as folder:
                        if kind == "resumed":
                            shutil.copytree(saved, folder, dirs_exist_ok=True)
                        pairs.append(_child("first_step", name, folder, args.clock, str(time.time())))
            reads = []
            for _ in range(args.rounds):
                began = time.perf_counter()
                torch.load(files[0], weights_only=True)
                reads.append(time.perf_counter() - began)
        process, inside = (
            {kind: statistics.median(pair[i] for pair in pairs) for kind, pairs in times.items()} for i in (0, 1)
        )
        read = statistics.median(reads)
        for kind in times:
            results[f"{name}, {kind}"] = {
                "seconds": round(process[kind], 3),
                "after_imports": round(inside[kind], 3),
                "ratio": round(process[kind] / process["fresh"], 3),
                "ratio_after_imports": round(inside[kind] / inside["fresh"], 3),
            }
        results[f"{name}, torch.load"] = {"seconds": round(read, 4)}
    return results


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a process in MB after ``--steps`` steps. All processes import the same."""
    results: dict[str, Any] = {}
    for name in WORKS:
        peaks: dict[str, list[float]] = {"imports": [], "by hand": [], "lean": [], "default": []}
        for _ in range(args.rounds):
            for kind, values in peaks.items():
                with tempfile.TemporaryDirectory() as folder:
                    values.append(_child("peak", name, kind, folder, str(args.steps or 500)))
        middle = {kind: statistics.median(values) for kind, values in peaks.items()}
        for kind, value in middle.items():
            more = round(value - middle["by hand"], 1)
            results[f"{name}, {kind}"] = {"peak_mb": round(value, 1), "more_than_by_hand_mb": more}
    return results


def compile_step(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first epoch of the digits, without imports: uncompiled, and compiled with and without a cache."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:  # of the graphs that torch has compiled
        for name, backend in (("ordinary", ""), ("first start", args.backend), ("second start", args.backend)):
            with tempfile.TemporaryDirectory() as folder:
                two, epoch = _child("epoch", folder, backend, args.clock, TORCHINDUCTOR_CACHE_DIR=cache)
            results[name] = {"seconds_to_step_2": round(two, 2), "seconds_to_epoch_2": round(epoch, 2)}
    return results


def _seconds(acts: dict[str, Act], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as top:

        def once(act: Act) -> Callable[[int], float]:
            def run(steps: int) -> float:
                with tempfile.TemporaryDirectory(dir=top) as folder:
                    return act(folder)

            return run

        return interleaved({name: once(act) for name, act in acts.items()}, 1, rounds)


def _process(command: Sequence[str], clock: str) -> Act:
    def run(folder: str) -> float:
        before, began = _cpu_of_children(), time.perf_counter()
        _run([part.replace("{folder}", folder) for part in command])
        return _cpu_of_children() - before if clock == "cpu" else time.perf_counter() - began

    return run


def _run(command: Sequence[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _child(function: str, *args: str, **environment: str) -> Any:
    """Call a function of this module in a new process, and return what it printed."""
    command = [sys.executable, "-c", _CHILD.format(function=function), *args]
    return json.loads(_run(command, **environment).splitlines()[-1])


# ------------------------------------------------------------------ in the child processes


def _trainer(name: str, folder: str) -> Any:
    from ..engine import DefaultTrainer

    return DefaultTrainer((tiny_config if name == "tiny" else digits_config)(folder))


def _at_iteration(act: Callable[[Any], Any], *iterations: int) -> Any:
    from ..hooks import CallbackHook

    return CallbackHook(after_step=lambda trainer: act(trainer) if trainer.iter in iterations else None)


def save(name: str, folder: str) -> None:
    """Interrupt a run after 50 steps; its checkpoint stays."""
    trainer = _trainer(name, folder)
    trainer.register_hooks([_at_iteration(lambda trainer: trainer.request_stop("saved", exit_code=1), 49)])
    with suppress(SystemExit):
        trainer.train()
    print("\nnull")


def first_step(name: str, folder: str, clock: str, began: str) -> None:
    """Start or resume a run, and print the seconds until its first step is done."""
    torch.set_num_threads(1)
    imported = time.time(), time.process_time()

    def end(trainer: Any) -> None:
        wall, cpu = time.time(), time.process_time()
        ours = (wall - float(began), wall - imported[0]) if clock == "wall" else (cpu, cpu - imported[1])
        print(f"\n{json.dumps(ours)}", flush=True)
        os._exit(0)

    trainer = _trainer(name, folder)
    trainer.resume_or_load(resume=any(Path(folder).glob("model_*.pth")))
    trainer.register_hooks([_at_iteration(end, trainer.start_iter)])
    trainer.train()


def peak(name: str, kind: str, folder: str, steps: str) -> None:
    """Run steps, and print the peak memory of this process in MB."""
    torch.set_num_threads(1)
    cfg = (tiny_config if name == "tiny" else digits_config)(folder)
    optimizer: Any = torch.optim.SGD if name == "tiny" else torch.optim.AdamW
    with usual_logging():
        if kind != "imports":
            run = by_hand(cfg, optimizer) if kind == "by hand" else {"lean": lean, "default": default}[kind](cfg)
            run(int(steps))
    print(f"\n{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)}")


def epoch(folder: str, backend: str, clock: str) -> None:
    """Print the seconds from the trainer's start until its second step, and its first epoch, are done."""
    torch.set_num_threads(1)
    from ..engine import DefaultTrainer

    cfg = digits_config(folder)
    if backend:
        cfg.merge_from_list(["SOLVER.COMPILE_STEP", True, "SOLVER.COMPILE_STEP_ARGS", {"backend": backend}])
    use_clock(clock)
    began, times = now(), []
    trainer = DefaultTrainer(cfg)
    last = (trainer.iters_per_epoch or 1) - 1
    trainer.register_hooks([_at_iteration(lambda _: times.append(now() - began), 1, last)])
    trainer.register_hooks([_at_iteration(lambda trainer: trainer.request_stop("measured"), last)])
    trainer.train()
    print(f"\n{json.dumps(times)}")
