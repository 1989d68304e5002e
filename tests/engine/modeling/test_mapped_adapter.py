"""Batches and outputs in other forms: dataclasses, functions of them, other step methods."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import move_to_device
from hookline.engine.data.batches import split_batch
from hookline.engine.modeling import ModelAdapter, build_adapter
from hookline.engine.modeling.build import check_model

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    label: torch.Tensor
    names: tuple = ("a", "b")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


class Whole(Named):
    def forward(self, batch):
        return {"loss": nn.functional.cross_entropy(self.layer(batch.x), batch.label)}


def test_a_dataclass_is_used_like_a_dict():
    model, adapter = Named(), ModelAdapter(nn.CrossEntropyLoss())
    expected = adapter.losses(model, {"x": X, "label": Y})["loss"]
    assert torch.equal(adapter.losses(model, Batch(X, Y))["loss"], expected)
    assert torch.equal(adapter.predict(model, Batch(X, Y)), model(X))
    assert torch.equal(adapter.targets(Batch(X, Y)), Y)
    assert ModelAdapter().losses(Whole(), Batch(X, Y))["loss"].dim() == 0


def test_a_dataclass_is_moved_and_split():
    moved = move_to_device(Batch(X, Y), "meta")
    assert (type(moved), moved.x.device.type, moved.names) == (Batch, "meta", ("a", "b"))
    (first, share), (second, _) = split_batch(Batch(X, Y), 2)
    assert (type(first), share) == (Batch, 0.5)
    assert torch.equal(torch.cat([first.x, second.x]), X)


def normalize(batch):
    return {"x": batch[0] / 2, "label": batch[1]}


def halve(batch):
    return {"x": batch[0] / 4, "label": batch[1]}


def negate(output):
    return -output


def mapped_config(**keys):
    cfg = get_cfg()
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.MODEL.DEVICE = "cpu"
    for key, name in keys.items():
        section, _, last = key.partition("_")
        cfg[section][last] = f"{__name__}:{name}"
    return cfg


def test_functions_change_batches_and_outputs():
    model = Named()
    adapter = build_adapter(mapped_config(MODEL_INPUT_FUNCTION="normalize", MODEL_OUTPUT_FUNCTION="negate"))
    expected = nn.functional.cross_entropy(-model(X / 2), Y)
    torch.testing.assert_close(adapter.losses(model, (X, Y))["loss"], expected)
    torch.testing.assert_close(adapter.predict(model, (X, Y)), -model(X / 2))
    assert torch.equal(adapter.targets((X, Y)), Y)


def test_evaluation_may_have_functions_of_its_own():
    model = Named()
    adapter = build_adapter(mapped_config(MODEL_INPUT_FUNCTION="normalize", TEST_INPUT_FUNCTION="halve"))
    torch.testing.assert_close(adapter.losses(model, (X, Y))["loss"], nn.functional.cross_entropy(model(X / 2), Y))
    torch.testing.assert_close(adapter.predict(model, (X, Y)), model(X / 4))


def test_a_function_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"MODEL.INPUT_FUNCTION: .*'normalise'.*did you mean 'normalize'"):
        check_model(mapped_config(MODEL_INPUT_FUNCTION="normalise"))


class Outputs(Named):
    def forward(self, x, label=None):
        logits = self.layer(x)
        loss = {} if label is None else {"nll": nn.functional.cross_entropy(logits, label), "other": logits.sum()}
        return {**loss, "scores": logits}


def test_without_a_loss_an_output_may_be_mapped_to_it():
    model, adapter = Outputs(), ModelAdapter(output_mapping={"nll": "loss", "scores": "preds"})
    batch = {"x": X, "label": Y}
    assert list(adapter.losses(model, batch)) == ["loss"]
    predictions, losses = adapter.predict_with_losses(model, batch)
    assert torch.equal(predictions, model(X)["scores"])
    assert torch.equal(losses["loss"], model(**batch)["nll"])
    assert torch.equal(adapter.predict(model, {"x": X}), model(X)["scores"])


def test_label_smoothing_for_a_model_with_its_own_loss():
    model, adapter = (
        Outputs(),
        ModelAdapter(nn.CrossEntropyLoss(label_smoothing=0.1), output_mapping={"scores": "input"}),
    )
    expected = nn.functional.cross_entropy(model(X)["scores"], Y, label_smoothing=0.1)
    torch.testing.assert_close(adapter.losses(model, {"x": X, "label": Y})["loss"], expected)


class Steps(Named):
    def fit(self, batch):
        return {"fit": self(batch[0]).square().mean()}

    def guess(self, batch):
        return self(batch[0]).argmax(1)


def test_steps_of_other_names():
    model, adapter = Steps(), ModelAdapter(train_step="fit", predict_step="guess")
    assert list(adapter.losses(model, (X, Y))) == ["fit"]
    assert adapter.predict(model, (X, Y)).shape == (4,)
    with pytest.raises(ConfigError, match=r"MODEL.TRAIN_STEP: Steps has no method 'fitt'; did you mean 'fit'"):
        ModelAdapter(train_step="fitt").losses(model, (X, Y))
