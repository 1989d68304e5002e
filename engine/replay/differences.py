"""Compare the metrics of a replay with those of the run."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...runs.reading import Curve, is_measured, read_run

__all__ = ["compare_curves", "curves_of", "environment_of"]


def curves_of(folder: str) -> Mapping[str, Curve]:
    """Return the metrics of a run by name; none if it has no ``metrics.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    return read_run(folder).curves if os.path.isfile(os.path.join(folder, "metrics.json")) else {}


def compare_curves(run: Mapping[str, Curve], replay: Mapping[str, Curve], start: int, end: int) -> dict[str, Any]:
    """Compare metrics from iteration ``start`` to ``end``, to the bit. Measured ones, such as times, are left out.

    ``metrics.json`` has null for NaN and for infinite values, so these are equal here.

    Returns:
        ``values``: how many were compared; ``first_difference``: None, or iteration, metric and both values.
    """
    count, found = 0, []
    for name in run.keys() & replay.keys():
        if is_measured(name):
            continue
        shared, ours, theirs = np.intersect1d(run[name].iterations, replay[name].iterations, return_indices=True)
        within = (shared >= start) & (shared <= end)
        before, now = run[name].values[ours][within], replay[name].values[theirs][within]
        count += len(now)
        for place in np.flatnonzero((before != now) & ~(np.isnan(before) & np.isnan(now)))[:1]:
            found.append((int(shared[within][place]), name, float(before[place]), float(now[place])))
    keys = ("iteration", "metric", "run", "replay")
    return {"values": count, "first_difference": dict(zip(keys, min(found), strict=True)) if found else None}


def environment_of(run: str) -> str:
    """Return the versions and device that the run's ``log.txt`` names last; empty if there are none."""
    try:
        with open(os.path.join(run, "log.txt"), encoding="utf-8", errors="replace") as file:
            found = [match[1] for line in file if (match := re.search(r"hookline \S+, (torch .*)$", line))]
    except OSError:
        return ""
    return found[-1].strip() if found else ""
