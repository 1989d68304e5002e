"""A model of transformers, as it is, on lines of text."""

import inspect
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import Dataset

_MODULES = ("argparse", "asyncio.streams", "csv", "json.decoder", "logging", "pathlib", "tarfile", "textwrap")
_TEST_EVERY = 5


class CodeOrProse(Dataset[dict[str, torch.Tensor]]):
    """Lines of Python's standard library (label 0) and of its language reference (label 1), as bytes.

    Samples are dicts with the names of transformers: input_ids (length,), attention_mask (length,), labels ().

    Args:
        train: the training lines, or every fifth line.
        length: bytes of a line.
        number: lines of each class.
    """

    deterministic = True

    def __init__(self, train: bool, length: int = 40, number: int = 500) -> None:
        from pydoc_data.topics import topics

        code = "\n".join(inspect.getsource(import_module(name)) for name in _MODULES)
        texts = [_lines(code)[:number], _lines("\n".join(topics.values()))[:number]]
        lines = [(line, label) for label, text in enumerate(texts) for line in text]
        self.lines = [pair for i, pair in enumerate(lines) if (i % _TEST_EVERY > 0) == train]
        self.length = length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line, label = self.lines[index]
        tokens = [byte + 1 for byte in line.encode()][: self.length]
        missing = self.length - len(tokens)
        return {
            "input_ids": torch.tensor(tokens + [0] * missing),
            "attention_mask": torch.tensor([1] * len(tokens) + [0] * missing),
            "labels": torch.tensor(label),
        }


def _lines(text: str) -> list[str]:
    """The different lines with at least 20 characters, without indentation."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if len(line.strip()) >= 20))


def tiny_bert(num_labels: int = 2, hidden_size: int = 48, layers: int = 2) -> Any:
    """BertForSequenceClassification for bytes, with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=257,
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * hidden_size,
            max_position_embeddings=64,
            num_labels=num_labels,
        )
    )
