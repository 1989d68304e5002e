"""Losses that are means over their own terms: micro-batches have the gradient of the whole batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookline.config import get_cfg
from hookline.engine import SimpleTrainer
from hookline.engine.evaluation import Loss, MetricsEvaluator
from hookline.engine.evaluation.testing import predictor
from hookline.engine.modeling import ModelAdapter
from hookline.engine.modeling.outputs import Terms, num_terms
from hookline.engine.modeling.zoo import CrossEntropyLoss

WEIGHT = torch.tensor([1.0, 9.0, 0.0])
LABELS = torch.tensor([0, 1, 2, -100, -100, 1, 0, -100, 2, 0])
NUMBERS = torch.linspace(0, 1, 30).reshape(10, 3)


class Flat(nn.CrossEntropyLoss):
    """Scores and labels of any shape, as many language models have it."""

    def forward(self, input, target):
        return super().forward(input.reshape(-1, 3), target.reshape(-1))


class Focal(nn.CrossEntropyLoss):
    """A mean over samples, whatever the weights are."""

    def forward(self, input, target):
        each = F.cross_entropy(input, target.clamp(min=0), weight=self.weight, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


LOSSES = {
    "weight": (nn.CrossEntropyLoss(WEIGHT), LABELS),
    "smoothing": (nn.CrossEntropyLoss(WEIGHT + 1, label_smoothing=0.1), LABELS),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), LABELS.clamp(min=0)),
    "named": (CrossEntropyLoss(WEIGHT), LABELS),
    "probabilities": (nn.CrossEntropyLoss(WEIGHT), NUMBERS.softmax(1)),
    "nll": (lambda scores, y: nn.NLLLoss(WEIGHT)(scores.log_softmax(1), y), LABELS),
    "function": (F.cross_entropy, LABELS),
    "partial": (partial(F.cross_entropy, weight=WEIGHT, ignore_index=2), LABELS.clamp(min=0)),
    "reshaped": (Flat(WEIGHT), LABELS),
    "by name": (lambda out, y: {"loss": F.cross_entropy(out, y)}, LABELS),
    "times numbers": (lambda out, y: 2 * F.cross_entropy(out, y) * 0.5 / 3, LABELS),
    "sum over a number": (lambda out, y: F.mse_loss(out, y, reduction="sum") / y.numel(), NUMBERS),
    "own": (Focal(WEIGHT), LABELS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "sum of a function": (lambda out, y: F.mse_loss(out, y, reduction="sum"), NUMBERS),
    "binary": (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT + 1), NUMBERS),
    "batchmean": (lambda out, y: nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), y), NUMBERS.softmax(1)),
    "squared": (nn.MSELoss(), NUMBERS),
}
SUMS = ("sum", "sum of a function")


class OwnLoss(nn.Linear):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self, loss):
        super().__init__(4, 3)
        self.loss = loss

    def forward(self, x, labels):
        scores = super().forward(x)
        loss = self.loss(scores, labels)
        return {**(loss if isinstance(loss, dict) else {"loss": loss}), "logits": scores}


class OwnForward(SimpleTrainer):
    """A trainer that computes its loss."""

    def forward(self, batch):
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1], WEIGHT)}


def weights_after_a_step(loss, target, batches, parts, make=nn.Linear, cls=SimpleTrainer):
    torch.manual_seed(0)
    own = make is OwnLoss
    model = OwnLoss(loss) if own else nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    adapter = ModelAdapter() if own else ModelAdapter(loss)
    trainer = cls(model, batches(target), sgd, adapter=adapter, accumulation_steps=parts)
    trainer.train(0, 1)
    return model.weight.detach(), trainer.storage.latest()


def whole(target):
    torch.manual_seed(1)
    return [(torch.randn(10, 4), target)]


@pytest.mark.parametrize("make", [nn.Linear, OwnLoss])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_have_the_gradient_and_loss_of_the_batch(name, make):
    loss, target = LOSSES[name]
    expected, storage = weights_after_a_step(loss, target, whole, 1, make)
    for parts in (2, 3, 10):
        found, cut = weights_after_a_step(loss, target, whole, parts, make)
        torch.testing.assert_close(found, expected)
        assert cut["total_loss"][0] == pytest.approx(storage["total_loss"][0], rel=1e-5)
        assert "num_items" not in cut


def test_a_loss_that_the_trainer_computes_counts_by_its_terms():
    expected, _ = weights_after_a_step(nn.CrossEntropyLoss(WEIGHT), LABELS, whole, 1)
    found, _ = weights_after_a_step(None, LABELS, whole, 10, cls=OwnForward)
    torch.testing.assert_close(found, expected)


def test_micro_batches_count_by_their_items_and_without_items_not_at_all():
    def loss(scores, labels):
        return {"loss": F.cross_entropy(scores, labels), "num_items": (labels >= 0).sum()}  # NaN without items

    expected, _ = weights_after_a_step(F.cross_entropy, LABELS, whole, 1)
    for parts in (1, 2, 10):
        found, storage = weights_after_a_step(loss, LABELS, whole, parts)
        torch.testing.assert_close(found, expected)
        assert storage["num_items"][0] == 7
    found, _ = weights_after_a_step(loss, torch.full((10,), -100), whole, 2)
    torch.manual_seed(0)
    assert torch.equal(found, nn.Linear(4, 3).weight)


@pytest.mark.parametrize("name", LOSSES)
def test_the_metric_is_the_loss_of_the_whole_set(name):
    loss, target = LOSSES[name]
    metric, own_metric, x = Loss(get_cfg()), Loss(get_cfg()), torch.randn(10, 4)
    metric._loss = loss
    model, evaluator = OwnLoss(loss), MetricsEvaluator("test", {"loss": own_metric})
    predict = predictor(ModelAdapter(), evaluator)
    for rows in (slice(0, 3), slice(3, 5), slice(5, 10)):
        batch = x[rows], target[rows]
        scores = predict(model, batch)["logits"].detach()
        evaluator.process(batch, scores)
        metric.update(scores, target[rows])
    expected = model(x, target)["loss"].item() / (10 if name in SUMS else 1)
    assert metric.compute() == pytest.approx(expected, rel=1e-5)
    assert own_metric.compute() == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch before 2.8")
def test_a_checkpointed_part_of_a_model_may_compute_its_loss():
    def loss(scores, labels):
        return checkpoint(F.cross_entropy, scores, labels, use_reentrant=False)

    expected, _ = weights_after_a_step(F.cross_entropy, LABELS, whole, 1)
    torch.testing.assert_close(weights_after_a_step(loss, LABELS, whole, 10, OwnLoss)[0], expected)


def test_a_compiled_model_stays_one_graph():
    model = torch.compile(OwnLoss(F.cross_entropy), backend="eager", fullgraph=True)
    with Terms():
        model(torch.randn(10, 4), LABELS)


def test_a_loss_beside_a_compiled_graph_counts_by_its_terms():
    class TrainStep(nn.Linear):
        def train_step(self, batch):
            return F.cross_entropy(self(batch[0]), batch[1])

    model = TrainStep(4, 3)
    model.compile(backend="eager")
    with Terms():
        losses = ModelAdapter().losses(model, (torch.randn(10, 4), LABELS))
    assert num_terms(losses) == (LABELS >= 0).sum()
