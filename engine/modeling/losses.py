"""Cross entropy where the scores of a sample are of several tokens or pixels."""

import logging
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from .build import LOSS_REGISTRY

__all__ = ["CrossEntropyLoss", "TokenCrossEntropyLoss", "classes_second", "number_of_terms"]

logger = logging.getLogger(__name__)


@LOSS_REGISTRY.register()
class TokenCrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross entropy over the tokens that count, and their number.

    Batches on different ranks, and micro-batches, may have different numbers of such tokens: padding does not count.
    With the number, the gradient is that of the mean over all tokens of the global
    batch. It is computed in float32. Without any token the loss is 0.

    Args:
        ignore_index: the target of tokens that do not count.
        label_smoothing: the share of the target that all classes have in equal parts.
        shift: the target of a token is that of the next position, as labels of Hugging Face's causal language models.

    Shapes:
        scores (N, C, ...) or (N, ..., C); target (N, ...) of class indices. Returns a scalar, and an int64 scalar.
    """

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0, shift: bool = False) -> None:
        super().__init__(ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.shift = shift

    def forward(  # type: ignore[override]
        self, scores: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = classes_second(scores, target).float()
        if self.shift:
            scores, target = scores[..., :-1], target[..., 1:]
        return _mean_and_count(self, scores, target)


@LOSS_REGISTRY.register()
class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's ``CrossEntropyLoss``. Scores of tokens or pixels may also be (N, ..., C), and their number counts.

    With targets (N,) of class indices, with probabilities, and without a mean it is torch's. Otherwise it returns the
    mean and the number of targets that count, as :class:`TokenCrossEntropyLoss`.
    """

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if target.dim() < 2 or target.is_floating_point():
            return super().forward(input, target)
        scores = classes_second(input, target)
        return super().forward(scores, target) if self.reduction != "mean" else _mean_and_count(self, scores, target)


def classes_second(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return scores (N, C, ...) or (N, ..., C) as (N, C, ...), where target (N, ...) has class indices.

    If both fit, C is the second dimension, as in torch.
    """
    shape = scores.shape
    if target.dim() < 2 or shape[:-1] != target.shape:
        return scores
    if shape[:1] + shape[2:] != target.shape:
        return scores.movedim(-1, 1)
    if not torch.compiler.is_compiling():
        _note_ambiguous(tuple(shape))
    return scores


@cache
def _note_ambiguous(shape: tuple[int, ...]) -> None:
    logger.warning(
        "Scores of shape %s are read as (N, classes, ...), as torch does, but also fit (N, ..., classes): if the "
        "classes come last, move them with MODEL.OUTPUT_FUNCTION",
        shape,
    )


def number_of_terms(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: torch.Tensor) -> torch.Tensor:
    """Return the divisor of the loss's mean: the number of targets that count, or the sum of their classes' weights."""
    counted = target != loss.ignore_index
    if loss.weight is None:
        return counted.sum()
    return (loss.weight[torch.where(counted, target, 0)] * counted).sum()


def _mean_and_count(
    loss: nn.CrossEntropyLoss, scores: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(
        scores,
        target,
        loss.weight,
        ignore_index=loss.ignore_index,
        reduction="sum",
        label_smoothing=loss.label_smoothing,
    )
    count = number_of_terms(loss, target)
    return total / torch.where(count > 0, count, 1), count
