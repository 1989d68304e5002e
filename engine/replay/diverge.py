"""``diverge``: say where two runs part, and in what."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...config import CfgNode, ConfigError
from ...config.compare import differences, resolved
from ...hooks.writers.fingerprints import FINGERPRINTS_FILE
from ...runs.reading import Curve
from ..options import named_trainer
from ..setup.report import describe_environment
from .differences import compare_curves, curves_of, environment_of
from .diverge_steps import compare_steps
from .fingerprints import compare_fingerprints, fingerprints_of
from .repeat import find_checkpoint
from .run_config import ranks_of

__all__ = ["diverge"]


def diverge(
    run: str, other: str, *, trainer: str = "", cfg: CfgNode | None = None, replays: bool = True
) -> dict[str, Any]:
    """Compare two runs: their configs, versions, metrics and fingerprints. If they differ, replay both up to there.

    The replays start from the newest checkpoints before the difference, or from the beginning, and write nothing into
    the folders of the runs. They are compared module by module, in each step since the last equal fingerprint or
    metrics.

    Args:
        run, other: the folders of the runs.
        trainer: the class of the runs' trainer, as ``"my_trainer:Trainer"``. Default: ``DefaultTrainer``.
        cfg: see :func:`~hookline.engine.replay.replay`.
        replays: whether to replay.

    Returns:
        ``equal``; of both runs ``last_iterations`` in their files, ``versions`` and ``ranks``; ``version_now``;
        ``config`` (a text); ``metrics`` (``values``, ``first_difference``) and ``fingerprints`` (``lines``,
        ``last_equal``, ``first_difference``); ``replay``: see :func:`compare_steps`; ``impossible``: why there is none.

    Raises:
        ConfigError: a folder has no run; or the runs have neither metrics nor fingerprints of the same iterations.
    """
    runs = (run, other)
    for one in runs:
        for name in ("config.yaml", "metrics.json"):
            if not os.path.isfile(os.path.join(one, name)):
                raise ConfigError(f"{one}: there is no run to compare (it has no {name})")
    named_trainer(trainer)
    configs = [resolved(one) for one in runs]
    for config in configs:
        config.OUTPUT_DIR = ""
    curves = [curves_of(one) for one in runs]
    found = compare_curves(curves[0], curves[1], 0, 1 << 62)
    metric = found["first_difference"]
    if metric is not None:
        metric["other"] = metric.pop("replay")
    rows = [fingerprints_of(one) for one in runs]
    prints = compare_fingerprints(*rows)
    if not found["values"] and not prints["lines"]:
        raise ConfigError(
            f"{run} and {other} have nothing to compare: no iteration is in the metrics.json, or in the "
            f"{FINGERPRINTS_FILE} of the hook Fingerprints, of both"
        )
    report: dict[str, Any] = {
        "runs": [os.path.abspath(one) for one in runs],
        "last_iterations": [
            max([-1, *rows_of, *(int(curve.iterations[-1]) for curve in curves_of.values())])
            for rows_of, curves_of in zip(rows, curves, strict=True)
        ],
        "config": differences(*configs),
        "versions": [environment_of(one) for one in runs],
        "version_now": describe_environment(),
        "ranks": [ranks_of(one, find_checkpoint(one, 1 << 62)) for one in runs],
        "metrics": found,
        "fingerprints": prints,
        "equal": metric is None and prints["first_difference"] is None,
        "replay": None,
    }
    if replays and not report["equal"]:
        last = min(one["iteration"] for one in (metric, prints["first_difference"]) if one is not None)
        first = 1 + max(prints["last_equal"], _last_row_before(last, curves))
        try:
            report["replay"] = compare_steps(runs, first, last, report["ranks"], trainer, cfg)
        except ConfigError as error:
            report["replay"] = {"impossible": str(error)}
    return report


def _last_row_before(iteration: int, curves: Sequence[Mapping[str, Curve]]) -> int:
    """Return the last iteration before another of which both runs have a metric; -1 if there is none."""
    one, other = curves
    shared = [np.intersect1d(one[name].iterations, other[name].iterations) for name in one.keys() & other.keys()]
    return max((int(rows[rows < iteration].max(initial=-1)) for rows in shared), default=-1)
