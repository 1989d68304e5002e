"""Print, flatten and compare evaluation results."""

import logging
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ...config import CfgNode
from ...hooks.evaluation import flatten_names as flatten_results_dict

__all__ = ["flatten_results_dict", "format_results", "print_csv_format", "verify_results"]

logger = logging.getLogger(__name__)


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log results in lines that can be pasted into a spreadsheet.

    Args:
        results: metrics by task, ``{"digits_test": {"accuracy": 0.99}}``; or a number beside the tasks.
    """
    for task, values in results.items():
        if not isinstance(values, Mapping):
            logger.info("copypaste: %s=%s", task, values)
            continue
        flat = flatten_results_dict(values)
        logger.info("copypaste: Task: %s", task)
        logger.info("copypaste: %s", ",".join(flat))
        logger.info("copypaste: %s", ",".join(_text(value, ".4f") for value in flat.values()))


def _text(value: Any, spec: str) -> str:
    """Format a number; other results of an evaluator are shown as they are."""
    return format(float(value), spec) if isinstance(value, SupportsFloat) else str(value)


def verify_results(cfg: CfgNode, results: Mapping[str, Any]) -> bool:
    """Compare results with ``cfg.TEST.EXPECTED_RESULTS``, and log those that are missed.

    Args:
        cfg: the whole config; an expectation is [set, metric, value, tolerance]. The set is "" for results without one.
        results: metrics by set.

    Returns:
        True: each expected metric exists, is finite and within its tolerance.

    Raises:
        SystemExit: an expected result was missed; the exit code is 1.
    """
    flat = flatten_results_dict(results)
    misses = []
    for task, metric, expected, tolerance in cfg.TEST.EXPECTED_RESULTS:
        name = f"{task}/{metric}" if task else metric
        if name not in flat:
            misses.append(f"{name} is not among the results ({', '.join(flat) or 'there are none'})")
        elif not (math.isfinite(flat[name]) and abs(flat[name] - expected) <= tolerance):
            misses.append(f"{name} is {flat[name]:.6g}, expected {expected:.6g} within {tolerance:.6g}")
    for miss in misses:
        logger.error("TEST.EXPECTED_RESULTS: %s", miss)
    if misses:
        raise SystemExit(1)
    if cfg.TEST.EXPECTED_RESULTS:
        logger.info("All %d expected results are met", len(cfg.TEST.EXPECTED_RESULTS))
    return True


def format_results(results: Mapping[str, Any]) -> str:
    """Results as a table: a line for each test set and metric.

    Args:
        results: metrics by set, ``{"digits_test": {"accuracy": 0.99}}``.
    """
    rows = [(*name.rpartition("/")[::2], _text(value, ".5g")) for name, value in flatten_results_dict(results).items()]
    rows.insert(0, ("set", "metric", "value"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    lines.insert(1, "  " + "-" * (sum(widths) + 4))
    return "\n".join(lines)
