"""Finished and running runs: read their folders, draw and compare them. Does not import torch."""

from .comparison import compare_runs
from .figure import write_curves
from .reading import Run, read_run, read_runs

__all__ = [
    "Run",
    "compare_runs",
    "read_run",
    "read_runs",
    "write_curves",
]
