"""Finished and running runs: read their folders, draw and compare them. Does not import torch."""

from .comparison import Comparison, compare_runs
from .figure import write_curves
from .reading import Curve, Run, read_run, read_runs, select_metrics

__all__ = [
    "Comparison",
    "Curve",
    "Run",
    "compare_runs",
    "read_run",
    "read_runs",
    "select_metrics",
    "write_curves",
]
