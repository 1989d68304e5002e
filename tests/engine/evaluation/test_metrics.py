import math

import pytest
import torch

from hookline.engine.evaluation import Accuracy, MeanMetric

SIZES = (5, 1, 8, 3)


def feed(metric, preds, target):
    """Feed a metric batches of unequal sizes."""
    for part_preds, part_target in zip(preds.split(SIZES), target.split(SIZES), strict=True):
        metric.update(part_preds, part_target)
    return metric.compute()


def random(*shape, seed=0):
    return torch.randn(sum(SIZES), *shape, generator=torch.Generator().manual_seed(seed))


def classes(number, *shape, seed=1):
    return torch.randint(number, (sum(SIZES), *shape), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_accuracy_counts_exactly_and_without_ignored_targets(shape):
    scores, target = random(5, *shape), classes(5, *shape)
    hits = (scores.argmax(1) == target).sum().item()
    assert feed(Accuracy(), scores, target) == hits / target.numel()
    assert feed(Accuracy(), scores.argmax(1), target) == hits / target.numel()
    right_or_ignored = torch.where(scores.argmax(1) == target, target, -100)
    assert feed(Accuracy(), scores, right_or_ignored) == 1.0


@pytest.mark.parametrize(("preds", "target"), [((4, 3), (5,)), ((4,), (4,)), ((4, 3), (4, 3)), ((4, 3, 2), (4,))])
def test_accuracy_refuses_shapes_that_do_not_fit(preds, target):
    with pytest.raises(ValueError, match="Accuracy needs"):
        Accuracy().update(torch.zeros(preds), torch.zeros(target, dtype=torch.int64))


def test_reset_clears_all_counts_and_an_empty_metric_is_nan():
    metric = Accuracy()
    metric.update(torch.tensor([1]), torch.tensor([1]))
    assert metric.compute() == 1.0
    metric.reset()
    assert math.isnan(metric.compute())


def test_many_batches_do_not_lose_precision():
    metric = MeanMetric()
    for _ in range(3000):
        metric.add(torch.full((1000,), 0.01).sum(), 1000)
    assert metric.compute() == pytest.approx(0.01, rel=1e-6)
