"""Metrics of what model.generate() returns."""

import pytest
import torch
from torch import nn

from hookline import Trainer


class Repeats(nn.Module):
    """Generates as many tokens as the first one says, and one more per ``more``."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(10, 10)

    def forward(self, input_ids, labels=None):
        logits = self.scores(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def generate(self, input_ids, more=0):
        return torch.cat([input_ids, input_ids[:, -1:].repeat(1, int(input_ids[0, 0]) + more)], 1)


DATA = [{"input_ids": torch.full((2,), i), "labels": torch.full((2,), i)} for i in range(4)]
SEEN = {}


def generated(predictions, targets):
    SEEN["generated"] = predictions
    return float(len(predictions))


def forward(predictions, targets):
    SEEN["forward"] = predictions
    return 0.0


generated.generates = True


@pytest.fixture
def make(tmp_path):
    def make(*metrics):
        return Trainer(
            Repeats, DATA, DATA, metrics=list(metrics), lr=0.1, length=1, batch_size=1, seed=0, output_dir=tmp_path,
            config={"TEST": {"GENERATE": {"more": 1}}},
        )  # fmt: skip

    return make


def test_metrics_that_ask_and_predictions_get_generated_tokens_padded_to_the_longest(make):
    assert make("Loss", generated, forward).evaluate()["test"]["generated"] == 4
    assert SEEN["generated"].tolist() == [[i] * (3 + i) + [0] * (3 - i) for i in range(4)]
    assert SEEN["forward"].shape == (4, 2, 10)
    found = make(generated).predict(DATA, generate=True, pad_value=-1, metrics=True)
    assert found.outputs.tolist() == [[i] * (3 + i) + [-1] * (3 - i) for i in range(4)]
    assert found.metrics["generated"] == 4


def test_a_model_that_cannot_generate_is_named(make):
    trainer = make(generated)
    trainer.model.generate = None
    with pytest.raises(TypeError, match="generate"):
        trainer.evaluate()
