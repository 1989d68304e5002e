import pytest
import torch
from torch import nn

from hookline.config import get_cfg
from hookline.engine.evaluation import Accuracy, Loss
from hookline.engine.modeling import (
    MLP,
    ConvNet,
    CrossEntropyLoss,
    ResNet,
)


@pytest.mark.parametrize(
    "model",
    [
        MLP(64, 5),
        MLP(64, 5, [8, 4], 0.1),
        ConvNet(4, 5),
        ResNet(4, 8, 5, strides=[1, 2, 1]),
    ],
)
def test_models_return_one_score_per_class(model):
    scores = model(torch.randn(3, 1, 8, 8))
    assert scores.shape == (3, 5)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def tokens():
    """Scores (N, time, vocabulary) and targets (N, time), some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    scores, target = torch.randn(6, 7, 11, generator=generator), torch.randint(11, (6, 7), generator=generator)
    target[0], target[1, 1:], target[4, 3:] = -100, -100, -100
    return scores, target


def test_without_a_counted_token_the_loss_is_zero():
    scores = torch.randn(2, 11, 8, requires_grad=True)
    loss, count = CrossEntropyLoss()(scores, torch.full((2, 8), -100))
    loss.backward()
    assert count == loss == 0
    assert not scores.grad.any()


@pytest.mark.parametrize("args", [{}, {"ignore_index": 3, "label_smoothing": 0.2}])
def test_scores_may_have_the_classes_last(args):
    scores, target = tokens()
    target = torch.where(target < 0, args.get("ignore_index", -100), target)
    expected = nn.CrossEntropyLoss(**args)(scores.movedim(-1, 1), target)
    for form in (scores, scores.movedim(-1, 1)):
        loss, count = CrossEntropyLoss(**args)(form, target)
        torch.testing.assert_close(loss, expected)
        assert count == (target != args.get("ignore_index", -100)).sum()


def test_classes_may_have_weights_and_other_targets_have_the_loss_of_torch():
    scores, target = tokens()
    weight = torch.rand(11, generator=torch.Generator().manual_seed(1))
    loss, count = CrossEntropyLoss(weight, label_smoothing=0.1)(scores, target)
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(weight, label_smoothing=0.1)(scores.movedim(-1, 1), target))
    torch.testing.assert_close(count, weight[target[target >= 0]].sum())
    assert CrossEntropyLoss(reduction="none")(scores, target).shape == (6, 7)
    scores = torch.randn(4, 3)
    for target in (torch.tensor([0, 1, 2, -100]), scores):  # classes, probabilities
        assert torch.equal(CrossEntropyLoss()(scores, target), nn.CrossEntropyLoss()(scores, target))


@pytest.mark.parametrize(("dtype", "computed"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_loss_is_computed_in_float32_or_float64(dtype, computed):
    scores, target = tokens()
    scores, weight = scores.to(dtype), torch.arange(1, 12, dtype=dtype)
    loss, _ = CrossEntropyLoss(weight)(scores, target)
    expected = nn.CrossEntropyLoss(weight.to(computed))(scores.to(computed).movedim(-1, 1), target)
    torch.testing.assert_close(loss, expected)


def test_shifted_targets_are_those_of_causal_models():
    scores, target = tokens()
    expected = nn.CrossEntropyLoss()(scores[:, :-1].movedim(-1, 1), target[:, 1:])
    loss, count = CrossEntropyLoss(shift=True)(scores, target)
    torch.testing.assert_close(loss, expected)
    assert count == (target[:, 1:] >= 0).sum()


def test_metrics_take_scores_with_the_classes_last():
    scores, target = tokens()
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.MODEL.LOSS.NAME = "cpu", "CrossEntropyLoss"
    accuracy, loss = Accuracy(), Loss(cfg)
    for metric in (accuracy, loss):
        for part in range(3):
            metric.update(scores[2 * part : 2 * part + 2], target[2 * part : 2 * part + 2])
    assert accuracy.compute() == (scores.argmax(-1) == target).sum() / (target >= 0).sum()
    assert loss.compute() == pytest.approx(nn.CrossEntropyLoss()(scores.movedim(-1, 1), target).item())
