import os

import pytest
from metric_runs import TotalLosses, train_losses
from small_runs import make_trainer

from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import EarlyStopping, EvalHook, PeriodicCheckpointer


@pytest.mark.parametrize("tested", [False, True])
def test_a_metric_of_training_is_read_after_each_epoch(tested):
    """The loss is constant. Evaluations without the metric do not count."""
    stopping = EarlyStopping("total_loss", patience=2)
    evaluations = [EvalHook(1, lambda: {"val": {"a": 1}})] if tested else []
    result = make_trainer(*evaluations, stopping, lr=0.0).train(0, 18)
    assert (result.iteration, stopping.mode) == (12, "min")
    assert result.reason.endswith("for 2 epochs")


def gap(metrics):
    return metrics["val/a"] - metrics["total_loss"]


def test_the_metric_may_be_a_function_of_all_metrics():
    stopping = EarlyStopping(f"{__name__}:gap", patience=2)
    evaluation = EvalHook(1, lambda: {"val": {"a": 1}})
    result = TotalLosses([3.0, 2.0, 2.0, 2.0, 2.0].__getitem__, evaluation, stopping).train(0, 5)
    assert result.iteration == 4
    assert f"{__name__}:gap" in result.reason
    assert stopping.state_dict() == {"best": -1.0, "count": 2}


@pytest.mark.parametrize(
    ("values", "arguments", "iteration", "best"),
    [
        ([1, 2, 2, float("nan"), 9], {}, 4, 2),
        ([3, 2, 2, 4, 9], {"mode": "min"}, 4, 2),
        ([1, 0, 2, 1, 3], {}, 5, 3),
        ([1, 1.4, 1.5, 9], {"min_delta": 0.5}, 3, 1),
    ],
)
def test_it_stops_after_so_many_evaluations_without_an_improvement(values, arguments, iteration, best):
    remaining = iter(values)
    stopping = EarlyStopping("val/a", patience=2, **arguments)
    trainer = train_losses(EvalHook(1, lambda: {"val": {"a": next(remaining)}}), stopping, end=len(values))
    assert (trainer.iter, stopping.best) == (iteration, best)


@pytest.mark.parametrize(("period", "warnings"), [(0, 1), (1, 0)])
def test_one_evaluation_at_the_end_cannot_stop_a_run(caplog, period, warnings):
    make_trainer(EvalHook(period, lambda: {"val": {"a": 1}}), EarlyStopping("val/a")).train(0, 3)
    assert caplog.text.count("EarlyStopping could not stop the run, which was evaluated only at its end") == warnings


def test_a_resume_that_stops_at_once_does_not_save_again(tmp_path):
    def run(resume):
        trainer = make_trainer(EvalHook(1, lambda: {"val": {"a": 1}}), EarlyStopping("val/a", patience=2))
        checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 0)])
        checkpointer.resume_or_load("", resume=resume)
        result = trainer.train(trainer.finished_iter + 1, 20)
        return result.iteration, result.reason, os.stat(tmp_path / "model_final.pth").st_mtime_ns

    assert run(resume=False) == run(resume=True)
