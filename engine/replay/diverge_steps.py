"""Compare the replays of two runs, step by step."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import CfgNode, locate
from ...config.slots import errors_at
from ...hooks.common.batches import convert
from ...hooks.common.tensors import local_part
from ...runs.reading import Curve
from .. import comm
from ..checkpoint.candidates import iteration_of
from ..data.index_stream import reason_without_indices
from ..defaults import DefaultTrainer
from ..launch import launch
from .differences import compare_curves, curves_of
from .fingerprints import compare_fingerprints, fingerprints_of
from .repeat import config_changes, find_checkpoint, rebuilt, replay_config
from .trace import StepTracer, WholeStepTracer

__all__ = ["compare_steps"]

Values = tuple[int, str, str, tuple[int, ...]]
"""Iteration, kind and name of an entry (see :class:`~hookline.engine.replay.trace.Entry`), and its digests."""

_IN = {
    **{"samples": "batch", "batch": "batch", "sample": "batch", "output": "outputs", "loss": "losses"},
    **{"gradient": "gradients", "parameter": "parameters", "buffer": "buffers", "generator": "generators"},
    "optimizer": "optimizer",
}


def compare_steps(
    runs: Sequence[str], first: int, last: int, ranks: Sequence[int], trainer: str, cfg: CfgNode | None = None
) -> dict[str, Any]:
    """Replay two runs, and compare their steps from ``first`` to one after ``last``.

    Args:
        runs: the folders.
        first, last: iterations. If the runs differ before ``first``, earlier steps are compared, too.
        ranks: the number of processes of each run.
        trainer, cfg: see :func:`~hookline.engine.replay.diverge`.

    Returns:
        ``checkpoints``, ``first_iteration``, ``errors``, and ``unlike``: how each replay differs from its run. If the
        steps are equal: ``metric``, the first difference of the metrics of the replays, or None. If they differ:
        ``iteration``, -1 before the first step, and ``rank``; ``in``: what differs in it; ``whole_steps``: whether only
        batches and states were seen; ``first``, ``output`` and ``gradient``: the first difference of all, and of these
        kinds, with ``iteration``, ``kind``, ``name`` and amounts. A batch has ``samples`` (the indices of those that
        differ) and ``batch_size``, or ``other_samples``.

    Raises:
        ConfigError: a run cannot be replayed.
    """
    first = min(first, last)
    while True:
        paths = [find_checkpoint(run, first) for run in runs]
        configs = [replay_config(run, cfg, ()) for run in runs]
        jobs = [(*job, trainer, first) for job in zip(configs, runs, paths, strict=True)]
        found = [_launch(count, *job, last + 1) for count, job in zip(ranks, jobs, strict=True)]
        rank, numbers = _first_differences(found)
        values = [one.values[rank] for one in found]
        if not (first and numbers and values[0][numbers["first"]][0] < first):
            break
        first = min(iteration_of(path) if path else 0 for path in paths)
    report: dict[str, Any] = {
        "checkpoints": [os.path.basename(path) for path in paths],
        "first_iteration": first,
        "errors": [one.error for one in found],
        "unlike": [one.unlike for one in found],
    }
    if not numbers:
        metric = compare_curves(found[0].curves, found[1].curves, first, last)["first_difference"]
        if metric is not None:
            metric["other"] = metric.pop("replay")
        return {**report, "metric": metric}
    iteration = values[0][numbers["first"]][0]
    report["iteration"], report["rank"] = iteration, rank
    report["whole_steps"] = not any(kind == "loss" for _, kind, *_ in values[0])
    report["in"] = list(dict.fromkeys(_IN[a[1]] for a, b in zip(*values, strict=False) if a != b and a[0] == iteration))
    until = max(first, *(values[0][number][0] for number in numbers.values()))
    keep = list(numbers.values())
    again = [_launch(count, *job, until, keep) for count, job in zip(ranks, jobs, strict=True)]
    for key, number in numbers.items():
        one, other = values[0][number], values[1][number]
        report[key] = {"iteration": one[0], "kind": one[1], "name": one[2]}
        report[key] |= _amounts([recorded.kept[rank].get(number, []) for recorded in again])
        if one[1] == "samples":
            report[key]["other_samples"] = [one[2], other[2]]
        elif other[1:3] != one[1:3]:
            report[key]["other_name"] = f"{other[1]} {other[2]}"
        if one[1] == "batch":
            pairs = [pair for pair in zip(*values, strict=False) if pair[0][:2] == (one[0], "sample")]
            report[key] |= {"samples": [int(a[2]) for a, b in pairs if a != b], "batch_size": len(pairs)}
    return report


@dataclass
class _Recorded:
    """What a replay recorded.

    ``values`` and ``kept`` tensors of each rank, ``curves`` of its metrics, and how it failed or differs from its run.
    """

    values: list[list[Values]]
    kept: list[Mapping[int, list[torch.Tensor]]]
    curves: Mapping[str, Curve]
    error: str
    unlike: Mapping[str, Any] | None


def _launch(ranks: int, cfg: CfgNode, *args: Any) -> _Recorded:
    recorded: _Recorded = launch(_record, ranks, args=(cfg, *args), device=cfg.MODEL.DEVICE)
    return recorded


def _record(
    cfg: CfgNode, run: str, path: str, trainer: str, first: int, last: int, keep: Sequence[int] = ()
) -> _Recorded:
    with errors_at("--trainer"):
        cls: Any = locate(trainer) if trainer else DefaultTrainer
    if not path and not keep and comm.get_world_size() == 1:
        with rebuilt(run, first, path, cfg.clone(), cls):
            pass  # modules that are imported while a run is built may draw random numbers: only the first time
    tracer = (_WholeSteps if cfg.SOLVER.COMPILE_STEP or cfg.SOLVER.CUDA_GRAPH else _Steps)(last - first + 1)
    tracer.first, tracer.keep, error = first, keep, ""
    with rebuilt(run, first, path, cfg.clone(), cls) as one:
        tracer.uses_indices = not reason_without_indices(one.data_loader)
        one.register_hooks([tracer])
        try:
            one.train()
        except Exception as failure:
            if not tracer.steps:
                raise
            error = f"iteration {one.iter}: {type(failure).__name__}: {failure}"
        folder, main = one.cfg.OUTPUT_DIR, comm.is_main_process()
        curves = curves_of(folder) if main else {}
        unlike = _compare_with_run(run, folder, path, last) if main else None
        if unlike is not None:
            unlike["config_changes"] = config_changes(run, path, first, one.cfg)
    ranks = comm.gather((tracer.values(), tracer.kept))
    return _Recorded([values for values, _ in ranks], [kept for _, kept in ranks], curves, error, unlike)


def _compare_with_run(run: str, replayed: str, path: str, last: int) -> dict[str, Any] | None:
    """Return the first difference of a replay's fingerprints, or else metrics, from those of the run."""
    theirs, ours = fingerprints_of(run), fingerprints_of(replayed)
    if not path:  # the generators depend on what was imported before
        ours = {at: {**row, "generators": theirs.get(at, row)["generators"]} for at, row in ours.items()}
    difference: dict[str, Any] | None = compare_fingerprints(theirs, ours)["first_difference"]
    if difference is None and (
        metric := compare_curves(curves_of(run), curves_of(replayed), 0, last)["first_difference"]
    ):
        return {"iteration": metric["iteration"], "in": [metric["metric"]]}
    return difference


class _Window(WholeStepTracer):
    """Traces the steps from ``first`` on, and the optimizer's state. Keeps the tensors of the entries ``keep``."""

    first = 0
    keep: Sequence[int] = ()

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.kept: dict[int, list[torch.Tensor]] = {}
        self._count = 0
        self._inside = self._in_step = False  # the window; a step, and not an evaluation after it

    def values(self) -> list[Values]:
        """Return the entries. Those before the first step have the iteration before it."""
        return [
            (iteration, entry.kind, entry.name, entry.digests)
            for iteration, entries in enumerate(self.steps, start=self.first - 1)
            for entry in entries
        ]

    def before_step(self) -> None:
        if self.trainer.iter == self.first:
            self._inside = True
            self._note_state()
            self._finish()

    def after_fetch(self, batch: Any) -> None:
        self._in_step = True
        super().after_fetch(batch)

    def after_step(self) -> None:
        self._in_step = False
        if self._inside:
            super().after_step()

    def _note_state(self) -> None:
        super()._note_state()
        self._note("optimizer", "", self.trainer.optimizer.state_dict())

    def _note(self, kind: str, name: str, value: Any) -> None:
        if not self._inside or (kind == "output" and not self._in_step):
            return
        if self._count in self.keep:
            found: list[torch.Tensor] = []
            convert(value, lambda one: found.append(one) if isinstance(one, torch.Tensor) else None)
            self.kept[self._count] = [local_part(one.detach()).cpu().clone() for one in found]
        self._count += 1
        super()._note(kind, name, value)

    def _finish(self) -> None:
        if self._inside:
            super()._finish()


class _WholeSteps(_Window):
    pass


class _Steps(_Window, StepTracer):
    pass


def _first_differences(found: Sequence[_Recorded]) -> tuple[int, dict[str, int]]:
    """Return the rank that differs first, and the numbers of its first entry, output and gradient that differ."""
    best: tuple[int, dict[str, int]] = (0, {})
    for rank, pair in enumerate(zip(*(one.values for one in found), strict=False)):
        numbers: dict[str, int] = {}
        for number, (a, b) in enumerate(zip(*pair, strict=False)):
            if a == b:
                continue
            numbers.setdefault("first", number)
            if a[1] in ("output", "gradient"):
                numbers.setdefault(a[1], number)
            if a[:2] != b[:2] or (a[2] != b[2] and a[1] not in ("samples", "sample")):
                break  # other modules or parameters: what follows cannot be compared
        if numbers and (not best[1] or numbers["first"] < best[1]["first"]):
            best = rank, numbers
    return best


def _amounts(pair: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Return by how much tensors differ; nothing if they have no numbers to compare."""
    if len(pair[0]) != len(pair[1]) or any(a.shape != b.shape for a, b in zip(*pair, strict=True)):
        return {"shapes": [[list(tensor.shape) for tensor in tensors] for tensors in pair]}
    absolute = relative = 0.0
    for a, b in zip(*((tensor.double() for tensor in tensors) for tensors in pair), strict=True):
        size = (a - b).abs().nan_to_num(math.inf, math.inf)
        size[(a == b) | (a.isnan() & b.isnan())] = 0.0
        if size.numel():
            share = (size / torch.maximum(a.abs(), b.abs())).nan_to_num(math.inf, math.inf)
            absolute = max(absolute, float(size.max()))
            relative = max(relative, float(share[size > 0].max()) if size.any() else 0.0)
    return {"max_absolute": absolute, "max_relative": relative} if absolute else {}
