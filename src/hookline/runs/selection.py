"""Which metrics are drawn, and which of them share a chart."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from ..config.errors import ConfigError, suggest
from .reading import AXES, Run

__all__ = ["COLORS", "charts_over", "is_measured", "select_metrics"]

COLORS = (
    *("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16", "#a16207", "#64748b"),
    *("#93c5fd", "#fcd34d", "#6ee7b7", "#fca5a5", "#c4b5fd", "#67e8f9", "#f9a8d4", "#bef264", "#d6a35c", "#94a3b8"),
)
"""Colors of runs, or of the metrics of one run. They are readable on white and on black."""

_MEASURED = {  # those that hookline puts: a project's own "time_to_event" or "aux_mem" may be a result
    *("time", "data_time", "forward_time", "time_p95", "time_max", "samples_per_s", "items_per_s", "flops_per_s"),
    *("mfu", "eval_time", "eval_samples_per_s", "rss_mem", "max_mem", "reserved_mem", "eta_seconds"),
    "slowest_rank",
}
_LAST = ("epoch", "loss_scale")  # their charts come last, as those of _MEASURED


def is_measured(name: str) -> bool:
    """Return whether a metric is a time, a speed or an amount of memory of hookline, which differs in each run."""
    return name in _MEASURED


def select_metrics(runs: Sequence[Run], patterns: Iterable[str] = ()) -> list[str]:
    """Return the names of metrics of the runs.

    Args:
        runs: the runs.
        patterns: names, or patterns such as ``"*/accuracy"``. None: all metrics except ``eta_seconds``, and except
            ``total_loss`` in runs whose only loss is ``loss``.

    Raises:
        ConfigError: a pattern matches no metric.
    """
    names = sorted({name for run in runs for name in run.curves})
    patterns = list(patterns)
    if not patterns:
        same = all(_equal(run, "total_loss", "loss") for run in runs)
        return sorted(
            (name for name in names if name != "eta_seconds" and not (name == "total_loss" and same)), key=_rank
        )
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            there = ", ".join(names) or "none"
            raise ConfigError(f"no metric matches {pattern!r} (there are: {there}){suggest(pattern, names)}")
        chosen += [name for name in found if name not in chosen]
    return chosen


def charts_over(runs: Sequence[Run], patterns: Iterable[str], axis: str) -> dict[str, list[str]]:
    """Return the metrics of each chart, by its title. Names with the same last part, such as ``loss`` and
    ``digits_test/loss``, share a chart, and so do all learning rates.

    Args:
        runs: the runs.
        patterns: see :func:`select_metrics`.
        axis: one of :data:`AXES`.

    Raises:
        ConfigError: a pattern matches no metric, there is no metric, or no run has this axis.
    """
    charts: dict[str, list[str]] = {}
    for name in select_metrics(runs, patterns):
        charts.setdefault("lr" if _is_rate(name) else name.rpartition("/")[2], []).append(name)
    if axis not in AXES:
        raise ConfigError(f"x must be one of {', '.join(AXES)}, not {axis!r}")
    if not charts:
        raise ConfigError(f"{', '.join(run.path for run in runs)}: there are no metrics yet")
    if not any(run.has_axis(axis) for run in runs):
        what = "the length of an epoch is not in log.txt" if axis == "epoch" else "there is no metric named time"
        raise ConfigError(f"{runs[0].path} cannot be drawn by {axis}: {what}; draw it by iteration")
    return {group[0] if len(group) == 1 else title: group for title, group in charts.items()}


def _rank(name: str) -> tuple[int, str, int, str]:
    last = name.rpartition("/")[2]
    if name in _LAST or is_measured(name):
        place = 3
    elif _is_rate(name):
        place = 2
    else:
        place = 0 if "loss" in last else 1
    return place, last, "/" in name, name


def _is_rate(name: str) -> bool:
    """Whether a metric is a learning rate; those of several optimizers are ``lr/<optimizer>``."""
    return name == "lr" or name.startswith(("lr/", "lr "))


def _equal(run: Run, first: str, second: str) -> bool:
    a, b = run.curves.get(first), run.curves.get(second)
    return a is None or (b is not None and np.array_equal(a.values, b.values, equal_nan=True))
