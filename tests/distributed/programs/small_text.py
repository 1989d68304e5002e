"""A small data set of texts of different lengths: ranks and micro-batches differ in their numbers of targets.

One of two ranks evaluates one batch more than the other.
"""

import torch

from hookline.configs.language.python_docs import blocks
from hookline.engine.data import ArrayDataset


def texts(split, size):
    inputs, targets = (tensor[:size] for tensor in blocks(split, 32).tensors)
    ends = 8 + torch.arange(size)[:, None] * 5 % 25
    return ArrayDataset(inputs, targets.where(torch.arange(32) < ends, -100))


def train():
    return texts("train", 330)


def test():
    return texts("test", 21)
