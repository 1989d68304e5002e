"""What a model is given of a batch, and what its answer means: losses while training, predictions otherwise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["ModelAdapter"]


class ModelAdapter:
    """Stands between the trainer and a model, so that the model keeps its own signature.

    It is not a module: the names in the model's state dict stay the user's.

    Args:
        loss: called as ``loss(model(x), y)`` on batches ``(x, y)``. None: the model is given the batch as it is;
            while training it returns its losses, in eval mode its predictions.
    """

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor] | None = None) -> None:
        self.loss = loss

    def losses(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Run the model on a batch and name what is to be minimised.

        Args:
            model: in training mode.
            batch: ``(x, y)`` with a loss; anything the model takes without one.

        Returns:
            Scalar tensors by name; training minimises their sum.

        Raises:
            TypeError: the batch is not ``(x, y)``, or what came back is not a loss.
        """
        if self.loss is None:
            return _named_losses(model(batch))
        x, y = _pair(batch)
        loss = self.loss(model(x), y)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(f"MODEL.LOSS must return a scalar tensor, not {_describe(loss)}; use reduction='mean'")
        return {"loss": loss}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs for a batch; with a loss the batch is ``(x, y)``, ``(x,)`` or a bare ``x``."""
        if self.loss is not None and isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
            batch = batch[0]
        return model(batch)

    def targets(self, batch: Any) -> Any:
        """What the predictions of a batch are compared with: the ``y`` of ``(x, y)``.

        Raises:
            TypeError: the batch is not ``(x, y)``.
        """
        return _pair(batch)[1]


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        f"expected a batch (x, y), got {_describe(batch)}. MODEL.LOSS and targets need such pairs; "
        'for other batches set MODEL.LOSS.NAME to "" and let the model return its losses'
    )


def _named_losses(output: Any) -> dict[str, torch.Tensor]:
    if isinstance(output, torch.Tensor):
        losses = {"total_loss": output}
    elif isinstance(loss := getattr(output, "loss", None), torch.Tensor):  # before dict: ModelOutput is one too
        losses = {"loss": loss}
    elif isinstance(output, dict):
        losses = output
    else:
        losses = {}
    if losses and all(isinstance(value, torch.Tensor) and not value.dim() for value in losses.values()):
        return losses
    raise TypeError(
        "without MODEL.LOSS the model must return its losses while training: a dict of scalar tensors, one scalar "
        f"tensor, or an object whose .loss is one. It returned {_describe(output)}. "
        "If these are predictions, set MODEL.LOSS.NAME"
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} {{{', '.join(f'{name!r}: {_describe(v)}' for name, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
