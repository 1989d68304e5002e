"""The loss of language models."""

import torch
from torch import nn
from torch.nn import functional as F

from .build import LOSS_REGISTRY

__all__ = ["TokenCrossEntropyLoss"]


@LOSS_REGISTRY.register()
class TokenCrossEntropyLoss(nn.Module):
    """The cross entropy over the tokens that count, and their number.

    Batches on different ranks, and micro-batches, may have different numbers of such tokens: padding and the ends of
    packed documents do not count. With the number, the gradient is that of the mean over all tokens of the global
    batch. It is computed in float32. Without any token the loss is 0.

    Args:
        ignore_index: the target of tokens that do not count.

    Shapes:
        scores (N, C, ...); target (N, ...) of class indices. Returns a scalar, and a scalar int64 tensor.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = (target != self.ignore_index).sum()
        total = F.cross_entropy(scores.float(), target, ignore_index=self.ignore_index, reduction="sum")
        return total / count.clamp(min=1), count
