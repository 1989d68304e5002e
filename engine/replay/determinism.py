"""``hookline determinism``: whether a run is deterministic, and if not, what differs first and what to set."""

import argparse
import gc
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...config import CfgNode, ConfigError
from ..defaults import DefaultTrainer
from ..options import check_options, merge_options, named_trainer
from ..ranks.torchrun import launched_by_torchrun
from ..setup.check import check_config, overridden_builders
from ..setup.seeding import choose_seed
from .parting import Difference, first_difference, first_operation
from .trace import NO_VERSION, Trace, trace_steps

__all__ = ["check_determinism", "determinism_of"]


class _Remedy(NamedTuple):
    name: str
    advice: str
    keys: tuple[Any, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_HASHES = _Remedy(
    "PYTHONHASHSEED=0",
    "the environment variable PYTHONHASHSEED=0. Better: find the set or hash() whose order the code uses, and sort",
    variables=(("PYTHONHASHSEED", "0"),),
)
_BENCHMARK = _Remedy("CUDNN_BENCHMARK False", "CUDNN_BENCHMARK: False", ("CUDNN_BENCHMARK", False))
_KERNELS = _Remedy(
    "DETERMINISTIC True",
    "DETERMINISTIC: True, for deterministic versions of operations (slower)",
    ("DETERMINISTIC", True, "CUDNN_BENCHMARK", False),
)
_WARNINGS = ("DETERMINISTIC", "warn", "CUDNN_BENCHMARK", False)
_THREADS = _Remedy(
    "one thread",
    "the environment variable OMP_NUM_THREADS=1, since an operation depends on the order of threads",
    variables=(("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1")),
)

_WHAT = {
    "samples": "the indices of the samples",
    "batch": "the batch",
    "output": "the output of {}",
    "loss": "the loss {}",
    "gradient": "the gradient of {}",
    "parameter": "the parameter {}",
    "buffer": "the buffer {}",
    "generator": "the state of {}'s random generator",
    "order": "they do different things, {}",
    "error": "only one fails, or both in other ways, {}",
    "length": "one of them stops",
}


def check_determinism(args: argparse.Namespace) -> int:
    """Run the command. Return its exit code: 0 if the run is deterministic, else 1."""
    if launched_by_torchrun():
        raise ConfigError("hookline determinism runs in one process: start it without torchrun")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, not {args.steps}")
    trainer = named_trainer(args.trainer)
    cfg = merge_options(args)
    check_options(args, cfg, trainer)
    check_config(cfg, overridden_builders(trainer, DefaultTrainer))
    deterministic, lines = determinism_of(cfg, args.steps, trainer)
    print("\n".join(lines))
    return 0 if deterministic else 1


def determinism_of(cfg: CfgNode, steps: int, trainer: type[DefaultTrainer] = DefaultTrainer) -> tuple[bool, list[str]]:
    """Run some steps twice, and once with another number of workers, each in a process of its own, and compare.

    The runs use one process, also for configs of several ranks. They write nothing.

    Args:
        cfg: the config.
        steps: number of steps, from the first one.
        trainer: the class of the trainer.

    Returns:
        Whether all runs were equal to the bit, and a report in lines.

    Raises:
        ConfigError: the run cannot start, or it fails.
    """
    cfg = cfg.clone()
    cfg.defrost()
    lines = []
    if cfg.SEED < 0:
        choose_seed(cfg, resume=False)
        lines.append(f"SEED is not set: all runs use {cfg.SEED}. Without a SEED each run has another one.")
    if cfg.PARALLEL.NAME != "auto":
        lines.append(f"PARALLEL.NAME is {cfg.PARALLEL.NAME}: checked on one rank, without it.")
        cfg.PARALLEL.NAME, cfg.PARALLEL.ARGS = "auto", CfgNode(new_allowed=True)
    runs = _Runs(cfg, steps, trainer)
    first, second = runs.trace(), runs.trace()
    done = len(first.steps) - 1 - bool(first.error)
    workers, device = first.facts["workers"], first.facts["device"]
    lines.append(f"{done} steps on {device}, SEED {cfg.SEED}, {_workers(workers)}")
    difference = first_difference(first, second)
    if difference is not None:
        lines.append(_describe(difference, "two runs with equal settings"))
        return False, lines + runs.explain(difference, first, second)
    if first.error:
        raise ConfigError(f"the run fails after {done} steps, which are equal in two runs: {first.error}")
    lines.append("  two runs: equal to the bit")
    other = 2 if cfg.DATALOADER.NUM_WORKERS < 2 else 0
    third = runs.trace(keys=("DATALOADER.NUM_WORKERS", other))
    if third.facts["workers"] == workers:
        lines.append("  with another number of workers: not tried, since the loader is the project's own")
    elif (difference := first_difference(first, third)) is not None:
        lines.append(_describe(difference, f"runs with {workers or 0} and {_workers(other)}"))
        return False, lines + _advise_workers(difference, first)
    else:
        lines.append(f"  with {_workers(other)}: equal to the bit")
    if not cfg.DETERMINISTIC:
        names = ", ".join(runs.trace(1, keys=_WARNINGS).warned)
        advice = f"{names} (may differ in longer runs; DETERMINISTIC: True makes them an error)"
        lines.append(f"  operations without a deterministic version: {advice if names else 'none'}")
    compared = "batches, module outputs, losses, gradients, parameters and random generators"
    return True, [*lines, f"Deterministic: {compared} are equal in all steps."]


class _Runs:
    """Runs of one config, each in a process of its own."""

    def __init__(self, cfg: CfgNode, steps: int, trainer: type[DefaultTrainer]) -> None:
        self._cfg, self._steps, self._trainer = cfg, steps, trainer

    def trace(
        self,
        steps: int = 0,
        operations: bool = False,
        keys: tuple[Any, ...] = (),
        variables: tuple[tuple[str, str], ...] = (),
    ) -> Trace:
        cfg = self._cfg.clone()
        cfg.merge_from_list(list(keys))
        with tempfile.TemporaryDirectory(prefix="hookline-determinism-") as folder, _environment(variables):
            path, cfg.OUTPUT_DIR = Path(folder, "trace"), os.path.join(folder, "run")
            arguments = (path, self._trainer, cfg, steps or self._steps, operations)
            process = torch.multiprocessing.get_context("spawn").Process(target=_trace, args=arguments)
            process.start()
            try:
                process.join()
            finally:
                process.kill()
            if not path.exists():
                raise ConfigError(f"a run ended before its first step, with exit code {process.exitcode}")
            result = pickle.loads(path.read_bytes())
        if isinstance(result, Trace):
            return result
        raise result

    def explain(self, difference: Difference, first: Trace, second: Trace) -> list[str]:
        """Say where a difference comes from and what to set, from runs with other settings."""
        steps = max(difference.step, 0) + 1
        third = self.trace(steps)
        equal = [name for name, one in (("first", first), ("second", second)) if third.steps == one.steps[: steps + 1]]
        lines = [_RARE.format(name) for name in equal]
        dataset = first.facts["dataset"]
        who, advice, remedies = "the code of this value", _UNSEEDED, [_HASHES]
        if difference.kind in ("samples", "batch"):
            lines += _describe_samples(difference, dataset)
            who = f"the sampler, or {dataset}" if difference.kind == "samples" else dataset
            who += ", its transform or its collate function"
        elif difference.step >= 0 and difference.kind not in ("error", "length"):
            origin = first_operation(*(self.trace(steps, operations=True) for _ in range(2)))
            how = "itself" if origin is None else origin.how
            if origin is not None:
                path = f"{origin.name} in one run is {origin.other} in the other" if origin.other else origin.name
                lines.append(f"  first operation (in two more runs, step {origin.step}): {path}: {_HOW[how]}")
                who = "the code at this operation"
            if how == "draws":
                advice, remedies = _SEED_IT, []
            elif how == "itself":
                advice, remedies = _REPLACE, [_HASHES, *self._of_kernels(first)]
        tried = []
        for remedy in remedies:
            if equal or (remedy is _HASHES and "PYTHONHASHSEED" in os.environ):
                continue
            one, other = (self.trace(steps, keys=remedy.keys, variables=remedy.variables) for _ in range(2))
            if NO_VERSION in one.error:
                names = ", ".join(self.trace(steps, keys=_WARNINGS).warned)
                lines.append(f"  operations without a deterministic version: {names}")
            elif first_difference(one, other) is None:
                return [*lines, f"  what to set: {remedy.advice}. With this setting two runs are equal."]
            tried.append(remedy.name)
        if tried:
            lines.append(f"  tried, and not enough: {', '.join(tried)}")
        return [*lines, f"  what to do: {advice.format(who)}."]

    def _of_kernels(self, first: Trace) -> list[_Remedy]:
        found = [_BENCHMARK] if self._cfg.CUDNN_BENCHMARK else []
        found += [] if self._cfg.DETERMINISTIC is True else [_KERNELS]
        return [*found, _THREADS] if "CPU" in first.facts["device"] else found


_HOW = {
    "draws": "it draws random numbers that SEED does not determine",
    "itself": "equal inputs, different outputs",
    "outside": "an input differs that no operation of torch computed",
    "path": "the runs take different paths",
}
_UNSEEDED = (
    "{} uses something that SEED does not determine: random.SystemRandom, os.urandom, numpy.random.default_rng() or a "
    "torch.Generator of its own, the time, or the order of files or sets. Draw from the global generators of random, "
    "numpy and torch"
)
_RARE = (
    "  a third run equals the {}: the difference is rare, or one run did something that the others did not need, such "
    "as a download. Run the command again, with more --steps"
)
_SEED_IT = "draw from torch's global generator, which SEED seeds, or call manual_seed() of the generator that is used"
_REPLACE = "replace the operation or module that is named above by a deterministic one"


def _trace(path: Path, trainer: type[DefaultTrainer], cfg: CfgNode, steps: int, operations: bool) -> None:
    """Write the trace, or the error of a run that cannot start, as a pickle."""
    result: Trace | ConfigError
    try:
        result = trace_steps(trainer, cfg, steps, operations)
    except ConfigError as error:
        result = error
    path.write_bytes(pickle.dumps(result))
    gc.collect()  # ends the loader's workers, for which a process of multiprocessing would wait at its end


@contextmanager
def _environment(variables: tuple[tuple[str, str], ...]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name, _ in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _workers(number: int | None) -> str:
    return "1 worker" if number == 1 else f"{number or 0} workers"


def _describe(difference: Difference, runs: str) -> str:
    when = f"in step {difference.step}" if difference.step >= 0 else "before the first step"
    return f"Not deterministic: {runs} differ {when}: {_WHAT[difference.kind].format(difference.name)}."


def _describe_samples(difference: Difference, dataset: str) -> list[str]:
    if difference.kind == "samples":
        return [f"  indices: {_short(one.split())}" for one in difference.samples]
    found = difference.samples
    return [f"  samples of {dataset} that differ, by their indices: {_short(found)}"] if found else []


def _short(names: Any) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _advise_workers(difference: Difference, first: Trace) -> list[str]:
    dataset = first.facts["dataset"]
    lines = _describe_samples(difference, dataset)
    if difference.kind not in ("samples", "batch"):
        return [*lines, "  what to do: keep DATALOADER.NUM_WORKERS, or find what reads the number of workers"]
    if first.facts["splits_itself"]:
        return [
            *lines,
            f"  what to do: {dataset} splits itself between workers: keep their number, or use ShardedIterable",
        ]
    if first.facts["declared"]:
        return [*lines, f"  what to do: {dataset} says deterministic = True, and draws random numbers: remove it"]
    return [
        *lines,
        f"  what to do: the samples of {dataset} depend on the worker that reads them: it uses get_worker_info(), the "
        "process's id, or counts what it reads. Draw from the global generators of random, numpy and torch: they are "
        "seeded for each sample",
    ]
