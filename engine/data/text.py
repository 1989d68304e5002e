"""Text: lines of a file, blocks of tokens, and Python's language reference as bytes."""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from ...config import ConfigError, locate
from .datasets import DATASET_REGISTRY, ArrayDataset
from .token_files import token_files

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
class Tokens(Dataset[Any]):
    """Files of tokens, split into blocks for a language model. The files are mapped into memory, not read.

    Samples are pairs of inputs and targets (block_size,) int64; the targets are the tokens that follow each input. The
    documents of a folder follow each other without padding. With ``documents`` the inputs are a dict: "tokens", and
    "documents", the number of each token's document in the sample, from 0, so that a model can keep documents apart;
    the target of a document's last token is -100, which losses ignore. What is left at the end of a file is dropped.

    Args:
        path: a folder of ``hookline tokenize``, or a file: numbers of one type without a header, or any text with
            ``dtype`` "uint8", its bytes. A list, or a glob pattern (``"data/part*"``), is read as one set.
        block_size: tokens per sample.
        dtype: type of the numbers in files without a header.
        documents: tell which document each token is from. Needs folders of ``hookline tokenize``.

    Raises:
        ConfigError: a file is missing, damaged, too short for one block, or has no documents.
    """

    deterministic = True

    def __init__(
        self,
        path: str | Sequence[str],
        block_size: int,
        dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16",
        documents: bool = False,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size: must be at least 1, not {block_size}")
        self._files = token_files(path, dtype)
        for file in self._files:
            if len(file.tokens) <= block_size:
                size, kind = len(file.tokens), file.tokens.dtype
                raise ConfigError(f"{file.path} has {size} tokens of type {kind}, too few for a block of {block_size}")
            if documents and file.ends is None:
                raise ConfigError(
                    f"documents: {file.path} is a file without documents; make a folder of them: hookline tokenize"
                )
        self._block_size = block_size
        self._documents = documents
        # The number of samples up to the end of each file.
        self._ends = list(accumulate((len(file.tokens) - 1) // block_size for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        index = range(len(self))[index]  # IndexError at the end
        number = bisect_right(self._ends, index)
        file = self._files[number]
        start = (index - (self._ends[number - 1] if number else 0)) * self._block_size
        stop = start + self._block_size
        block = torch.from_numpy(file.tokens[start : stop + 1].astype(np.int64))
        if not self._documents:
            return block[:-1], block[1:]
        ends = file.ends_in(start, stop)
        targets = block[1:].clone()
        targets[ends - 1] = -100
        documents = torch.from_numpy(np.searchsorted(ends, np.arange(self._block_size), side="right"))
        return {"tokens": block[:-1], "documents": documents}, targets
