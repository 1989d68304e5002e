"""Compare the metrics of a replay with those of the run."""

import json
import os
import re
from typing import Any

__all__ = ["compare_rows", "environment_of"]

# Measured, so other in each run.
_MEASURED = re.compile(
    r"^(time|data_time|eta_seconds|time_p95|time_max|samples_per_s|items_per_s|flops_per_s|mfu|eval_time"
    r"|eval_samples_per_s|rss_mem|max_mem|reserved_mem|ranks/.*|iteration)$"
)


def compare_rows(run: str, replayed: str, start: int, end: int) -> dict[str, Any]:
    """Compare the rows of two ``metrics.json`` from iteration ``start`` to ``end``, to the bit.

    Returns:
        ``values``: how many were compared; ``first_difference``: None, or iteration, metric and both values.
    """
    ours, theirs = _rows(replayed), _rows(run)
    count = 0
    for iteration in sorted(theirs.keys() & ours.keys()):
        if not start <= iteration <= end:
            continue
        for name, value in theirs[iteration].items():
            if _MEASURED.match(name) or name not in ours[iteration]:
                continue
            count += 1
            now = ours[iteration][name]
            if now != value and not (now != now and value != value):
                difference = {"iteration": iteration, "metric": name, "run": value, "replay": now}
                return {"values": count, "first_difference": difference}
    return {"values": count, "first_difference": None}


def environment_of(run: str) -> str:
    """Return the versions and device that the run's ``log.txt`` names last; empty if there are none."""
    try:
        with open(os.path.join(run, "log.txt"), encoding="utf-8", errors="replace") as file:
            found = [match[1] for line in file if (match := re.search(r"hookline \S+, (torch .*)$", line))]
    except OSError:
        return ""
    return found[-1].strip() if found else ""


def _rows(folder: str) -> dict[int, dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    try:
        with open(os.path.join(folder, "metrics.json"), encoding="utf-8") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:  # the run is writing it
                    continue
                rows[row.get("iteration", -1)] = row
    except OSError:
        pass
    return rows
