"""Repeat one step of a finished or running run, and report what happened in it."""

from .diverge import diverge
from .repeat import replay
from .samples import samples_at

__all__ = ["diverge", "replay", "samples_at"]
