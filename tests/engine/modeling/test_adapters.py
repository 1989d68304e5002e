from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.modeling import ModelAdapter


class HuggingFaceLike(OrderedDict):
    """Like transformers' ModelOutput: a dict whose entries are also attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Returns(nn.Module):
    """Returns a fixed output."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, batch):
        return self.output


LOSS, SCORES = torch.tensor(1.0), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (LOSS, ["total_loss"]),
        ({"cls": LOSS, "box": torch.tensor(2.0)}, ["cls", "box"]),
        (SimpleNamespace(loss=LOSS), ["loss"]),
        ((SCORES, LOSS), ["loss"]),
        ((LOSS, SCORES, None), ["loss"]),
        (HuggingFaceLike(loss=LOSS, aux_loss=torch.tensor(5.0)), ["loss"]),
        ({"loss": LOSS, "logits": SCORES, "name": "x"}, ["loss"]),
    ],
)
def test_model_may_return_its_losses_in_several_forms(output, names):
    losses = ModelAdapter().losses(Returns(output), None)
    assert list(losses) == names
    assert losses[names[0]] is LOSS


class Echo(nn.Module):
    """Records its arguments."""

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return torch.tensor(1.0, requires_grad=True)


def any_loss(output, target):
    return torch.tensor(1.0)


class OneInput(Echo):
    def forward(self, x):
        return super().forward(x)


class InputAndTarget(Echo):
    def forward(self, x, targets=None):
        return super().forward(x, targets)


class OneInputOrMore(Echo):
    def forward(self, x, mask=None):
        return super().forward(x, mask=mask)


class TwoInputs(Echo):
    def forward(self, a, b):
        return super().forward(a, b)


class Named(Echo):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class AnyName(Echo):
    def forward(self, x, **others):
        return super().forward(x=x, **others)


WITH_LOSS = {"loss": any_loss}


@dataclass
class Photo:
    a: int = 1
    b: int = 2
    label: int = 9


@pytest.mark.parametrize(
    ("model", "options", "batch", "args", "kwargs"),
    [
        # the signature decides
        (OneInput, {}, (1, 2), ((1, 2),), {}),
        (OneInput, {}, {"image": 1}, ({"image": 1},), {}),
        (OneInput, {}, {"x": 1, "y": 2}, (1,), {}),
        (OneInputOrMore, {}, (1, 2), ((1, 2),), {"mask": None}),
        (OneInput, {}, Photo(), (Photo(),), {}),
        (TwoInputs, {}, (1, 2), (1, 2), {}),
        (TwoInputs, {}, {"b": 2, "a": 1, "c": 3}, (1, 2), {}),
        (InputAndTarget, {}, [1, 2], (1, 2), {}),
        (InputAndTarget, {}, [{"image": 1}, {"image": 2}], ([{"image": 1}, {"image": 2}], None), {}),
        (AnyName, {}, {"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (Named, {}, UserDict(input_ids=1, labels=3), (), {"input_ids": 1, "attention_mask": None, "labels": 3}),
        # with a loss, without the target
        (OneInput, WITH_LOSS, (1, 9), (1,), {}),
        (OneInput, WITH_LOSS, ((1, 2), 9), ((1, 2),), {}),
        (TwoInputs, WITH_LOSS, ((1, 2), 9), (1, 2), {}),
        (TwoInputs, WITH_LOSS, {"a": 1, "b": 2, "label": 9}, (1, 2), {}),
        (TwoInputs, WITH_LOSS, ({"a": 1, "b": 2}, 9), (1, 2), {}),
        (TwoInputs, WITH_LOSS, Photo(), (1, 2), {}),
        (AnyName, WITH_LOSS, {"x": 1, "size": 2, "labels": 9}, (), {"x": 1, "size": 2}),
        (Named, WITH_LOSS, {"input_ids": 1, "labels": 9}, (), {"input_ids": 1, "attention_mask": None, "labels": None}),
        (OneInput, {**WITH_LOSS, "target": "score"}, {"x": 1, "y": 2, "score": 9}, (1,), {}),
        # a forward that takes anything, as that of peft's models
        (Echo, {}, {"image": 1, "label": 2, "num_samples": 3}, (), {"image": 1, "label": 2}),
        (Echo, {}, 1, (1,), {}),
        (Echo, {"inputs": "batch"}, {"image": 1}, ({"image": 1},), {}),
        # MODEL.INPUTS
        (OneInput, {"inputs": "batch"}, {"x": 1}, ({"x": 1},), {}),
        (OneInputOrMore, {"inputs": "tuple"}, (1, 2), (1,), {"mask": 2}),
        (OneInputOrMore, {"inputs": "kwargs"}, {"x": 1, "mask": 2, "id": 3}, (1,), {"mask": 2}),
        (OneInput, {"inputs": "batch", **WITH_LOSS}, (1, 2, 9), ((1, 2),), {}),
        # MODEL.INPUT_MAPPING
        (TwoInputs, {"input_mapping": {"left": "a", "b": "b"}}, {"left": 1, "b": 2, "a": 3}, (1, 2), {}),
        (AnyName, {"input_mapping": {"image": "x"}}, {"image": 1, "x": 2}, (), {"x": 1}),
    ],
)
def test_the_model_receives_the_parts_of_a_batch_that_it_takes(model, options, batch, args, kwargs):
    model, adapter = model(), ModelAdapter(**options)
    adapter.losses(model, batch)
    assert model.seen == (args, kwargs)
    adapter.predict(model, batch)
    assert model.seen == (args, kwargs)
    if options.get("loss"):
        assert adapter.targets(batch) == 9


CROSS_ENTROPY = {"loss": nn.CrossEntropyLoss()}


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (TwoInputs(), {"b": 1, "aa": 2}, {}, "'a'.*'aa'"),
        (OneInput(), {"image": 1, "label": 2}, WITH_LOSS, r"'x'.*batch has: image, label.*MODEL\.INPUTS"),
        (Named(), {"image": 1}, {"inputs": "kwargs"}, "batch has: image.*input_ids, attention_mask"),
        (OneInput(), {"image": 1}, {"input_mapping": {"imge": "x"}}, r"MODEL\.INPUT_MAPPING.*'image'"),
        (OneInput(), {"x": 1, "lable": 2}, WITH_LOSS, r"x, lable.*MODEL\.TARGET"),
        (OneInput(), {"x": 1, "y": 2, "label": 3}, WITH_LOSS, r"label or y.*MODEL\.TARGET"),
        (OneInput(), (1,), WITH_LOSS, r"MODEL\.LOSS"),
        # what the model returns, or the loss
        (Returns(SCORES), None, {}, r"float32 tensor \(2, 3\)"),
        (Returns({"cls": LOSS, "logits": SCORES}), None, {}, "logits"),
        (Returns({"loss": LOSS, "num_items": torch.zeros(2)}), None, {}, "num_items"),
        (Returns([SCORES]), (0, torch.tensor(0)), CROSS_ENTROPY, "must be Tensor, not list"),
        (Returns({"a": 0, "b": 0}), (0, 0), {**CROSS_ENTROPY, "output_mapping": {"aa": "input"}}, "'aa'"),
        (Returns(0), (0, 0), {"loss": lambda output, target: SCORES}, "scalar"),
        (OneInput(), 0, {**CROSS_ENTROPY, "output_mapping": {"a": "inputs"}}, r"MODEL\.OUTPUT_MAPPING.*'input'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_lists_both_names(model, batch, options, message):
    with pytest.raises((TypeError, ConfigError), match=message):
        ModelAdapter(**options).losses(model, batch)


@dataclass
class Scored:
    logits: torch.Tensor
    features: torch.Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda scores, other: {"scores": scores},
        lambda scores, other: {"features": other, "logits": scores},
        lambda scores, other: HuggingFaceLike(loss=other.mean(), logits=scores),
        namedtuple("Pair", "logits features"),
        Scored,
    ],
)
def test_torch_losses_receive_the_only_output_or_the_logits(form):
    scores, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    adapter, model = ModelAdapter(nn.CrossEntropyLoss()), Returns(form(scores, torch.zeros(4)))
    assert torch.equal(adapter.losses(model, (0, target))["loss"], nn.functional.cross_entropy(scores, target))
    assert adapter.predict(model, (0, target)) is scores
    assert adapter.losses(model, (0, target)).keys() == {"loss"}


def test_other_losses_receive_the_whole_output_or_what_the_mapping_selects():
    output = {"out": torch.ones(2), "hidden": torch.ones(3), "more": None}
    adapter, model = ModelAdapter(lambda out, y: out["out"].sum() * y), Returns(output)
    assert adapter.losses(model, (0, 3.0))["loss"] == 6.0
    assert adapter.predict(model, (0, 3.0)) is output

    def loss(labels, scores, features):
        return (scores * labels).sum() + features.sum()

    adapter = ModelAdapter(loss, output_mapping={"out": "scores", "hidden": "features"})
    assert adapter.losses(model, (0, torch.full((2,), 2.0)))["loss"] == 7.0
    assert adapter.predict(model, (0, 1)) == {"scores": output["out"], "features": output["hidden"]}
    adapter = ModelAdapter(output_mapping={"logits": "preds"})
    output = HuggingFaceLike(loss=torch.tensor(1.0), logits=torch.ones(2))
    assert adapter.predict(Returns(output), 0) is output["logits"]  # a single one
    assert list(adapter.losses(Returns(output), 0)) == ["loss"]


class OwnSteps(Echo):
    def forward(self, x):
        super().forward(x)
        return x

    def train_step(self, batch):
        x, y = batch
        return {"distance": (self(x) - y).square().mean()}


def test_a_models_train_step_is_used_for_its_losses():
    model, batch = OwnSteps(), (torch.zeros(2), torch.ones(2))
    assert ModelAdapter().losses(model, batch) == {"distance": torch.tensor(1.0)}
    assert ModelAdapter().predict(model, batch) is batch[0]  # forward takes the inputs without the target
    model.predict_step = lambda batch: "prediction"
    assert ModelAdapter(nn.MSELoss()).predict(model, batch) == "prediction"


def test_a_train_step_in_data_parallel_is_called_on_one_device_with_a_warning(log):
    adapter, batch = ModelAdapter(), (torch.zeros(2), torch.ones(2))
    for _ in range(2):
        assert adapter.losses(nn.DataParallel(OwnSteps()), batch) == {"distance": torch.tensor(1.0)}
    ModelAdapter().losses(nn.DataParallel(Returns(LOSS)), batch)  # this one is used
    assert log.text.count("DataParallel is not used: its model has train_step()") == 1


@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_losses_include_the_number_of_items(count):
    for output in ({"loss": LOSS, "num_items": count, "logits": SCORES}, SimpleNamespace(loss=LOSS, num_items=count)):
        losses = ModelAdapter().losses(Returns(output), 0)
        assert losses == {"loss": LOSS, "num_items": count}
        losses.pop("num_items")
        assert not isinstance(output, dict) or "num_items" in output  # the model's dict does not change
    assert ModelAdapter(lambda out, y: (LOSS, count)).losses(Returns(0), (0, 0)) == {"loss": LOSS, "num_items": count}


def test_a_loss_beside_others_is_summed_with_a_warning_or_refused(caplog):
    terms = {"loss": LOSS, "ce": LOSS, "kl": LOSS}
    adapter, net = ModelAdapter(), Returns(terms)
    for _ in range(2):
        assert adapter.losses(net, SCORES) == terms
    assert caplog.text.count("'loss' is returned beside ce, kl") == 1
    with pytest.raises(TypeError, match="'loss' is returned beside ce, kl"):
        ModelAdapter(lambda output, target: terms).losses(nn.Identity(), (SCORES, SCORES))
