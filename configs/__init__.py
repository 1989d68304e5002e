"""Example configs, and the models, data and hooks that they name. ``project/`` is what ``hookline new`` copies."""
