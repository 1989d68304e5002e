"""Text as bytes: Python's language reference, split into blocks."""

import functools

import torch

from .datasets import DATASET_REGISTRY, ArrayDataset

__all__ = ["python_docs_test", "python_docs_train"]

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
