"""hookline: a training engine for PyTorch, one loop with hooks along it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.engine import Trainer as Trainer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # imported on demand: hookline.config works without torch
        from hookline.engine import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
