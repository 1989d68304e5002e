"""``hookline benchmark gpu``: check on a GPU what the documentation calls unverified, and measure it."""

from .run import PARTS, run

__all__ = ["PARTS", "run"]
