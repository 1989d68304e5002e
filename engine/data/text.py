"""Text: lines of a file, blocks of tokens, and Python's language reference as bytes."""

import functools
import os
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from ...config import ConfigError, locate, suggest_file
from .datasets import DATASET_REGISTRY, ArrayDataset

__all__ = ["TextLines", "Tokens", "python_docs_test", "python_docs_train"]

# One of this many blocks is in the test set.
_TEST_EVERY = 10


@DATASET_REGISTRY.register()
def python_docs_train(block_size: int = 128) -> ArrayDataset:
    """Python's language reference (``pydoc_data.topics``, about 460,000 bytes), in blocks.

    The text differs slightly between versions of Python.

    Args:
        block_size: bytes per block.

    Returns:
        Inputs (N, block_size) int64, and targets of the same shape: the byte that follows each.
    """
    return _blocks(block_size)[0]


@DATASET_REGISTRY.register()
def python_docs_test(block_size: int = 128) -> ArrayDataset:
    """Every tenth block of the text, which the training set leaves out."""
    return _blocks(block_size)[1]


@functools.cache
def _blocks(block_size: int) -> tuple[ArrayDataset, ArrayDataset]:
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    # Neighbours share one byte: the last target of a block is the first input of the next.
    blocks = text.unfold(0, block_size + 1, block_size)
    test = torch.arange(len(blocks)) % _TEST_EVERY == _TEST_EVERY - 1
    train, held_out = (
        ArrayDataset(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in (blocks[~test], blocks[test])
    )
    return train, held_out


@DATASET_REGISTRY.register()
class TextLines(Dataset[Any]):
    """The lines of a text file that are not empty: strings, or with a tokenizer int64 tensors of their tokens.

    Args:
        path: the file, in UTF-8.
        tokenizer: "package.module:function", called with a line, returns a list of ints. Default: none.
        max_length: tokens (or characters) of a line, at most.

    Raises:
        ConfigError: the file has no lines, or there is no such tokenizer.
    """

    deterministic = True

    def __init__(self, path: str, tokenizer: str | None = None, max_length: int | None = None) -> None:
        with open(path, encoding="utf-8") as file:
            self.lines = [text for line in file if (text := line.rstrip("\n"))]
        if not self.lines:
            raise ConfigError(f"{path} has no lines")
        self._tokenize = None if tokenizer is None else locate(tokenizer)
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        line = self.lines[index]
        if self._tokenize is None:
            return line[: self._max_length]
        return torch.tensor(self._tokenize(line)[: self._max_length], dtype=torch.int64)


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
        ConfigError: the file is missing, cut, or too short for one block.
    """

    deterministic = True

    def __init__(
        self, path: str, block_size: int, dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size: must be at least 1, not {block_size}")
        if not os.path.isfile(path):
            raise ConfigError(f"there is no file {path}{suggest_file(path)}")
        size, rest = divmod(os.path.getsize(path), np.dtype(dtype).itemsize)
        if rest:
            raise ConfigError(f"{path} does not end with a whole {dtype}: it was cut, or its dtype is another")
        if size <= block_size:
            raise ConfigError(f"{path} has {size} tokens of type {dtype}, too few for a block of {block_size}")
        self._args = path, block_size, dtype
        self._tokens = np.memmap(path, dtype=dtype, mode="r")
        self._block_size = block_size

    def __reduce__(self) -> Any:
        return type(self), self._args  # a worker maps the file again; a copied map would be read whole

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = range(len(self))[index] * self._block_size  # IndexError at the end
        block = torch.from_numpy(self._tokens[start : start + self._block_size + 1].astype(np.int64))
        return block[:-1], block[1:]
