"""``diverge``: say where two runs differ first, and in what."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent

import numpy as np

from ...config import CfgNode, ConfigError
from ...config.defaults import differences, resolved
from ..defaults import DefaultTrainer
from .options import named_trainer
from .recorder import Report
from .repeat import Curves, checkpoint_before, compare_curves, curves_of, environment_of, replay_step
from .samples import ranks_of


def diverge(
    run: str, other: str, *, trainer: str = "", cfg: CfgNode | None = None, replays: bool = True, most: int = 6
) -> tuple[bool, str]:
    """Compare the configs, versions and metrics of two runs. If metrics differ, replay both runs up to there.

    The replays start from the newest checkpoints before the last equal row of ``metrics.json``, or from the beginning.
    They find the first step whose metrics differ, and compare what happens in it. Nothing is written into the folders
    of the runs.

    Args:
        run, other: the folders of the runs.
        trainer: the class of the runs' trainer, as ``"my_trainer:Trainer"``. Default: ``DefaultTrainer``.
        cfg: see :func:`~hookline.engine.program.replay`.
        replays: whether to replay.
        most: how many of the differing values of the step are in the report.

    Returns:
        Whether the metrics are equal; and a report as text.

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
    changes, ranks = differences(*configs), [ranks_of(one, checkpoint_before(one, 1 << 62)) for one in runs]
    lines = ["Config: different", indent(changes, "  ")] if changes else ["Config: the same"]
    lines += _pair("Versions", [environment_of(one) for one in runs]) + _pair("Ranks", ranks)
    found = metrics["first_difference"]
    if found is None:
        ends = [max(int(curve.iterations[-1]) for curve in named.values()) for named in curves]
        until = f" up to iteration {min(ends)}, the last one of {runs[ends.index(min(ends))]}"
        lines.append(f"Metrics: all {metrics['values']} values are equal to the bit")
        lines.append(f"The runs are equal{'' if ends[0] == ends[1] else until}.")
        return True, "\n".join(lines)
    last = found["iteration"]
    lines.append(
        f"Metrics: the first difference is at iteration {last}: {found['metric']} is {found['run']!r} and "
        f"{found['replay']!r}"
    )
    if configs[0].LOG.PERIOD != configs[1].LOG.PERIOD:
        lines.append("  LOG.PERIOD differs: rows of equal runs differ, too")
    if replays and set(ranks) != {1}:
        lines.append(
            f"\nThe replays of diverge have one rank; compare the reports of: hookline replay RUN --iter {last}"
        )
    elif replays:
        try:
            lines += ["", *_replays(runs, _last_row_before(last, curves) + 1, last, cls, cfg, most)]
        except ConfigError as error:
            lines += ["", f"The runs cannot be replayed: {error}"]
    return False, "\n".join(lines)


def _pair(title: str, values: Sequence[object]) -> list[str]:
    one, other = (value or "not known" for value in values)
    return [f"{title}: {one}" if one == other else f"{title}: different\n  {one}\n  {other}"]


def _last_row_before(iteration: int, curves: Sequence[Curves]) -> int:
    """Return the last iteration before another of which both runs have a metric; -1 if there is none."""
    one, other = curves
    shared = [np.intersect1d(one[name].iterations, other[name].iterations) for name in one.keys() & other.keys()]
    return max((int(rows[rows < iteration].max(initial=-1)) for rows in shared), default=-1)


def _replays(
    runs: Sequence[str], start: int, last: int, trainer: type[DefaultTrainer], cfg: CfgNode | None, most: int
) -> Iterator[str]:
    """Replay both runs from before ``start`` to ``last``, and report the first step that differs."""
    checkpoints = [checkpoint_before(run, start) for run in runs]

    def both(iteration: int) -> list[tuple[Report, Curves]]:
        pairs = zip(runs, checkpoints, strict=True)
        return [replay_step(run, iteration, path, trainer, cfg, ["LOG.PERIOD", 1]) for run, path in pairs]

    (one, curves), (other, others) = both(last)
    first = compare_curves(curves, others, start, last)["first_difference"]
    if first is not None and first["iteration"] < last:
        (one, _), (other, _) = both(first["iteration"])
    starts = dict.fromkeys(os.path.basename(path) or "the beginning" for path in checkpoints)
    yield f"Replayed both runs from {' and '.join(starts)}."
    if first is None:
        yield (
            "The metrics of both replays are equal: the difference does not come from the steps as they are now. Has "
            "the code, the data, the machine or (by a resume) the config changed since one of the runs? "
            f"hookline replay {shlex.quote(runs[0])} --iter {last} compares a run with its own metrics."
        )
        return
    values = [dict(_values(report)) for report in (one, other)]
    rows = [(name, [named.get(name) for named in values]) for name in values[0] | values[1]]
    rows = [(name, pair) for name, pair in rows if repr(pair[0]) != repr(pair[1])]  # NaN equals NaN
    where = f"It differs first in the {rows[0][0]}." if rows else "It differs in a metric of a hook."
    yield f"The first step that differs is {first['iteration']}. {where}"
    for name, pair in rows[:most]:
        yield "\n".join([f"  {name}", *(f"    {_shown(value)}" for value in pair)])
    if len(rows) > most:
        yield f"  and {len(rows) - most} more (--most {len(rows)})"


def _values(report: Report) -> Iterator[tuple[str, object]]:
    """Yield the values of a step by name, in the order in which the step computes them."""
    yield "samples", [sample["index"] for sample in report["samples"]]
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


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {number:.9g}" for key, number in value.items() if isinstance(number, float))
    return f"{value:.9g}" if isinstance(value, float) else str(value)
