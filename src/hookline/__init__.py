"""hookline: a training engine for PyTorch, one loop with hooks along it."""

__version__ = "0.1.0"
