import pytest

from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import EarlyStopping, EvalHook


class Losses(TrainerBase):
    """Puts the next of some losses in each step."""

    def __init__(self, losses, smoothing_hint=True):
        super().__init__()
        self.losses, self.smoothing_hint = losses, smoothing_hint

    def run_step(self):
        self.storage.put_scalar("total_loss", self.losses[self.iter], smoothing_hint=self.smoothing_hint)


def test_a_metric_of_training_is_read_every_period():
    trainer = Losses([5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0], smoothing_hint=False)
    trainer.register_hooks([EarlyStopping("total_loss", patience=2, mode="min", period=2)])
    result = trainer.train(0, 10)
    assert result.iteration == 8
    assert result.reason == "early stopping: total_loss has not been better than 3 for 2 periods"


def test_a_smoothed_metric_is_its_median():
    trainer = Losses([3.0] * 20 + [9.0, 1.0, 2.0, 2.0])
    stopping = EarlyStopping("total_loss", mode="min", period=8)
    trainer.register_hooks([stopping])
    trainer.train(0, 24)
    assert (stopping.best, stopping.count) == (3.0, 2)  # 2.0 and 9.0 do not count


def test_a_metric_of_training_without_a_period_is_an_error_that_says_so():
    trainer = Losses([1.0] * 4)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": 1}}), EarlyStopping("total_loss")])
    with pytest.raises(ConfigError, match=r"evaluation's metrics \(val/a\)\. For a metric of training, set"):
        trainer.train(0, 4)


def test_an_unknown_metric_is_an_error_after_the_first_period():
    trainer = Losses([1.0] * 4)
    trainer.register_hooks([EarlyStopping("total_los", period=2)])
    with pytest.raises(ConfigError, match=r"'total_los', which is not among the metrics so far.*'total_loss'"):
        trainer.train(0, 4)


def gap(metrics):
    return metrics["val/a"] - metrics["total_loss"]


@pytest.mark.parametrize("metric", [gap, f"{__name__}:gap"])
def test_the_metric_may_be_a_function_of_all_metrics(metric):
    trainer = Losses([3.0, 2.0, 2.0, 2.0, 2.0])
    stopping = EarlyStopping(metric, patience=2)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": 1}}), stopping])
    result = trainer.train(0, 5)
    assert result.iteration == 4
    assert result.reason.startswith(f"early stopping: {__name__}:gap has not been better than -1 for 2 evaluations")
    assert stopping.state_dict() == {"best": -1.0, "count": 2}


def evaluated(values, **arguments):
    trainer = Losses([1.0] * len(values))
    remaining = iter(values)
    stopping = EarlyStopping("val/a", **arguments)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": next(remaining)}}), stopping])
    return trainer.train(0, len(values)).iteration, stopping.best


def test_it_stops_after_so_many_evaluations_without_an_improvement():
    assert evaluated([1, 2, 2, float("nan"), 9], patience=2) == (4, 2)
    assert evaluated([3, 2, 2, 4, 9], patience=2, mode="min") == (4, 2)
    assert evaluated([1, 0, 2, 1, 3], patience=2) == (5, 3)


def test_a_smaller_change_than_min_delta_does_not_count():
    assert evaluated([1, 1.4, 1.5, 9], patience=2, min_delta=0.5) == (3, 1)
