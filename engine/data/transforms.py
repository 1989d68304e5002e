"""Transforms of image tensors (C, H, W) with values from 0 to 1, for the data sets that take ``transforms``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ...config import Registry, component

__all__ = ["TRANSFORM_REGISTRY", "Normalize", "RandomCrop", "RandomHorizontalFlip", "Transforms"]

TRANSFORM_REGISTRY = Registry("TRANSFORM", Callable)
"""Transforms of samples: classes of callable objects. Those of torchvision are named "torchvision.transforms.v2:Name".
"""


class Transforms:
    """Calls transforms one after the other.

    Args:
        entries: components of :data:`TRANSFORM_REGISTRY`: names, or ``{"NAME": ..., "ARGS": {...}}``.
        key: the argument that holds them, for errors.

    Attributes:
        deterministic: whether none of them draws random numbers.
    """

    def __init__(self, entries: Sequence[Any], key: str = "transforms") -> None:
        self._transforms = []
        for i, entry in enumerate(entries):
            name, args = component(entry)
            built = TRANSFORM_REGISTRY.build(name, args, key=f"{key}[{i}].ARGS")
            self._transforms.append(built)
        self.deterministic = all(getattr(one, "deterministic", False) for one in self._transforms)

    def __call__(self, sample: Any) -> Any:
        for transform in self._transforms:
            sample = transform(sample)
        return sample


@TRANSFORM_REGISTRY.register()
class Normalize:
    """Subtracts the mean and divides by the standard deviation.

    Args:
        mean: one number, or one per channel.
        std: the same.
    """

    deterministic = True

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


@TRANSFORM_REGISTRY.register()
class RandomHorizontalFlip:
    """Mirrors an image left to right.

    Args:
        p: the probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(-1) if torch.rand(()) < self.p else image


@TRANSFORM_REGISTRY.register()
class RandomCrop:
    """Shifts an image by up to ``padding`` pixels in each direction. What comes in from outside is 0.

    Args:
        padding: pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        self.padding = padding

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        height, width = image.shape[-2:]
        top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
        return F.pad(image, (self.padding,) * 4)[..., top : top + height, left : left + width]
