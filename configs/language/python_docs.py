"""Python's language reference (``pydoc_data.topics``, about 460,000 bytes), in blocks of bytes.

The text differs slightly between versions of Python.
"""

import functools
from typing import Literal

import torch

from hookline.engine.data import ArrayDataset

# One of this many blocks is in the test set.
_TEST_EVERY = 10


def blocks(split: Literal["train", "test"], block_size: int = 128) -> ArrayDataset:
    """The blocks of a part of the text.

    Args:
        split: "test" has every tenth block, which "train" leaves out.
        block_size: bytes per block.

    Returns:
        Inputs (N, block_size) int64, and targets of the same shape: the byte that follows each.
    """
    text = _text()
    # Neighbours share one byte: the last target of a block is the first input of the next.
    pieces = text.unfold(0, block_size + 1, block_size)
    held_out = torch.arange(len(pieces)) % _TEST_EVERY == _TEST_EVERY - 1
    part = pieces[held_out if split == "test" else ~held_out]
    return ArrayDataset(part[:, :-1].contiguous(), part[:, 1:].contiguous())


@functools.cache
def _text() -> torch.Tensor:
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
