"""Functions of all predictions and targets as metrics: ``compute_metrics(predictions, targets)``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...config import ConfigError
from ...config.signatures import what_it_takes
from ..data.transfer import move_to_device
from .collect import collect

__all__ = ["FunctionMetric"]


class FunctionMetric:
    """Keeps all predictions and targets, and calls a function with those of all ranks.

    Each sample counts once, in the order of the data set. The tensors are on the CPU; tensors whose shapes differ
    between batches become a list with one entry per sample. All ranks have all of them in memory.

    Args:
        function: called as ``function(predictions, targets)``, and with ``inputs=`` if it has a parameter of that name:
            the ``x`` of batches ``(x, y)``, otherwise the whole batch. It returns a number, or numbers by name.
        args: further arguments by name.
    """

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any] | None = None) -> None:
        self.name: str = function.__name__
        self._function = function
        self._args = dict(args or {})
        taken = what_it_takes(function)
        self.takes_inputs = taken is not None and "inputs" in taken.keywords and "inputs" not in self._args
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[tuple[Any, Any, Any]] = []

    def update(self, preds: Any, target: Any, inputs: Any = None) -> None:
        """Add one batch.

        Args:
            preds: the predictions.
            target: the targets.
            inputs: the batch; it is kept if the function takes ``inputs``.
        """
        if self.takes_inputs and isinstance(inputs, tuple | list) and len(inputs) > 1:
            inputs = inputs[0] if len(inputs) == 2 else tuple(inputs[:-1])
        self._batches.append((_on_cpu(preds), _on_cpu(target), _on_cpu(inputs) if self.takes_inputs else None))

    def compute(self) -> Any:
        """Return the function's result. Every rank calls it."""
        return self._call(all_ranks=True)

    def local_value(self) -> Any:
        """Return the function's result for this rank's batches."""
        return self._call(all_ranks=False)

    def _call(self, all_ranks: bool) -> Any:
        parts = (_joined([batch[part] for batch in self._batches], all_ranks) for part in range(3))
        preds, targets, inputs = parts
        keywords = {**self._args, **({"inputs": inputs} if self.takes_inputs else {})}
        return self._function(preds, targets, **keywords)


def _joined(batches: list[Any], all_ranks: bool) -> Any:
    try:
        return collect(batches, all_ranks)
    except ConfigError:  # tensors of several shapes, as of sequences: a list with one entry per sample
        return collect([list(batch) for batch in batches], all_ranks)


def _on_cpu(value: Any) -> Any:
    value = move_to_device(value, "cpu")
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()  # NumPy has no bfloat16
    return value
