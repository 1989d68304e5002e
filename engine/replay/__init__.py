"""Repeat one step of a finished or running run, and report what happened in it."""

from .diverge import diverge
from .repeat import replay
from .samples import iterations_of, samples_at

__all__ = ["diverge", "iterations_of", "replay", "samples_at"]
