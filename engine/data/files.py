"""Data sets of files: images in folders, and tokens."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from ...config import ConfigError, Registry, component
from ...config.errors import suggest_file
from .datasets import DATASET_REGISTRY

_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

TRANSFORM_REGISTRY = Registry("TRANSFORM", Callable)
"""Transforms of samples: classes of callable objects. Those of torchvision are named "torchvision.transforms.v2:Name".
"""


@DATASET_REGISTRY.register()
class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images in one folder per class: ``root/cat/1.png``, ``root/dog/2.png``. Needs Pillow.

    Samples are pairs of an image (C, H, W), float32 from 0 to 1, and the index of its class.

    Args:
        root: the folder. Images may also be in folders below those of the classes.
        size: scale images to this height and width (a number, or both). Needed if images differ in size.
        transforms: applied to each image, in order: names, or ``{NAME: ..., ARGS: {...}}``, such as "RandomCrop",
            "RandomHorizontalFlip", "Normalize" or "torchvision.transforms.v2:RandomErasing".
        mode: "RGB", or "L" for one channel of grey.
        like: the folder whose classes are used, such as that of the training set. Default: ``root``.

    Attributes:
        classes: names of the classes, sorted.
        files: path and class of each sample.

    Raises:
        ConfigError: a folder holds no images or has other classes than ``like``; or Pillow is missing.
        FileNotFoundError: there is no such folder.
    """

    def __init__(
        self,
        root: str,
        size: int | Sequence[int] | None = None,
        transforms: Sequence[Any] = (),
        mode: Literal["RGB", "L"] = "RGB",
        like: str | None = None,
    ) -> None:
        try:
            import PIL.Image
        except ImportError as error:
            raise ConfigError("ImageFolder needs Pillow: pip install 'hookline[images]'") from error
        self._open = PIL.Image.open
        self.classes = _folders(like or root)
        if unknown := sorted(set(_folders(root)) - set(self.classes)):
            raise ConfigError(f"like: {root} has a folder {unknown[0]!r}, and {like} has not")
        self.files = [(path, label) for label, name in enumerate(self.classes) for path in _images(root, name)]
        if not self.files:
            raise ConfigError(f"root: there are no images in the folders of {root} ({', '.join(_EXTENSIONS)})")
        self._size = (size, size) if isinstance(size, int) else None if size is None else (size[0], size[1])
        self._mode = mode
        named = enumerate(map(component, transforms))
        self._transforms = [TRANSFORM_REGISTRY.build(*entry, key=f"transforms[{i}].NAME") for i, entry in named]
        # A subclass that overrides reading, perhaps with augmentation, must declare it itself.
        still = all(getattr(transform, "deterministic", False) for transform in self._transforms)
        self.deterministic = still and type(self).__getitem__ is ImageFolder.__getitem__

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        try:
            with self._open(path) as file:
                image = file.convert(self._mode)
        except Exception as error:
            error.add_note(f"image file {path}")
            raise
        if self._size is not None and image.size != self._size[::-1]:
            image = image.resize(self._size[::-1])
        pixels = torch.from_numpy(np.array(image))
        pixels = pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        made: Any = pixels.float() / 255
        for transform in self._transforms:
            made = transform(made)
        return made, label


def _folders(root: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _images(root: str, name: str) -> list[str]:
    walked = os.walk(os.path.join(root, name))
    files = [os.path.join(folder, file) for folder, _, names in walked for file in names]
    return sorted(file for file in files if file.lower().endswith(_EXTENSIONS))


@TRANSFORM_REGISTRY.register()
class Normalize:
    """Subtracts the mean and divides by the standard deviation of an image (C, H, W), whose shape it keeps.

    Args:
        mean: one number, or C, one per channel.
        std: the same.
    """

    deterministic = True

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


@TRANSFORM_REGISTRY.register()
class RandomHorizontalFlip:
    """Mirrors an image (..., H, W) left to right.

    Args:
        p: the probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(-1) if torch.rand(()) < self.p else image


@TRANSFORM_REGISTRY.register()
class RandomCrop:
    """Shifts an image (..., H, W) by up to ``padding`` pixels in each direction. What comes in from outside is 0.

    Args:
        padding: pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        self.padding = padding

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        height, width = image.shape[-2:]
        top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
        return F.pad(image, (self.padding,) * 4)[..., top : top + height, left : left + width]


@DATASET_REGISTRY.register()
class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A file of tokens, split into blocks for a language model. It is mapped into memory, not read.

    Samples are pairs of inputs and targets (block_size,) int64; the targets are the tokens that follow each input.
    What is left at the end of the file is dropped.

    Args:
        path: numbers of one type without a header, as of NumPy's ``tofile``; or any text with ``dtype`` "uint8": its
            bytes.
        block_size: tokens per sample.
        dtype: type of the numbers.

    Raises:
        ConfigError: the file is missing, or too short for one block.
        ValueError: it is empty, or its size is no multiple of the type's.
    """

    deterministic = True

    def __init__(
        self, path: str, block_size: int, dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    ) -> None:
        if not os.path.isfile(path):
            raise ConfigError(f"there is no file {path}{suggest_file(path)}")
        self._args = path, block_size, dtype
        self._tokens = np.memmap(path, dtype=dtype, mode="r")
        if not 1 <= block_size < len(self._tokens):
            raise ConfigError(f"{path} has {len(self._tokens)} tokens of type {dtype}: no block of {block_size} fits")
        self._block_size = block_size

    def __reduce__(self) -> Any:
        return type(self), self._args  # a worker maps the file again; a copied map would be read whole

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = range(len(self))[index] * self._block_size  # IndexError at the end
        block = torch.from_numpy(self._tokens[start : start + self._block_size + 1].astype(np.int64))
        return block[:-1], block[1:]
