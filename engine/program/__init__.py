"""Whole programs on a run: train, evaluate and predict, export, find a rate, repeat a step, compare two runs."""

from .diverge import diverge
from .repeat import replay

__all__ = ["diverge", "replay"]
