import itertools

import pytest
import torch
from metric_runs import rows_of
from small_runs import Net, make_trainer
from torch.utils.data import DataLoader

from hookline.engine.evaluation import evaluation_context, inference_on_dataset
from hookline.hooks import CallbackHook, EvalHook, JSONWriter, PeriodicWriter, Throughput


def train(folder, loader, steps, *hooks, period=10, **kwargs):
    """Train, as often as there are ``steps``; return the rows. Without hooks there is ``Throughput`` alone."""
    trainer = make_trainer(model=Net(4, 1), data=loader, **kwargs)
    writer = PeriodicWriter([JSONWriter(str(folder / "metrics.json"), period)], period)
    trainer.register_hooks([*hooks, writer] if hooks else [writer, Throughput()])  # in any order
    for start, end in itertools.pairwise([0, *steps]):
        trainer.train(start, end)
    return rows_of(folder / "metrics.json")


def loader(samples=40):
    return DataLoader(torch.randn(samples, 4), batch_size=8)


DICTS = [{"x": torch.randn(3, 4)}, {"x": torch.randn(5, 4)}]  # without a batch size


@pytest.mark.parametrize(
    ("data", "kwargs", "rates"),
    [
        (loader(samples=10), {}, {"samples_per_s": 10.0}),  # batches of 8 and 2
        (DICTS, {"items_of": "x"}, {"items_per_s": 32.0, "samples_per_s": 8.0}),
    ],
)
def test_samples_and_items_per_second_of_wall_clock_time(tmp_path, clock, data, kwargs, rates):
    found = train(tmp_path, data, [20], Throughput(**kwargs), CallbackHook(after_step=clock.takes(0.5)))
    assert [row["iteration"] for row in found] == [9, 19]  # no row is added at the end
    assert [{name: row[name] for name in rates} for row in found] == [rates, rates]


def test_the_epoch_is_a_fraction_and_a_second_training_continues_it(tmp_path):
    data = loader(samples=32)  # 4 batches
    found = train(tmp_path, data, [4, 10], period=3)
    assert [(row["iteration"], row["epoch"]) for row in found] == [(2, 0.75), (3, 1.0), (5, 1.5), (8, 2.25), (9, 2.5)]


def test_the_speed_of_evaluations_is_put():
    def evaluate():
        with evaluation_context(trainer.emit):
            inference_on_dataset(trainer.model, loader(24), None)

    trainer = make_trainer(EvalHook(5, evaluate), Throughput(), model=Net(4, 1), data=loader())
    metrics = trainer.train(0, 10).metrics
    assert metrics["eval_samples_per_s"] == pytest.approx(24 / metrics["eval_time"])
    assert [iteration for _, iteration in trainer.storage.history("eval_time").values()] == [4, 10]
