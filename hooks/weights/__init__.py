"""Hooks that act on weights: EMA, SWA, precise batch norm, freezing."""
