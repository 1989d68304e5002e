import functools

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.config.values import ObjectName
from hookline.engine.evaluation import (
    EVALUATOR_REGISTRY,
    DatasetEvaluator,
    FunctionMetric,
    Loss,
    MetricsEvaluator,
    build_evaluator,
    inference_on_dataset,
)
from hookline.engine.setup.check import check_config


@EVALUATOR_REGISTRY.register()
class Count(DatasetEvaluator):
    def __init__(self, cfg, dataset_name, factor=1):
        self.name, self.factor, self.count = dataset_name, factor, 0

    def process(self, inputs, outputs):
        self.count += self.factor

    def evaluate(self):
        return {self.name: {"count": self.count}}


def make_cfg(metrics=("Accuracy",)):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.TEST.METRICS = list(metrics)
    return cfg


def evaluate(cfg, batches, name="val"):
    evaluator = build_evaluator(cfg, name)
    return inference_on_dataset(nn.Identity(), batches, evaluator, predict=lambda model, batch: batch[0])


def test_metrics_are_returned_under_the_sets_name():
    metrics = ["Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}}, {"NAME": "Accuracy", "AS": "again"}, "Loss"]
    batches = [
        (torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), torch.tensor([0, 1])),
        (torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0])),
    ]
    loss = nn.functional.cross_entropy(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    expected = {"accuracy": 1 / 3, "accuracy_top2": 2 / 3, "again": 1 / 3, "loss": loss.item()}
    assert evaluate(make_cfg(metrics), batches)["val"] == pytest.approx(expected)


def test_targets_are_those_that_the_config_or_the_caller_names():
    cfg = make_cfg()
    cfg.MODEL.TARGET = "class"
    batch = {"score": torch.tensor([[0.0, 1.0]]), "class": torch.tensor([1]), "label": torch.tensor([0])}
    for targets_of, expected in ((None, 1.0), (lambda batch: batch["label"], 0.0)):
        evaluator = build_evaluator(cfg, "val", targets_of=targets_of)
        assert inference_on_dataset(lambda batch: batch["score"], [batch], evaluator) == {"val": {"accuracy": expected}}


def test_torchmetrics_work_if_installed():
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = [
        "torchmetrics:MeanSquaredError",
        {"NAME": "torchmetrics:MeanAbsoluteError", "ARGS": {"num_outputs": 2}},
    ]
    cfg = make_cfg(metrics)
    batches = [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2))]
    assert evaluate(cfg, batches) == {"val": {"mean_squared_error": 5.0, "mean_absolute_error": {"0": 1.0, "1": 3.0}}}
    two = {"acc": torchmetrics.Accuracy(task="binary"), "f1": torchmetrics.F1Score(task="binary")}
    batches = [(torch.tensor([1, 0]), torch.tensor([1, 1]))]
    scores = {"acc": 0.5, "f1": pytest.approx(2 / 3)}
    for name, expected in (("metric_collection", scores), ("own", {"own": scores})):
        evaluator = MetricsEvaluator("val", {name: torchmetrics.MetricCollection(two)})
        assert inference_on_dataset(lambda batch: batch[0], batches, evaluator) == {"val": expected}


@pytest.mark.parametrize("generates", [False, True])
def test_a_metric_of_torchmetrics_beside_the_models_own_loss_has_its_value(generates):
    torchmetrics = pytest.importorskip("torchmetrics")

    def count(predictions, targets):
        return len(predictions)

    count.generates = generates
    cfg = make_cfg()
    cfg.MODEL.LOSS.NAME = ""
    accuracy = torchmetrics.Accuracy(task="binary")
    evaluator = MetricsEvaluator("val", {"loss": Loss(cfg), "count": FunctionMetric(count), "accuracy": accuracy})
    evaluator.losses, evaluator.generated = {"loss": torch.tensor(3.0)}, torch.zeros(2, 5)
    batch = (torch.tensor([1, 0]), torch.tensor([1, 1]))
    found = inference_on_dataset(lambda batch: batch[0], [batch], evaluator)
    assert found == {"val": {"loss": 3.0, "count": 2, "accuracy": 0.5}}


def test_invalid_metrics_are_found_before_evaluation():
    with pytest.raises(ConfigError, match=r"METRICS\[0\]\.ARGS\.scalee"):
        check_config(make_cfg([{"NAME": f"{__name__}:error_rate", "ARGS": {"scalee": 3}}]))
    with pytest.raises(ConfigError, match=r"TEST\.METRICS\[1\].*'accuracy'"):
        build_evaluator(make_cfg(["Accuracy", "Accuracy"]), "val")


def test_custom_evaluators_receive_the_arguments_that_they_name():
    cfg = make_cfg([])
    cfg.TEST.EVALUATOR.NAME = "Count"
    cfg.TEST.EVALUATOR.ARGS.factor = 3
    assert evaluate(cfg, [(1,), (2,)]) == {"val": {"count": 6}}
    cfg.TEST.EVALUATOR.ARGS.dataset = "val"
    with pytest.raises(ConfigError, match=r"TEST\.EVALUATOR\.ARGS\.dataset"):
        check_config(cfg)


def test_an_error_of_a_metric_names_it_and_its_inputs():
    with pytest.raises(ValueError, match="Accuracy") as caught:
        evaluate(make_cfg(), [(torch.ones(4, 2), torch.ones(4, 3))])
    (note,) = caught.value.__notes__
    assert all(part in note for part in ("val/accuracy", "float32 tensor (4, 2)", "float32 tensor (4, 3)"))


def error_rate(predictions, targets, scale=1):
    return scale * (predictions.argmax(1) != targets).float().mean()


def by_name(predictions, targets, inputs):
    assert inputs is not None
    return {"first": float(targets[0]), "count": len(predictions)}


THREE = [
    (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1])),
    (torch.tensor([[0.0, 1.0]]), torch.tensor([1])),
]


def weighted(weight, predictions, targets):
    return weight * len(targets)


class Counting:
    def __call__(self, predictions, targets):
        return len(targets)


counting = Counting()


def test_any_function_of_all_predictions_and_targets_is_a_metric():
    here = f"{__name__}:"
    metrics = [{"NAME": f"{here}error_rate", "ARGS": {"scale": 3}}, f"{here}by_name", f"{here}counting"]
    metrics += [{"NAME": f"{here}by_name", "AS": "again"}, ObjectName(functools.partial(weighted, 2.0))]
    cfg = make_cfg(metrics)
    check_config(cfg)
    named = {"first": 1.0, "count": 3}
    assert evaluate(cfg, THREE) == {"val": {"error_rate": 1.0, **named, "Counting": 3, "again": named, "weighted": 6.0}}


def test_batches_of_several_shapes_are_lists():
    seen = []
    metric = FunctionMetric(lambda preds, target: seen.extend(preds) or 1.0)
    for length in (2, 3):
        metric.update(torch.ones(2, length), torch.ones(2))
    metric.compute()
    assert [len(one) for one in seen] == [2, 2, 3, 3]
