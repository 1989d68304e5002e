"""``diverge``: say where two runs part, and in what."""

import glob
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import ConfigError, locate
from ...config.compare import differences, resolved
from ...config.slots import errors_at
from ...hooks.writers.fingerprints import FINGERPRINTS_FILE
from .. import comm
from ..checkpoint.candidates import iteration_of, saved_ranks
from ..data.index_stream import reason_without_indices
from ..defaults import DefaultTrainer
from ..launch import launch
from ..setup.report import describe_environment
from .differences import compare_curves, curves_of, environment_of
from .repeat import find_checkpoint, rebuilt, replay_config
from .step_digests import StepDigests

__all__ = ["diverge"]

Entry = tuple[int, str, str, str]


def diverge(run: str, other: str, *, trainer: str = "", replays: bool = True) -> dict[str, Any]:
    """Compare two runs: their configs, versions, metrics and fingerprints. If they differ, replay both up to there.

    The replays start from the newest checkpoints before the difference, or from the beginning, and write nothing into
    the folders of the runs. They are compared module by module, in each step since the last equal fingerprint.

    Args:
        run, other: the folders of the runs.
        trainer: the class of the runs' trainer, as ``"my_trainer:Trainer"``. Default: ``DefaultTrainer``.
        replays: whether to replay.

    Returns:
        ``equal``; ``config`` (a text); ``versions`` and ``ranks`` of both; ``version_now``; ``metrics`` (``values``,
        ``first_difference``) and ``fingerprints`` (``lines``, ``last_equal``, ``first_difference``);
        ``replay``: see :func:`_replay_both`; ``impossible``: why there is none.

    Raises:
        ConfigError: a folder has no run; or the runs have neither metrics nor fingerprints of the same iterations.
    """
    runs = (run, other)
    for one in runs:
        if not os.path.isfile(os.path.join(one, "config.yaml")):
            raise ConfigError(f"{one}: no run of hookline is here (it has no config.yaml)")
    configs = [resolved(one) for one in runs]
    for config in configs:
        config.OUTPUT_DIR = ""
    found = compare_curves(curves_of(run), curves_of(other), 0, 1 << 62)
    metric = found["first_difference"]
    if metric is not None:
        metric["other"] = metric.pop("replay")
    prints = _compare_fingerprints(_fingerprints(run), _fingerprints(other))
    if not found["values"] and not prints["lines"]:
        raise ConfigError(
            f"{run} and {other} have nothing to compare: no iteration is in the metrics.json, or in the "
            f"{FINGERPRINTS_FILE} of the hook Fingerprints, of both"
        )
    report: dict[str, Any] = {
        "runs": [os.path.abspath(one) for one in runs],
        "config": differences(*configs),
        "versions": [environment_of(one) for one in runs],
        "version_now": describe_environment(),
        "ranks": [_ranks(one) for one in runs],
        "metrics": found,
        "fingerprints": prints,
        "equal": metric is None and prints["first_difference"] is None,
        "replay": None,
    }
    if replays and not report["equal"]:
        seen = [one["iteration"] for one in (metric, prints["first_difference"]) if one is not None]
        try:
            report["replay"] = _replay_both(runs, prints["last_equal"] + 1, min(seen), report["ranks"], trainer)
        except ConfigError as error:
            report["replay"] = {"impossible": str(error)}
    return report


# ---------------------------------------------------------------------- files


def _fingerprints(run: str) -> dict[int, dict[str, str]]:
    path = os.path.join(run, FINGERPRINTS_FILE)
    rows: dict[int, dict[str, str]] = {}
    if not os.path.isfile(path):
        return rows
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # the run is writing it
                break
            try:
                row = json.loads(line)
                rows[int(row.pop("iteration"))] = row
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{path}: line {number} is damaged: {line[:60]!r}; remove the line") from None
    return rows


def _compare_fingerprints(run: Mapping[int, Any], other: Mapping[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"lines": len(run.keys() & other.keys()), "last_equal": -1, "first_difference": None}
    for iteration in sorted(run.keys() & other.keys()):
        names = [name for name, value in run[iteration].items() if other[iteration].get(name, value) != value]
        if names:
            found["first_difference"] = {"iteration": iteration, "in": names}
            break
        found["last_equal"] = iteration
    return found


def _ranks(run: str) -> int:
    checkpoint = find_checkpoint(run, 1 << 62)
    return (saved_ranks(checkpoint) if checkpoint else 0) or 1 + len(glob.glob(f"{glob.escape(run)}/log.txt.rank*"))


# ---------------------------------------------------------------------- replays


def _replay_both(runs: Sequence[str], first: int, last: int, ranks: Sequence[int], trainer: str) -> dict[str, Any]:
    """Replay both runs, and compare their steps from ``first`` to one after ``last``.

    Returns:
        ``checkpoints``, ``first_iteration``, ``errors``, and ``unlike``: how each replay differs from its run. If the
        replays differ: ``iteration``; ``in``: what differs in it; ``first``, ``output`` and ``gradient``: the first
        difference of all and of these kinds, with ``iteration``, ``kind``, ``name``, amounts; for a batch with samples.
    """
    first = min(first, last)
    while True:
        paths = [find_checkpoint(run, first) for run in runs]
        jobs = [(run, path, trainer, first) for run, path in zip(runs, paths, strict=True)]
        found = [_launch(count, *job, last + 1) for count, job in zip(ranks, jobs, strict=True)]
        rank, numbers = _first_differences(found)
        entries = [one.ranks[rank][0] for one in found]
        if not (first and numbers and entries[0][numbers["first"]][0] < first):
            break
        first = min(iteration_of(path) if path else 0 for path in paths)  # they differ before the first recorded step
    report: dict[str, Any] = {
        "checkpoints": [os.path.basename(path) for path in paths],
        "first_iteration": first,
        "errors": [one.error for one in found],
        "unlike": [_unlike(run, one, path) for run, path, one in zip(runs, paths, found, strict=True)],
    }
    if not numbers:
        return report
    iteration = entries[0][numbers["first"]][0]
    differ = [a for a, b in zip(*entries, strict=False) if a != b and a[0] == iteration]
    report |= {
        "iteration": iteration,
        "in": list(dict.fromkeys(_PLURALS.get(kind, name) for _, kind, name, _ in differ)),
    }
    until = max(entries[0][number][0] for number in numbers.values())
    keep = sorted(numbers.values())
    again = [_launch(count, *job, max(until, first), keep) for count, job in zip(ranks, jobs, strict=True)]
    for key, number in numbers.items():
        at, kind, name, _ = entries[0][number]
        report[key] = {
            "iteration": at,
            "kind": kind,
            "name": name,
            **_amounts([one.ranks[rank][1].get(number, []) for one in again]),
        }
        if (there := entries[1][number][2]) != name:
            report[key]["other_name"] = there
        if kind == "batch":
            report[key] |= _samples([one.ranks[rank] for one in again], number, at)
    return report


_PLURALS = {"batch": "batch", "output": "outputs", "loss": "losses", "gradient": "gradients"}


@dataclass
class _Recorded:
    """What a replay recorded: of each rank its entries, kept tensors and samples."""

    ranks: list[tuple[list[Entry], dict[int, list[torch.Tensor]], dict[int, list[int]]]]
    error: str


def _launch(ranks: int, run: str, *args: Any) -> _Recorded:
    recorded: _Recorded = launch(_record, ranks, args=(run, *args), device=replay_config(run, None, ()).MODEL.DEVICE)
    return recorded


def _record(run: str, path: str, trainer: str, first: int, last: int, keep: Sequence[int] = ()) -> _Recorded:
    with errors_at("--trainer"):
        cls: Any = locate(trainer) if trainer else DefaultTrainer
    hook = StepDigests(first, last, keep)
    if not path and not keep and comm.get_world_size() == 1:
        with rebuilt(run, first, path, replay_config(run, None, ()), cls):
            pass  # modules that are imported while a run is built may draw random numbers: only the first time
    with rebuilt(run, first, path, replay_config(run, None, ()), cls) as one:
        hook.uses_indices = not reason_without_indices(one.data_loader)
        one.register_hooks([hook])
        try:
            one.train()
        except Exception:
            if not hook.error:
                raise
    return _Recorded(comm.gather((hook.entries, hook.kept, hook.samples)), hook.error)


def _first_differences(found: Sequence[_Recorded]) -> tuple[int, dict[str, int]]:
    """Return the rank that differs first, and the numbers of its first entry, output and gradient that differ."""
    best: tuple[int, dict[str, int]] = (0, {})
    for rank, pair in enumerate(zip(*(one.ranks for one in found), strict=False)):
        numbers: dict[str, int] = {}
        for number, (a, b) in enumerate(zip(*(entries for entries, *_ in pair), strict=False)):
            if a != b:
                numbers.setdefault("first", number)
                numbers.setdefault(a[1], number)
            if a[:3] != b[:3]:  # other modules or parameters: what follows cannot be compared
                break
        if numbers and (not best[1] or numbers["first"] < best[1]["first"]):
            best = rank, {key: number for key, number in numbers.items() if key in ("first", "output", "gradient")}
    return best


def _unlike(run: str, recorded: _Recorded, path: str) -> dict[str, Any] | None:
    """Return the first line of a run's fingerprints that its replay does not equal; of one rank, where it is exact."""
    rows = _fingerprints(run) if len(recorded.ranks) == 1 else {}
    for iteration, kind, name, value in recorded.ranks[0][0]:
        if name == "generators" and not path:
            continue  # they depend on what was imported before
        if kind == "state" and rows.get(iteration, {}).get(name, value) != value:
            return {"iteration": iteration, "in": name}
    return None


def _amounts(pair: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Return by how much tensors differ; nothing if they have no numbers to compare."""
    if len(pair[0]) != len(pair[1]) or any(a.shape != b.shape for a, b in zip(*pair, strict=True)):
        return {"shapes": [[list(tensor.shape) for tensor in tensors] for tensors in pair]}
    absolute = relative = 0.0
    for a, b in zip(*((tensor.double() for tensor in tensors) for tensors in pair), strict=True):
        size = (a - b).abs()
        size[(a == b) | (a.isnan() & b.isnan())] = 0.0
        if size.numel():
            absolute = max(absolute, float(size.nan_to_num(math.inf).max()))
            relative = max(relative, float((size / torch.maximum(a.abs(), b.abs())).nan_to_num(0.0).max()))
    return {"max_absolute": absolute, "max_relative": relative} if absolute else {}


def _samples(pair: Sequence[Any], number: int, iteration: int) -> dict[str, Any]:
    """Return which samples of two batches differ, if the data has indices."""
    indices = [samples.get(iteration, []) for *_, samples in pair]
    if indices[0] != indices[1]:
        return {"other_samples": indices}
    rows: set[int] = set()
    for a, b in zip(*(kept.get(number, []) for _, kept, _ in pair), strict=False):
        if a.shape == b.shape and a.dim() and len(a) == len(indices[0]):
            unequal = (a != b) & ~((a != a) & (b != b))
            rows |= set(unequal.reshape(len(a), -1).any(1).nonzero().flatten().tolist())
    return {"samples": [indices[0][row] for row in sorted(rows)], "batch_size": len(indices[0])}
