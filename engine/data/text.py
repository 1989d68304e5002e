"""Text, as bytes: the language reference that comes with Python, cut into pieces."""

import functools

import torch

from .datasets import DATASET_REGISTRY, ArrayDataset

__all__ = ["python_docs_test", "python_docs_train"]

# Every so many pieces one is for testing.
_TEST_EVERY = 10


@DATASET_REGISTRY.register()
def python_docs_train(block_size: int = 128) -> ArrayDataset:
    """The help texts of Python's language reference (about 460,000 bytes), in pieces.

    They come with Python itself (``pydoc_data.topics``), so they differ a little from one version of it to the next.

    Args:
        block_size: bytes in a piece.

    Returns:
        Inputs (N, block_size) int64 and, as targets of the same shape, the byte that follows each.
    """
    return _pieces(block_size)[0]


@DATASET_REGISTRY.register()
def python_docs_test(block_size: int = 128) -> ArrayDataset:
    """Every tenth piece of that text, which the training set leaves out."""
    return _pieces(block_size)[1]


@functools.cache
def _pieces(block_size: int) -> tuple[ArrayDataset, ArrayDataset]:
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    pieces = text.unfold(0, block_size + 1, block_size)  # neighbours share one byte, a target here and an input there
    test = torch.arange(len(pieces)) % _TEST_EVERY == _TEST_EVERY - 1
    train, held_out = (
        ArrayDataset(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in (pieces[~test], pieces[test])
    )
    return train, held_out
