"""Repeat one step of a finished or running run, and report what happened in it."""

from .repeat import replay
from .samples import iterations_of, samples_at

__all__ = ["iterations_of", "replay", "samples_at"]
