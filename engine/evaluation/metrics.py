"""Metrics with torchmetrics' protocol: ``update(preds, target)`` per batch, ``compute()`` at the end, ``reset()``.

They keep sums and counts on the device, so that batches do not wait for it. ``compute()`` adds up the ranks: the result
is that of the whole data set, on any number of ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ...config import CfgNode, Registry
from .. import comm
from ..modeling.build import build_loss
from ..modeling.outputs import terms_of
from ..modeling.token_loss import classes_second, number_of_terms

__all__ = ["METRIC_REGISTRY", "Accuracy", "Loss", "MeanMetric", "MeanSquaredError", "Metric"]


@runtime_checkable
class Metric(Protocol):
    """The protocol of metrics, as in torchmetrics."""

    def update(self, preds: Any, target: Any) -> None:
        """Add one batch."""

    def compute(self) -> Any:
        """Return the value over all batches of all ranks."""

    def reset(self) -> None:
        """Clear the state."""


METRIC_REGISTRY = Registry("METRIC", Metric)
"""Metrics for ``TEST.METRICS``. They receive their ``ARGS``, and ``cfg`` if that is their first parameter."""


class MeanMetric:
    """The mean over samples or elements. Subclasses call :meth:`add` in ``update``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the state."""
        self._sum: torch.Tensor | int = 0
        self._count: torch.Tensor | int = 0

    def add(self, total: torch.Tensor, count: torch.Tensor | int) -> None:
        """Add a batch's sum, a scalar tensor, and the number of its terms (an int, or a scalar tensor)."""
        if total.is_floating_point() and total.device.type != "mps":  # mps has no float64
            total = total.double()
        self._sum = self._sum + total.detach()
        self._count = self._count + count

    def local_value(self) -> torch.Tensor | float:
        """Return the mean of this rank, which may be a tensor on the device."""
        return self._sum / self._count if isinstance(self._sum, torch.Tensor) else float("nan")

    def compute(self) -> float:
        """Return the mean over all ranks; NaN without data."""
        shares = comm.all_gather((float(self._sum), float(self._count)))
        total, count = (sum(values) for values in zip(*shares, strict=True))
        return total / count if count else float("nan")


def local_value(metric: Any) -> Any:
    """Return a metric's value over the batches of this rank, or ``compute()`` of a metric that cannot tell it."""
    if hasattr(metric, "local_value"):
        return metric.local_value()
    for module in metric.modules() if isinstance(metric, nn.Module) else ():
        if hasattr(module, "_to_sync"):  # a metric of torchmetrics
            module._to_sync = False  # type: ignore[assignment]
    return metric.compute()


@METRIC_REGISTRY.register()
class Accuracy(MeanMetric):
    """Fraction of the targets that are among the ``top_k`` highest scores.

    Args:
        top_k: number of classes that count as the prediction. Above 1, the metric is named "accuracy_top<k>".
        ignore_index: targets with this value do not count, as in torch's ``CrossEntropyLoss``.
    """

    def __init__(self, top_k: int = 1, ignore_index: int = -100) -> None:
        super().__init__()
        self.top_k, self.ignore_index = top_k, ignore_index
        self.name = "accuracy" if top_k == 1 else f"accuracy_top{top_k}"

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add one batch.

        Args:
            preds: class scores (N, C, ...) or (N, ..., C), or class indices (N, ...) of an integer type.
            target: class indices (N, ...).

        Raises:
            ValueError: the shapes do not match.
        """
        preds = classes_second(preds, target)
        labels = preds.shape == target.shape and not preds.is_floating_point() and self.top_k == 1
        scores = preds.dim() == target.dim() + 1 and preds.shape[:1] + preds.shape[2:] == target.shape
        if not (labels or scores):
            raise ValueError(
                "Accuracy needs scores (N, C, ...) or integer classes (N, ...) for targets (N, ...); "
                f"got {tuple(preds.shape)} ({preds.dtype}) for {tuple(target.shape)}"
            )
        if labels:
            hits = preds == target
        elif self.top_k == 1:
            hits = preds.argmax(1) == target
        else:
            hits = preds.topk(self.top_k, dim=1).indices == target.unsqueeze(1)
        self.add(hits.sum(), (target != self.ignore_index).sum())


@METRIC_REGISTRY.register()
class MeanSquaredError(MeanMetric):
    """Mean over all elements of (prediction - target) squared."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add one batch, two tensors of the same shape.

        Raises:
            ValueError: the shapes differ.
        """
        if preds.shape != target.shape:
            raise ValueError(
                f"predictions {tuple(preds.shape)} and targets {tuple(target.shape)} must have the same shape"
            )
        self.add((preds - target).square().sum(), target.numel())


@METRIC_REGISTRY.register()
class Loss(MeanMetric):
    """The loss ``MODEL.LOSS`` over the whole set, as if computed in one batch.

    A loss that returns a sum is divided by the number of samples. A loss that is not torch's is taken as the mean.

    Without ``MODEL.LOSS`` it is the sum of the losses that the model returns. If it returns none in eval mode, beside
    its predictions, it is called a second time with ``model.training`` set; its submodules stay in eval mode.

    Args:
        cfg: the whole config.
    """

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self._loss: Callable[[Any, Any], Any] | None = build_loss(cfg)
        self.of_model = self._loss is None

    def add_losses(self, losses: Mapping[str, Any], samples: int) -> None:
        """Add the losses of a batch that the model computed.

        Args:
            losses: by name, and perhaps ``num_items``, the number of items that they are means of.
            samples: the number of samples in the batch, of which the losses are means otherwise.
        """
        losses = dict(losses)
        count = losses.pop("num_items", samples)
        first, *others = losses.values()
        total = sum(others, start=first)
        items = torch.as_tensor(count, device=total.device)
        self.add(torch.where(items > 0, total * items, 0.0), items)

    def update(self, preds: Any, target: Any) -> None:
        """Add one batch, with the arguments of the loss."""
        assert self._loss is not None
        loss = self._loss(preds, target)
        if not isinstance(loss, torch.Tensor):  # the mean and its number of items, or several terms
            self.add_losses(terms_of(loss), len(target))
            return
        if getattr(self._loss, "reduction", "mean") == "sum":
            self.add(loss, len(target))
            return
        weight = _terms(self._loss, target)
        self.add(torch.where(weight > 0, loss * weight, 0.0), weight)


def _terms(loss: Callable[..., Any], target: torch.Tensor) -> torch.Tensor:
    """The divisor of a batch's mean: the number of samples, or the sum of the weights of their classes."""
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or target.is_floating_point():
        return torch.tensor(len(target), device=target.device)
    return number_of_terms(loss, target)
