"""``diverge``: say where two runs differ first, and in what."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy as np

from ...config import CfgNode, ConfigError
from ...config.compare import differences, resolved
from ...runs.reading import Curve
from ..options import named_trainer
from .repeat import compare_curves, curves_of, environment_of, find_checkpoint, replay_step
from .samples import ranks_of

__all__ = ["diverge", "diverge_text"]

_SHOWN = 6  # rows of the table of a step


def diverge(
    run: str, other: str, *, trainer: str = "", cfg: CfgNode | None = None, replays: bool = True
) -> dict[str, Any]:
    """Compare the configs, versions and metrics of two runs. If metrics differ, replay both runs up to there.

    The replays start from the newest checkpoints before the last equal row of ``metrics.json``, or from the beginning.
    They find the first step whose metrics differ, and compare what happens in it. Nothing is written into the folders
    of the runs.

    Args:
        run, other: the folders of the runs.
        trainer: the class of the runs' trainer, as ``"my_trainer:Trainer"``. Default: ``DefaultTrainer``.
        cfg: see :func:`~hookline.engine.replay.replay`.
        replays: whether to replay.

    Returns:
        ``equal``; of both runs ``versions``, ``ranks`` and ``last_iterations``; ``config`` (a text); ``metrics``
        (``values``, ``first_difference``); and if there is a difference ``replay``: ``checkpoints``, ``iteration`` (the
        first step that differs, None if the replays are equal) and its ``rows``, each with name and both values; or
        ``impossible``, why there is none.

    Raises:
        ConfigError: a folder has no run or no ``metrics.json``, or the runs have no iteration in common.
    """
    runs = (run, other)
    for one in runs:
        for name in ("config.yaml", "metrics.json"):
            if not os.path.isfile(os.path.join(one, name)):
                raise ConfigError(f"{one}: there is no run to compare (it has no {name})")
    cls = named_trainer(trainer)
    configs = [resolved(one) for one in runs]
    for config in configs:
        config.OUTPUT_DIR = ""
    curves = [curves_of(one) for one in runs]
    metrics = compare_curves(curves[0], curves[1], 0, 1 << 62)
    if not metrics["values"]:
        raise ConfigError(f"{run} and {other} have nothing to compare: no iteration is in the metrics.json of both")
    found = metrics["first_difference"]
    if found is not None:
        found["other"] = found.pop("replay")
    report: dict[str, Any] = {
        "runs": [os.path.abspath(one) for one in runs],
        "equal": found is None,
        "config": differences(*configs),
        "versions": [environment_of(one) for one in runs],
        "ranks": [ranks_of(one, find_checkpoint(one, 1 << 62)) for one in runs],
        "last_iterations": [max(int(curve.iterations[-1]) for curve in own.values()) for own in curves],
        "metrics": metrics,
        "replay": None,
    }
    if found is not None and replays:
        start = 1 + _last_row_before(found["iteration"], curves)
        try:
            report["replay"] = _replays(report, start, found["iteration"], cls, cfg)
        except ConfigError as error:
            report["replay"] = {"impossible": str(error)}
    return report


def _last_row_before(iteration: int, curves: Sequence[Mapping[str, Curve]]) -> int:
    """Return the last iteration before another of which both runs have a metric; -1 if there is none."""
    one, other = curves
    shared = [np.intersect1d(one[name].iterations, other[name].iterations) for name in one.keys() & other.keys()]
    return max((int(rows[rows < iteration].max(initial=-1)) for rows in shared), default=-1)


def _replays(report: Mapping[str, Any], start: int, last: int, trainer: Any, cfg: CfgNode | None) -> dict[str, Any]:
    """Replay both runs from before ``start`` to ``last``, and compare the first step that differs."""
    if set(report["ranks"]) != {1}:
        raise ConfigError(
            f"the runs had {report['ranks'][0]} and {report['ranks'][1]} ranks, and the replays of diverge have one; "
            f"compare the reports of: hookline replay RUN --iter {last}"
        )
    checkpoints = [find_checkpoint(run, start) for run in report["runs"]]

    def both(iteration: int) -> list[tuple[dict[str, Any], Mapping[str, Curve]]]:
        pairs = zip(report["runs"], checkpoints, strict=True)
        each_step = ["LOG.PERIOD", 1]
        return [replay_step(run, iteration, path, trainer=trainer, cfg=cfg, overrides=each_step) for run, path in pairs]

    (one, curves), (other, others) = both(last)
    found: dict[str, Any] = {"checkpoints": [os.path.basename(path) for path in checkpoints], "iteration": None}
    first = compare_curves(curves, others, start, last)["first_difference"]
    if first is None:
        return found
    if first["iteration"] < last:
        (one, _), (other, _) = both(first["iteration"])
    return {**found, "iteration": first["iteration"], "rows": list(_different_rows(one, other))}


def _different_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of a step that differ, in the order in which the step computes them."""
    samples: list[Any] = [[sample["index"] for sample in report["samples"]] for report in (one, other)]
    values = [dict(_values(report)) for report in (one, other)]
    for name, pair in [
        ("samples", samples),
        *((name, [own.get(name) for own in values]) for name in values[0] | values[1]),
    ]:
        if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
            yield {"what": name, "run": pair[0], "other": pair[1]}


def _values(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a step by name: batch, outputs, losses, gradients (last module first), updates."""
    yield "batch", report.get("batch")
    for sample in report["samples"]:
        yield f"input of sample {sample['index']} (sum)", sample.get("sum")
    modules = [entry for entry in report["modules"] if "output" in entry]
    for entry in modules:
        yield f"output of {entry['module']} ({entry['type']})", entry["output"]
    yield from report["losses"].items()
    for entry in modules[::-1]:
        yield f"gradient of {entry['module']} ({entry['type']})", entry.get("gradient")
    for row in sorted(report.get("updates", []), key=lambda row: row["parameter"]):
        yield f"update of {row['parameter']}", row["update"]
    yield "error", report.get("error")


# ---------------------------------------------------------------------- the report


def diverge_text(report: Mapping[str, Any]) -> str:
    """Return the report as text for the console."""
    lines = ["Config: " + ("different" if report["config"] else "the same")]
    lines += [indent(report["config"], "  ")] if report["config"] else []
    lines += _pair("Versions", report["versions"]) + _pair("Ranks", report["ranks"])
    found, ends = report["metrics"]["first_difference"], report["last_iterations"]
    if found is None:
        lines.append(f"Metrics: all {report['metrics']['values']} values are equal to the bit")
        shorter = report["runs"][ends.index(min(ends))]
        until = "" if ends[0] == ends[1] else f" up to iteration {min(ends)}, the last one of {shorter}"
        lines.append(f"The runs are equal{until}.")
        return "\n".join(lines)
    values = f"{found['run']!r} and {found['other']!r}"
    lines.append(f"Metrics: the first difference is at iteration {found['iteration']}: {found['metric']} is {values}")
    replay = report["replay"]
    if replay is None:
        return "\n".join(lines)
    if "impossible" in replay:
        return "\n".join([*lines, "", f"The runs cannot be replayed: {replay['impossible']}"])
    starts = " and ".join(dict.fromkeys(name or "the beginning" for name in replay["checkpoints"]))
    lines += ["", f"Replayed both runs from {starts}."]
    if replay["iteration"] is None:
        lines.append(
            "The metrics of both replays are equal: the difference does not come from the steps as they are now. Has "
            "the code, the data, the machine or (by a resume) the config changed since one of the runs? "
            + " ".join(f"hookline replay {shlex.quote(run)} --iter {found['iteration']}" for run in report["runs"][:1])
            + " compares a run with its own metrics."
        )
        return "\n".join(lines)
    rows = replay["rows"]
    where = f"It differs first in the {rows[0]['what']}." if rows else "It differs in a metric of a hook."
    lines.append(f"The first step that differs is {replay['iteration']}. {where}")
    lines += [f"  {row['what']}\n    {_shown(row['run'])}\n    {_shown(row['other'])}" for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"  and {len(rows) - _SHOWN} more (--json)")
    return "\n".join(lines)


def _pair(title: str, values: Sequence[Any]) -> list[str]:
    one, other = (value or "not known" for value in values)
    return [f"{title}: {one}" if one == other else f"{title}: different\n  {one}\n  {other}"]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {number:.9g}" for key, number in value.items() if isinstance(number, float))
    return f"{value:.9g}" if isinstance(value, float) else str(value)
