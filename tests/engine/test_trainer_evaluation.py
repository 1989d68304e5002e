"""``Trainer(...)``: evaluations and predictions, in training and without it."""

import functools
import json
import logging
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from one_call import Net, OwnLoss, Storing, X, Y, one_call, points, trained, weights
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer
from hookline.engine.evaluation import MeanMetric
from hookline.hooks import CallbackHook, EarlyStopping, HookBase


@pytest.fixture
def make(tmp_path):
    return lambda *parts, folder="run", **options: one_call(tmp_path / folder, *parts, **options)


class LogitsAndLoss(Net):
    def forward(self, x, targets=None):
        logits = self.layers(x)
        return logits, None if targets is None else nn.functional.cross_entropy(logits, targets)


@dataclass
class Output:
    """As transformers' ``ModelOutput``."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Labeled(Net):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return Output(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


class LossBeside(Net):
    """Returns its loss in eval mode, too."""

    def forward(self, batch):
        scores = self.layers(batch[0])
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "logits": scores}


@pytest.mark.parametrize("model", [Net, OwnLoss, LossBeside, LogitsAndLoss, Labeled])
def test_a_loss_beside_the_model_or_of_it_trains_is_evaluated_and_read_by_hooks(make, model):
    def read(trainer, batch, outputs):
        losses.append(sum(trainer.eval_losses(batch, outputs).values()).item())

    samples = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)] if model is Labeled else points()
    made, losses, loss = model(), [], nn.CrossEntropyLoss()
    options = {"loss": loss if model is Net else None, "hooks": [CallbackHook(after_eval_step=read)]}
    trainer = make(made, samples, samples, metrics=["Loss", "Accuracy"], **options)
    assert trainer.model is made
    results = trainer.train().metrics
    assert sum(losses[-3:]) / 3 == pytest.approx(results["test/loss"], rel=1e-5)
    found = trainer.predict(metrics=True)
    assert found.outputs.shape == (24, 3)
    assert found.metrics["loss"] == results["test/loss"] == pytest.approx(loss(found.outputs, Y).item())
    assert found.metrics["accuracy"] == results["test/accuracy"] == (found.outputs.argmax(1) == Y).double().mean()


def two_terms(scores, target):
    return {"ce": nn.functional.cross_entropy(scores, target), "size": 0.1 * scores.square().mean()}


class TwoTerms(OwnLoss):
    def forward(self, batch):
        scores = self.layers(batch[0])
        return two_terms(scores, batch[1]) if self.training else scores


@pytest.mark.parametrize(("model", "loss"), [(Net, two_terms), (TwoTerms, None)])
def test_the_terms_of_a_loss_are_on_the_console_and_in_the_results(make, capsys, model, loss):
    def size(scores, targets):
        return 3.0

    config = {"LOG.WRITERS": ["CommonMetricPrinter"]}
    trainer = make(model, test=points(10, 1), loss=loss, config=config)
    results = trainer.train().metrics
    expected = two_terms(trainer.predict(), points(10, 1).tensors[1])
    for name, value in {**expected, "loss": sum(expected.values())}.items():
        assert results[f"test/{name}"] == pytest.approx(value.item(), rel=1e-5)
    assert re.search(r"iter: 5/6 .* ce: \d\S+  size: \d", capsys.readouterr().out)
    found = make(model, loss=loss, metrics=[size, "Loss"], folder="b").evaluate(points(10, 1))["test"]
    assert found["size"] == 3.0  # a metric of that name
    assert found.keys() == {"size", "loss", "ce"}


def test_outputs_in_dicts_and_lists_that_must_fit_together(make):
    class Several(Net):
        def forward(self, x):
            return {"logits": self.layers(x), "words": ["a"] * len(x), "extra": (x, x)}

    class Growing(Net):
        def forward(self, x):
            return x.new_zeros(len(x), len(x))

    assert make(Several).predict([(x, 0) for x in points(10).tensors[0]]).shape == (10, 3)  # those of torch's loss
    trainer = make(Several, loss=lambda outputs, y: outputs["logits"].sum(), folder="b")
    outputs = trainer.predict(points(10))
    assert (outputs["logits"].shape, outputs["words"], outputs["extra"][1].shape) == ((10, 3), ["a"] * 10, (10, 4))
    assert trainer.predict(points(10), ignore_keys=["words", "extra"]).shape == (10, 3)
    with pytest.raises(ConfigError, match="stream=True"):
        make(Growing, folder="c").predict(points(10))


def test_predictions_with_targets_and_metrics_and_in_a_stream(make):
    trainer, data = make(metrics=["Accuracy"]), points(10, 1)
    found = trainer.predict(data, targets=True, metrics=True)
    assert torch.equal(found.targets, data.tensors[1])
    assert found.metrics == trainer.evaluate(data)["test"]
    batches = list(trainer.predict(data, stream=True, targets=True))
    assert [len(outputs) for outputs, _ in batches] == [8, 2]
    assert torch.equal(torch.cat([outputs for outputs, _ in batches]), found.outputs)
    with pytest.raises(ConfigError, match="stream"):
        trainer.predict(data, stream=True, metrics=True)


def share(predictions, targets):
    return {"share": (predictions.argmax(1) == targets).double().mean().item()}


class SquaredError(MeanMetric):
    def update(self, preds, target):
        self.add((preds - nn.functional.one_hot(target, 3)).square().sum(), preds.numel())


def test_predictions_go_to_a_new_file(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make(test=points(10, 1), config={"TEST.PREDICTIONS_COLUMNS": ["class", "target"]})
    assert trainer.predict(points(), output="predictions.jsonl") == 24
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    classes = trainer.predict(points()).argmax(1).tolist()
    assert lines == [{"index": i, "class": classes[i], "target": int(Y[i])} for i in range(24)]
    for output, options, problem in (
        ("predictions.jsonl", {}, "predictions.jsonl exists, and no file is replaced"),
        ("predictions.csv", {}, r"ends in .jsonl or .npz"),
        ("other.jsonl", {"targets": True}, "TEST.PREDICTIONS_COLUMNS"),
    ):
        with pytest.raises(ConfigError, match=problem):
            trainer.predict(output=output, **options)
    assert trainer.predict(output=tmp_path / "new" / "predictions.npz") == 10
    assert [path.name for path in tmp_path.glob("**/*.*")] == ["predictions.jsonl", "predictions.npz"]


def test_forms_of_metrics_and_several_test_sets(make):
    metrics = [share, "Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}, "AS": "top2"}]
    results = make(test=points(8, 1), metrics=metrics).evaluate()["test"]
    assert results["share"] == results["accuracy"] <= results["top2"]
    assert make(test=points(8, 1), metrics={"mine": lambda p, t: 0.5}).evaluate() == {"test": {"mine": 0.5}}
    several = {"near": points(8, 1), "far": points(8, 2)}
    night = make(test={"night images": points(8, 1)}, metrics="Accuracy", monitor="night images/accuracy", folder="b")
    assert "night images/accuracy" in night.train().metrics
    trainer = make(test=several, metrics={"acc": "Accuracy", "error": SquaredError})
    assert trainer.evaluate().keys() == several.keys()
    assert trainer.predict("far").shape == (8, 3)
    assert trainer.evaluate("near").keys() == {"near"}
    assert trainer.evaluate({"other": points(8, 3)})["other"].keys() == {"acc", "error"}
    with pytest.raises(ConfigError, match="near, far"):
        trainer.predict()


def test_an_evaluation_outside_of_training_leaves_the_run_alone(make, caplog):
    seen, stopping = [], EarlyStopping("test/loss", patience=2, mode="min")
    listener = CallbackHook(after_eval=lambda trainer, results: seen.append(results))
    schedule = functools.partial(ReduceLROnPlateau, patience=0)
    options = {"monitor": "test/loss", "eval_period": 2, "lr_scheduler": schedule}
    trainer = make(test=points(8, 1), hooks=[stopping, listener], **options)
    trainer.evaluate(points(4, 3))  # other data: no results for hooks
    assert not seen
    assert trainer.evaluate() == {"test": seen.pop()["test"]}
    trainer.train()
    before = stopping.best, stopping.count, trainer.optimizer.param_groups[0]["lr"]
    for _ in range(3):
        trainer.evaluate()
    assert (stopping.best, stopping.count, trainer.optimizer.param_groups[0]["lr"]) == before
    assert "BestCheckpointer watches" not in caplog.text


def test_a_trained_model_is_evaluated_from_its_file_and_nothing_is_written(make, tmp_path):
    trainer = trained(make(test=points(8, 1)))
    config = {"MODEL.WEIGHTS": str(tmp_path / "run")}
    again = make(train=None, test=points(8, 1), length=None, folder="b", config=config)
    assert again.evaluate() == trainer.evaluate()
    again.predict()
    assert list((tmp_path / "b").iterdir()) == []
    with pytest.raises(ConfigError, match="train_data"):
        again.train()


def test_a_model_without_trainable_parameters_is_evaluated_and_predicts(make):
    trainer = make(Net().requires_grad_(False), train=None, test=points(10, 1), metrics=["Accuracy"], length=None)
    assert 0 <= trainer.evaluate()["test"]["accuracy"] <= 1
    assert trainer.predict(points(4)).shape == (4, 3)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        make(Net().requires_grad_(False))


class Evaluates(HookBase):
    """Evaluates and predicts in each step, in other ways than EvalHook; an iterator stays open over the steps."""

    def before_train(self):
        self.loader = DataLoader(TensorDataset(X, Y), batch_size=4)  # draws a seed
        self.open = self.trainer.predict(points(48), stream=True)
        self.states = {}

    def after_step(self):
        trainer = self.trainer
        self.states[trainer.iter] = torch.get_rng_state()
        next(self.open)
        trainer.evaluate(self.loader)
        trainer.predict(self.loader)
        DefaultTrainer.test(trainer.cfg, trainer.model)
        trainer.evaluate()

    def after_eval(self, results):
        torch.rand(1)

    before_eval = after_eval_step = lambda self, *_: torch.rand(1)


def test_evaluations_in_hooks_do_not_change_training_or_checkpoints(make, tmp_path):
    options = {"test": points(10, 1), "monitor": "test/loss"}
    quiet = trained(make(**options))
    trainer = make(**options, folder="evaluated", hooks=[hook := Evaluates()])
    trainer.train()
    assert torch.equal(weights(quiet), weights(trainer))
    saved = torch.load(tmp_path / "evaluated" / "model_best.pth")["trainer"]
    assert torch.equal(saved["rng"]["torch"], hook.states[min(saved["iteration"], 5)])


@pytest.mark.parametrize("empty", [(X[:0], Y[:0]), DataLoader([], batch_size=2)])
def test_a_test_set_without_samples_has_no_results_and_a_warning(make, log, empty):
    def of_all(predictions, targets):
        return len(predictions)

    trainer = make(test={"some": points(seed=1), "none": empty}, metrics=["Loss", of_all], eval_period=3)
    result = trainer.train()
    assert (result.reason, result.metrics["some/of_all"]) == ("completed", 24)
    assert not any(name.startswith("none") for name in result.metrics)
    assert "none has no samples: it has no results" in log.text


def test_a_model_may_use_the_storage_in_evaluations_outside_of_training(make):
    trainer = make(Storing, loss=None, test=points(seed=1), metrics=["Accuracy"])
    assert trainer.train().metrics["seen"] == 8
    assert trainer.evaluate()["test"]["accuracy"] >= 0
    assert DefaultTrainer.test(trainer.cfg, trainer.model)["test"]["accuracy"] >= 0
    assert trainer.predict().shape == (24, 3)


def test_an_evaluation_of_a_script_that_has_set_up_no_logger_shows_its_results(make, monkeypatch, capsys):
    trainer = make(test=points(seed=1), metrics=["Accuracy"])
    for name in ("", "hookline"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    DefaultTrainer.test(trainer.cfg, trainer.model)
    assert re.search(r"test +accuracy +0\.\d+", capsys.readouterr().out)


class DynamicCache:
    """As of transformers: of no number of samples."""


class WithCache(Net):
    def __init__(self, names=("state",)):
        super().__init__()
        self.config = SimpleNamespace(keys_to_ignore_at_inference=names)

    def forward(self, x, labels=None):
        logits = self.layers(x)
        outputs = {"logits": logits, "past": DynamicCache(), "state": (logits[0],)}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


def test_the_cache_of_a_hugging_face_model_is_no_prediction(make):
    seen = []

    def of_all(predictions, targets):
        seen.append(predictions.shape)
        return 1.0

    trainer = make(WithCache, loss=None, test=points(seed=1), metrics=["Loss", of_all])
    trainer.train()
    assert seen[-1] == trainer.predict().shape == (24, 3)
