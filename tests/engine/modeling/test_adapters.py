import copy
import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.config.signatures import what_it_takes
from hookline.engine.modeling import ModelAdapter, adapters


@dataclass
class Output:
    loss: torch.Tensor


class Returns(nn.Module):
    """Returns a fixed output."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, batch):
        return self.output


def test_with_a_loss_batches_are_pairs():
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    losses = adapter.losses(model, (x, y))
    assert list(losses) == ["loss"]
    assert torch.equal(losses["loss"], nn.functional.cross_entropy(model(x), y))
    for batch in ((x, y), [x, y], (x,), x):
        assert torch.equal(adapter.predict(model, batch), model(x))
    assert adapter.targets((x, y)) is y


def test_without_a_loss_the_model_receives_the_whole_batch():
    model = nn.Identity()
    batch = {"image": torch.zeros(2)}
    assert ModelAdapter().predict(model, batch) is batch


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (torch.tensor(1.0), ["total_loss"]),
        ({"cls": torch.tensor(1.0), "box": torch.tensor(2.0)}, ["cls", "box"]),
        (Output(torch.tensor(1.0)), ["loss"]),
        ((torch.zeros(2, 3), torch.tensor(1.0)), ["loss"]),
        ((torch.tensor(1.0), torch.zeros(2, 3), None), ["loss"]),
    ],
)
def test_model_may_return_its_losses_in_several_forms(output, names):
    assert list(ModelAdapter().losses(Returns(output), None)) == names


@pytest.mark.parametrize(
    ("output", "described"),
    [
        (torch.zeros(4, 10), r"a float32 tensor \(4, 10\)"),
        ({"loss": 1.0}, "a dict {loss: float}"),
        ({}, "a dict {}"),
        (None, "a NoneType"),
        ((torch.zeros(()), 2), r"a tuple \(float32 tensor \(\), int\)"),
        ((torch.zeros(()), torch.zeros(())), r"a tuple \(float32 tensor \(\), float32"),
        ((torch.zeros(2, 3), None), r"a tuple \(float32 tensor \(2, 3\), NoneType\)"),
    ],
)
def test_other_outputs_are_described_in_the_error(output, described):
    with pytest.raises(TypeError, match=described):
        ModelAdapter().losses(Returns(output), None)


@pytest.mark.parametrize("batch", [torch.zeros(2), (1,), (1, 2, 3), {"x": 1}])
def test_batch_without_inputs_and_target_is_an_error_naming_the_key(batch):
    with pytest.raises(TypeError, match=r"MODEL\.LOSS"):
        ModelAdapter(nn.MSELoss()).losses(nn.Identity(), batch)


def test_loss_without_reduction_is_an_error():
    with pytest.raises(TypeError, match="scalar"):
        ModelAdapter(nn.MSELoss(reduction="none")).losses(nn.Identity(), (torch.zeros(2), torch.zeros(2)))


class Echo(nn.Module):
    """Records its arguments."""

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return torch.tensor(1.0, requires_grad=True)


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


class TwoNames(Echo):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


class AnyName(Echo):
    def forward(self, x, **others):
        return super().forward(x=x, **others)


def arguments_of(model, batch, **options):
    """Return the arguments of the model's call, which are the same for losses and predictions."""
    adapter = ModelAdapter(**options)
    adapter.losses(model, batch)
    seen = model.seen
    adapter.predict(model, batch)
    assert model.seen == seen
    return seen


def any_loss(output, target):
    return torch.tensor(1.0)


# ---------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("model", "batch", "seen"),
    [
        (OneInput(), (1, 2), (((1, 2),), {})),
        (OneInput(), [{"image": 1}, {"image": 2}], (([{"image": 1}, {"image": 2}],), {})),
        (OneInput(), {"image": 1}, (({"image": 1},), {})),
        (Echo(), {"image": 1}, (({"image": 1},), {})),
        (OneInputOrMore(), (1, 2), (((1, 2),), {"mask": None})),
        (TwoInputs(), (1, 2), ((1, 2), {})),
        (InputAndTarget(), [1, 2], ((1, 2), {})),
        (InputAndTarget(), (1,), ((1, None), {})),
        (InputAndTarget(), (1, 2, 3), (((1, 2, 3), None), {})),
        (InputAndTarget(), [{"image": 1}, {"image": 2}], (([{"image": 1}, {"image": 2}], None), {})),
        (TwoInputs(), {"b": 2, "a": 1, "c": 3}, ((1, 2), {})),
        (OneInput(), {"x": 1, "y": 2}, ((1,), {})),
        (AnyName(), {"x": 1, "y": 2}, ((), {"x": 1, "y": 2})),
        (Named(), {"input_ids": 1, "labels": 3}, ((), {"input_ids": 1, "attention_mask": None, "labels": 3})),
        (Named(), UserDict(labels=3), ((), {"input_ids": None, "attention_mask": None, "labels": 3})),
    ],
)
def test_without_a_loss_the_signature_decides_the_arguments(model, batch, seen):
    assert arguments_of(model, batch) == seen


@pytest.mark.parametrize(
    ("model", "batch", "seen"),
    [
        (OneInput(), (1, 9), ((1,), {})),
        (OneInput(), [1, 9], ((1,), {})),
        (OneInput(), ({"image": 1}, 9), (({"image": 1},), {})),
        (OneInput(), ((1, 2), 9), (((1, 2),), {})),
        (TwoInputs(), ((1, 2), 9), ((1, 2), {})),
        (TwoInputs(), (1, 2, 9), ((1, 2), {})),
        (OneInputOrMore(), (1, 2, 9), ((1,), {"mask": 2})),
        (TwoInputs(), {"a": 1, "b": 2, "label": 9}, ((1, 2), {})),
        (TwoInputs(), ({"a": 1, "b": 2}, 9), ((1, 2), {})),
        (AnyName(), {"x": 1, "size": 2, "labels": 9}, ((), {"x": 1, "size": 2})),
        (Named(), {"input_ids": 1, "labels": 9}, ((), {"input_ids": 1, "attention_mask": None, "labels": None})),
    ],
)
def test_with_a_loss_the_model_does_not_receive_the_target(model, batch, seen):
    assert arguments_of(model, batch, loss=any_loss) == seen
    assert ModelAdapter(any_loss).targets(batch) == 9


@pytest.mark.parametrize(
    ("inputs", "model", "batch", "seen"),
    [
        ("batch", TwoInputs, (1, 2), None),
        ("batch", OneInput, {"x": 1}, (({"x": 1},), {})),
        ("tuple", OneInputOrMore, (1, 2), ((1,), {"mask": 2})),
        ("kwargs", OneInputOrMore, {"x": 1, "mask": 2, "id": 3}, ((1,), {"mask": 2})),
    ],
)
def test_inputs_setting_without_a_target(inputs, model, batch, seen):
    if seen is None:
        with pytest.raises(TypeError, match="missing"):  # Python's own error
            arguments_of(model(), batch, inputs=inputs)
    else:
        assert arguments_of(model(), batch, inputs=inputs) == seen


@pytest.mark.parametrize(
    ("inputs", "batch", "seen"),
    [
        ("batch", (1, 2, 9), (((1, 2),), {"mask": None})),
        ("batch", {"x": 1, "label": 9}, (({"x": 1, "label": 9},), {"mask": None})),
        ("tuple", (1, 9), ((1,), {"mask": None})),
        ("tuple", ((1, 2), 9), ((1,), {"mask": 2})),
        ("tuple", (1, 2, 9), ((1,), {"mask": 2})),
        ("kwargs", ({"x": 1, "mask": 2}, 9), ((1,), {"mask": 2})),
    ],
)
def test_inputs_setting_with_a_target(inputs, batch, seen):
    assert arguments_of(OneInputOrMore(), batch, inputs=inputs, loss=any_loss) == seen


def test_entries_can_be_renamed():
    model, mapping = TwoInputs(), {"left": "a", "b": "b"}
    assert arguments_of(model, {"left": 1, "b": 2, "a": 3}, input_mapping=mapping) == ((1, 2), {})
    assert arguments_of(AnyName(), {"image": 1, "x": 2}, input_mapping={"image": "x"}) == ((), {"x": 1})


def test_input_mapping_can_pass_the_target_to_the_model():
    batch = {"input_ids": 1, "labels": 9}
    _, kwargs = arguments_of(Named(), batch, loss=any_loss, input_mapping={"labels": "labels"})
    assert kwargs == {"input_ids": 1, "attention_mask": None, "labels": 9}


def test_the_name_of_the_target_can_be_set():
    batch = {"x": torch.zeros(2), "y": torch.zeros(2), "score": torch.ones(2)}
    adapter = ModelAdapter(nn.MSELoss(), target="score")
    assert adapter.losses(OneInputOrNone(), batch)["loss"] == 1.0
    assert adapter.targets(batch) is batch["score"]


class OneInputOrNone(nn.Module):
    def forward(self, x=None):
        return x


@pytest.mark.parametrize(
    ("model", "with_target", "without", "seen"),
    [
        (OneInput(), (1, 9), (1,), ((1,), {})),
        (OneInput(), (1, 9), 1, ((1,), {})),
        (TwoInputs(), (1, 2, 9), (1, 2), ((1, 2), {})),
        (TwoInputs(), {"a": 1, "b": 2, "label": 9}, {"a": 1, "b": 2}, ((1, 2), {})),
    ],
)
def test_predictions_need_no_target(model, with_target, without, seen):
    adapter = ModelAdapter(any_loss)
    for batch in (with_target, without, with_target):
        adapter.predict(model, batch)
        assert model.seen == seen


def test_a_wrapped_model_is_called_like_the_inner_model():
    model = TwoInputs()
    wrapped = nn.DataParallel(model)
    assert list(ModelAdapter().losses(wrapped, {"a": 1, "b": 2})) == ["total_loss"]
    assert model.seen == ((1, 2), {})


# ---------------------------------------------------------------------------- remembered calls


def test_signatures_are_read_once_for_each_form_of_batch(monkeypatch):
    calls = []
    monkeypatch.setattr(adapters, "what_it_takes", lambda target: calls.append(target) or what_it_takes(target))
    model, adapter = AnyName(), ModelAdapter(any_loss)
    forms = [{"x": 1, "y": 2}, {"x": 1, "z": 3, "y": 2}, (1, 2)]
    for _ in range(3):
        for batch in forms:
            adapter.losses(model, batch)
    assert len(calls) == len(forms)


@pytest.mark.parametrize(
    ("model", "batch", "options", "text"),
    [
        (OneInput(), (1, 9), {"loss": any_loss}, "model(x), loss(output, y)"),
        (TwoInputs(), (1, 2, 9), {"loss": any_loss}, "model(x1, x2), loss(output, y)"),
        (TwoInputs(), ((1, 2), 9), {"loss": any_loss}, "model(*x), loss(output, y)"),
        (
            TwoInputs(),
            {"a": 1, "c": 2, "label": 9},
            {"loss": any_loss, "input_mapping": {"c": "b"}},
            "model(b=c, a=a), loss(output, label)",
        ),
        (TwoInputs(), (1, 2), {}, "model(*batch)"),
        (OneInput(), {"image": 1}, {}, "model(batch)"),
    ],
)
def test_how_the_model_is_called_is_logged_once(caplog, model, batch, options, text):
    adapter = ModelAdapter(**options)
    with caplog.at_level("INFO", "hookline"):
        for _ in range(3):
            adapter.losses(model, batch)
            adapter.predict(model, batch)
    assert caplog.messages == [f"A batch of training is used as {text}"]


def test_one_adapter_handles_several_models_and_forms_of_batch():
    adapter = ModelAdapter(any_loss)
    one, two = OneInput(), TwoInputs()
    for _ in range(2):
        adapter.losses(one, (1, 9))
        assert one.seen == ((1,), {})
        adapter.losses(two, (1, 2, 9))
        assert two.seen == ((1, 2), {})
        adapter.losses(two, {"a": 3, "b": 4, "y": 9})
        assert two.seen == ((3, 4), {})
        adapter.losses(two, {"a": 5, "b": 6, "label": 9})
        assert two.seen == ((5, 6), {})


def test_the_number_of_remembered_calls_is_bounded():
    adapter, model = ModelAdapter(), OneInput()
    for i in range(1000):
        adapter.losses(model, {f"sample_{i}": 1})
    assert len(adapter._calls) <= adapters._MAX_CALLS


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_calls_the_copied_model(copied):
    adapter, model = ModelAdapter(nn.functional.mse_loss), AsItIs()
    adapter.losses(model, (torch.ones(1), torch.ones(1), torch.ones(1)))
    other_adapter, other = copied((adapter, model))
    other.factor.data.fill_(2.0)
    assert other_adapter.losses(other, (torch.ones(1), torch.ones(1), torch.ones(1)))["loss"] == 9.0


class AsItIs(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, a, b):
        return (a + b) * self.factor


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (
            TwoNames,
            {"input_ids": 1, "atention_mask": 2},
            {},
            "needs 'attention_mask'.*did you mean 'atention_mask'.*batch has: input_ids, atention_mask.*"
            r"forward takes: input_ids, attention_mask.*MODEL\.INPUT_MAPPING",
        ),
        (
            OneInput,
            {"image": 1, "label": 2},
            {"loss": any_loss},
            r"needs 'x'.*batch has: image, label\..*forward takes: x.*\{image: x\}.*MODEL\.INPUTS",
        ),
        (Named, {"image": 1}, {"inputs": "kwargs"}, "needs an input.*batch has: image.*input_ids, attention_mask"),
        (OneInput, (1, 2), {"inputs": "kwargs"}, r"MODEL\.INPUTS \"kwargs\".*a tuple \(int, int\)"),
        (OneInput, {"x": 1}, {"inputs": "tuple"}, r"MODEL\.INPUTS is \"tuple\".*a dict {x: int}"),
        (OneInput, 1, {"inputs": "tuple"}, r"MODEL\.INPUTS is \"tuple\".*a int"),
        (TwoInputs, (1, 2, 3), {}, r"3 inputs, but the model's forward takes: a, b.*MODEL\.INPUTS"),
        (OneInput, (1, 2, 9), {"loss": any_loss}, r"2 inputs, but the model's forward takes: x.*MODEL\.INPUTS"),
        (
            OneInput,
            {"image": 1},
            {"input_mapping": {"imge": "x"}},
            r"MODEL\.INPUT_MAPPING: the batch has no 'imge'; did you mean 'image'\? It has: image",
        ),
        (
            TwoInputs,
            {"image": 1},
            {"input_mapping": {"image": "c"}},
            r"MODEL\.INPUT_MAPPING: the model's forward takes no 'c'\. It takes: a, b",
        ),
        (OneInput, {"x": 1, "lable": 2}, {"loss": any_loss}, r"no target.*batch has: x, lable.*MODEL\.TARGET"),
        (OneInput, {"x": 1, "y": 2, "label": 3}, {"loss": any_loss}, r"may be label or y: set MODEL\.TARGET"),
        (
            OneInput,
            {"x": 1, "label": 2},
            {"loss": any_loss, "target": "lable"},
            r"MODEL\.TARGET: .*no target: none .* named lable; did you mean 'label'\? The batch has: x",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_an_error_that_lists_both_names(model, batch, options, message):
    with pytest.raises(TypeError, match=message):
        ModelAdapter(**options).losses(model(), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "dict"}, r"MODEL\.INPUTS: 'dict' is not one of 'auto', 'batch', 'tuple', 'kwargs'"),
        ({"inputs": "tuple", "input_mapping": {"a": "b"}}, r"MODEL\.INPUT_MAPPING.*MODEL\.INPUTS \"tuple\""),
        (
            {"loss": nn.CrossEntropyLoss(), "output_mapping": {"logits": "inputs"}},
            r"MODEL\.OUTPUT_MAPPING: CrossEntropyLoss takes no 'inputs'; did you mean 'input'\?.*input, target",
        ),
        ({"loss": nn.MSELoss(), "output_mapping": {"a": "input", "b": "target"}}, "leaves no parameter of MSELoss"),
    ],
)
def test_contradictory_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelAdapter(**options)


# ---------------------------------------------------------------------------- outputs


@dataclass
class Scores:
    logits: torch.Tensor
    features: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    features: torch.Tensor


class HuggingFaceLike(OrderedDict):
    """Like transformers' ModelOutput: a dict whose entries are also attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    "form",
    [
        lambda scores, other: {"scores": scores},
        lambda scores, other: {"features": other, "logits": scores},
        lambda scores, other: HuggingFaceLike(loss=other.mean(), logits=scores),
        Scores,
        Pair,
    ],
)
def test_torch_losses_receive_the_only_output_or_the_logits(form):
    scores, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    adapter, model = ModelAdapter(nn.CrossEntropyLoss()), Returns(form(scores, torch.zeros(4)))
    assert torch.equal(adapter.losses(model, (0, target))["loss"], nn.functional.cross_entropy(scores, target))
    assert adapter.predict(model, (0, target)) is scores
    assert adapter.losses(model, (0, target)).keys() == {"loss"}


def test_other_losses_receive_the_whole_output():
    output = {"boxes": torch.ones(2), "logits": torch.ones(2)}
    adapter, model = ModelAdapter(lambda out, y: out["boxes"].sum() * y), Returns(output)
    assert adapter.losses(model, (0, 3.0))["loss"] == 6.0
    assert adapter.predict(model, (0, 3.0)) is output


def test_outputs_can_be_renamed_for_the_loss():
    def loss(labels, scores, features):
        return (scores * labels).sum() + features.sum()

    output = {"out": torch.ones(2), "hidden": torch.ones(3), "more": None}
    mapping = {"out": "scores", "hidden": "features"}
    adapter = ModelAdapter(loss, output_mapping=mapping)
    assert adapter.losses(Returns(output), (0, torch.full((2,), 2.0)))["loss"] == 7.0
    assert adapter.predict(Returns(output), (0, 1)) == {"scores": output["out"], "features": output["hidden"]}


def test_a_single_mapped_output_is_the_prediction():
    output = HuggingFaceLike(loss=torch.tensor(1.0), logits=torch.ones(2))
    adapter = ModelAdapter(output_mapping={"logits": "preds"})
    assert adapter.predict(Returns(output), 0) is output["logits"]
    assert list(adapter.losses(Returns(output), 0)) == ["loss"]


@pytest.mark.parametrize(
    ("output", "mapping", "message"),
    [
        ({"boxes": 0, "scores": 0}, {}, r"CrossEntropyLoss takes one tensor.*boxes, scores.*MODEL\.OUTPUT_MAPPING"),
        ({"boxes": 0, "scores": 0}, {"score": "input"}, "no 'score'; did you mean 'scores'.*returned: boxes, scores"),
        ("loss", {}, "CrossEntropyLoss takes one tensor, the model returned a str"),
        (3, {}, "CrossEntropyLoss takes one tensor, the model returned a int"),
        ([torch.zeros(2)], {}, "CrossEntropyLoss takes one tensor, the model returned a list"),
        (torch.zeros(2), {"score": "input"}, r"outputs with names; the model returned a float32 tensor \(2,\)"),
    ],
)
def test_outputs_that_do_not_fit_the_loss_are_listed(output, mapping, message):
    adapter = ModelAdapter(nn.CrossEntropyLoss(), output_mapping=mapping)
    with pytest.raises(TypeError, match=message):
        adapter.losses(Returns(output), (0, 0))


class LogitsAndLoss(nn.Module):
    """As nanoGPT's model."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(11, 11)

    def forward(self, idx, targets=None):
        logits = self.scores(idx)
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_model_may_return_logits_and_loss(kind):
    model, adapter, tokens = LogitsAndLoss(), ModelAdapter(), torch.randint(11, (2, 7))
    batch = kind([tokens[:, :-1], tokens[:, 1:]])
    logits, loss = model(*batch)
    assert adapter.losses(model, batch) == {"loss": loss}
    assert adapter.losses(model, {"idx": batch[0], "targets": batch[1]}) == {"loss": loss}
    predictions, losses = adapter.predict_with_losses(model, batch)
    assert torch.equal(predictions, logits)
    assert losses == {"loss": loss}
    assert torch.equal(adapter.predict(model, batch[0]), logits)
    assert adapter.losses_of_predictions(model, batch, predictions) == {"loss": loss}


def test_a_loss_may_return_its_terms_by_name():
    def loss(output, target):
        return {"close": (output - target).square().mean(), "small": output.square().mean()}

    model, batch = nn.Linear(3, 3), (torch.randn(4, 3), torch.randn(4, 3))
    adapter = ModelAdapter(loss)
    losses = adapter.losses(model, batch)
    assert list(losses) == ["close", "small"]
    assert adapter.losses_of_predictions(model, batch, model(batch[0])) == losses
    counting = ModelAdapter(lambda output, target: {**loss(output, target), "num_items": 3})
    assert counting.losses(model, batch) == {**losses, "num_items": 3}


@pytest.mark.parametrize("terms", [{}, {"close": 1.0}, {"close": torch.zeros(2)}, {"num_items": 3}])
def test_other_terms_of_a_loss_are_an_error(terms):
    with pytest.raises(TypeError, match=r"MODEL\.LOSS must return .*, or scalar tensors by name, not a dict"):
        ModelAdapter(lambda output, target: terms).losses(nn.Identity(), (0, 0))


def test_label_smoothing_is_an_argument_of_the_loss():
    scores, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    losses = ModelAdapter(nn.CrossEntropyLoss(label_smoothing=0.1)).losses(Returns({"logits": scores}), (0, target))
    assert torch.equal(losses["loss"], nn.functional.cross_entropy(scores, target, label_smoothing=0.1))


@pytest.mark.parametrize(
    "output",
    [
        HuggingFaceLike(loss=torch.tensor(2.0), logits=torch.zeros(2)),
        HuggingFaceLike(loss=torch.tensor(2.0), aux_loss=torch.tensor(5.0)),
        {"loss": torch.tensor(2.0), "logits": torch.zeros(2), "name": "x"},
    ],
)
def test_a_loss_among_predictions_is_found(output):
    assert ModelAdapter().losses(Returns(output), 0) == {"loss": torch.tensor(2.0)}


def test_several_losses_among_predictions_are_an_error():
    with pytest.raises(TypeError, match=r"cls: float32 tensor \(\), logits"):
        ModelAdapter().losses(Returns({"cls": torch.tensor(1.0), "logits": torch.zeros(2)}), 0)


# ---------------------------------------------------------------------------- custom train and predict steps


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


def test_train_step_under_data_parallel_is_refused():
    with pytest.raises(TypeError, match=r"OwnSteps\.train_step would bypass DataParallel"):
        ModelAdapter().losses(nn.DataParallel(OwnSteps()), (1, 2))


# ---------------------------------------------------------------------------- numbers of items


@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_losses_include_the_number_of_items(count):
    loss = torch.tensor(1.0)
    with_attribute = Output(loss)
    with_attribute.num_items = count
    for output in (
        {"loss": loss, "num_items": count},
        {"loss": loss, "num_items": count, "logits": torch.zeros(2)},
        HuggingFaceLike(loss=loss, num_items=count),
        with_attribute,
    ):
        losses = ModelAdapter().losses(Returns(output), 0)
        assert losses == {"loss": loss, "num_items": count}
        losses.pop("num_items")
        assert not isinstance(output, dict) or "num_items" in output  # the model's dict does not change
    assert ModelAdapter(lambda out, y: (loss, count)).losses(Returns(0), (0, 0)) == {"loss": loss, "num_items": count}


@pytest.mark.parametrize("count", [1.5, "3", torch.zeros(2)])
def test_a_number_of_items_of_the_wrong_type_is_an_error(count):
    with pytest.raises(TypeError, match="num_items must be an int or a scalar tensor"):
        ModelAdapter().losses(Returns({"loss": torch.tensor(1.0), "num_items": count}), 0)


def test_a_number_of_items_without_a_loss_is_an_error():
    with pytest.raises(TypeError, match="must return its losses"):
        ModelAdapter().losses(Returns({"num_items": torch.tensor(3)}), 0)


class TokenLoss(nn.CrossEntropyLoss):
    """Returns the mean over tokens without padding, and their number."""

    def forward(self, input, target):
        return super().forward(input, target), (target != self.ignore_index).sum()


def test_counts_make_unequal_micro_batches_exact():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(6, 4, 5, dtype=torch.double), torch.randint(3, (6, 4))
    y[0], y[1, 1:], y[4, 2:] = -100, -100, -100

    class PerToken(nn.Module):
        def forward(self, x):
            return model(x).movedim(-1, 1)

    adapter = ModelAdapter(TokenLoss())
    whole = adapter.losses(PerToken(), (x, y))
    whole["loss"].backward()
    expected, model.weight.grad = model.weight.grad, None
    total = 0
    for part in range(3):
        losses = adapter.losses(PerToken(), (x[2 * part : 2 * part + 2], y[2 * part : 2 * part + 2]))
        (losses["loss"] * losses["num_items"]).backward()
        total += losses["num_items"]
    assert total == whole["num_items"] == (y != -100).sum()
    torch.testing.assert_close(model.weight.grad / total, expected, rtol=1e-12, atol=1e-15)


def test_huggingface_models_train_unchanged():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(11, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert list(ModelAdapter().losses(model, batch)) == ["loss"]
    assert ModelAdapter(output_mapping={"logits": "preds"}).predict(model, batch).shape == (2, 8, 11)
