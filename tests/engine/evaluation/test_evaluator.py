import pytest
import torch
from small_runs import Collect
from torch import nn

from hookline.engine.evaluation import DatasetEvaluator, DatasetEvaluators, inference_on_dataset


def make_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()  # like a frozen layer
    return model


def modes(model):
    return [module.training for module in model.modules()]


def test_every_batch_is_predicted_and_processed():
    model, evaluator = make_model(), Collect()
    batches = [torch.randn(3, 2) for _ in range(4)]
    assert inference_on_dataset(model, batches, evaluator) == {"all": {"batches": 4}}
    assert modes(model) == [True, True, False, True]  # as before
    model.eval()
    assert all(torch.equal(outputs, model(inputs)) for inputs, outputs in evaluator.seen)
    assert not any(outputs.requires_grad for _, outputs in evaluator.seen)
    inference_on_dataset(model, [(batches[0], "targets")], evaluator, predict=lambda model, batch: model(batch[0]))
    assert evaluator.seen[0][1].shape == (3, 2)


@pytest.mark.parametrize("evaluator", [None, [], DatasetEvaluator()])
def test_model_can_be_run_without_an_evaluator(evaluator):
    assert inference_on_dataset(make_model(), [torch.randn(3, 2)], evaluator) == {}


def test_modes_are_restored_after_an_error():
    model = make_model()
    with pytest.raises(ZeroDivisionError):
        inference_on_dataset(model, [0], None, predict=lambda model, batch: 1 / batch)
    assert modes(model) == [True, True, False, True]


def test_tensors_created_in_an_evaluation_can_be_used_in_training():
    class Caching(nn.Linear):
        cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones(2)
            return super().forward(x) * self.cache

    model = Caching(2, 2)
    inference_on_dataset(model, [torch.randn(3, 2)], None)
    model(torch.randn(3, 2)).sum().backward()
    assert model.weight.grad is not None


def test_batches_move_to_the_models_device():
    evaluator = Collect()
    inference_on_dataset(nn.Linear(2, 2, device="meta"), [torch.randn(3, 2)], evaluator)
    assert evaluator.seen[0][0].is_meta
    inference_on_dataset(lambda batch: batch, [torch.randn(3, 2)], evaluator, device="meta")
    assert evaluator.seen[0][0].is_meta


def test_several_evaluators_act_as_one_and_callbacks_are_called_in_order():
    first, calls = Collect("a"), []
    names = ("on_start", "before_inference", "after_inference", "on_end")
    callbacks = {name: lambda name=name: calls.append(name) for name in names}
    evaluators = [first, DatasetEvaluator(), Collect("b")]
    results = inference_on_dataset(lambda batch: batch + 1, [1, 2], evaluators, callbacks)
    assert results == {"a": {"batches": 2}, "b": {"batches": 2}}
    assert first.seen == [(1, 2), (2, 3)]
    assert calls == ["on_start", *["before_inference", "after_inference"] * 2, "on_end"]
    with pytest.raises(ValueError, match="'all'"):
        DatasetEvaluators([Collect(), Collect()]).evaluate()
