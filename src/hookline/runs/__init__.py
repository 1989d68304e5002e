"""Finished and running runs: read their folders, draw and compare them. Does not import torch."""

from .comparison import Comparison, compare_runs
from .figure import draw_curves, write_curves
from .reading import Curve, Run, read_run, read_runs, select_metrics

__all__ = [
    "Comparison",
    "Curve",
    "Run",
    "compare_runs",
    "draw_curves",
    "read_run",
    "read_runs",
    "select_metrics",
    "write_curves",
]
