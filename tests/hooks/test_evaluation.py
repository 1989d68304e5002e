import math

import pytest
import torch

from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, EvalHook, EvalWhen, HookBase, StopTraining
from hookline.hooks.evaluation import Monitor


class Idle(TrainerBase):
    def run_step(self):
        pass


class Evaluation:
    """An eval function that records its calls."""

    def __init__(self, trainer, results=None):
        self.trainer, self.results, self.at = trainer, results, []

    def __call__(self):
        self.at.append(self.trainer.iter)
        return self.results


@pytest.mark.parametrize(
    ("max_iter", "period", "at"),
    [(30, 15, [14, 30]), (31, 15, [14, 29, 31]), (20, 0, [20]), (20, "5it", [4, 9, 14, 20]), (3, 100, [3])],
)
def test_evaluates_every_period_and_after_the_last_iteration(max_iter, period, at):
    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(period, evaluation)])
    trainer.train(0, max_iter)
    assert evaluation.at == at


def test_evaluates_in_the_last_step_if_eval_after_train_is_off():
    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(10, evaluation, eval_after_train=False)])
    trainer.train(0, 25)
    trainer.train(0, 20)
    assert evaluation.at == [9, 19, 9, 19]


@pytest.mark.parametrize("at", [7, 19])
def test_a_failed_run_is_not_evaluated(at):
    class Fails(HookBase):
        def after_step(self):
            if self.trainer.iter == at:
                raise RuntimeError("broken")

    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(0, evaluation), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 20)
    assert evaluation.at == []


def test_no_evaluation_if_another_hooks_after_train_fails():
    class Fails(HookBase):
        def after_train(self):
            raise RuntimeError("broken")

    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(0, evaluation), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 3)
    assert evaluation.at == [3]  # it ran first, before the failure


def test_a_stopped_run_has_no_final_evaluation():
    trainer = Idle()
    evaluation = Evaluation(trainer)

    def stop(trainer):
        if trainer.iter == 7:
            raise StopTraining("enough")

    trainer.register_hooks([EvalHook(5, evaluation), CallbackHook(after_step=stop)])
    assert trainer.train(0, 20).reason == "enough"
    assert evaluation.at == [4]


def test_a_requested_evaluation_runs_at_the_end_of_the_step():
    trainer = Idle()
    evaluation = Evaluation(trainer)
    request = CallbackHook(after_step=lambda trainer: trainer.request_eval() if trainer.iter == 3 else None)
    trainer.register_hooks([EvalHook(0, evaluation, eval_after_train=False), request])
    trainer.train(0, 10)
    assert evaluation.at == [3]


def test_nested_results_are_put_under_full_names_and_not_smoothed(log):
    trainer = Idle()
    results = {"test": {"accuracy": torch.tensor(0.5), "by_class": {"0": 1}}, "extra": math.nan}
    trainer.register_hooks([EvalHook(0, Evaluation(trainer, results))])
    trainer.train(0, 5)
    latest = trainer.storage.latest()
    assert latest["test/accuracy"] == (0.5, 5)
    assert latest["test/by_class/0"] == (1.0, 5)
    assert math.isnan(latest["extra"][0])
    assert not any(trainer.storage.smoothing_hints().values())
    assert any(line.startswith("Evaluation:  test/accuracy: 0.5  test/by_class/0: 1") for line in log.messages)


def test_hooks_get_before_eval_and_the_results():
    heard = []
    trainer = Idle()
    hook = CallbackHook(
        before_eval=lambda trainer: heard.append("before"),
        after_eval=lambda trainer, results: heard.append((results, trainer.storage.latest()["a"])),
    )
    trainer.register_hooks([EvalHook(0, Evaluation(trainer, {"a": 1})), hook])
    trainer.train(0, 2)
    assert heard == ["before", ({"a": 1}, (1.0, 2))]


@pytest.mark.parametrize("nothing", [None, {}])
def test_an_evaluation_may_return_nothing(nothing):
    trainer = Idle()
    evaluation = Evaluation(trainer, nothing)
    trainer.register_hooks([EvalHook(1, evaluation)])
    trainer.train(0, 2)
    assert evaluation.at == [0, 2]
    assert trainer.storage.latest() == {}


@pytest.mark.parametrize(
    ("results", "message"),
    [(0.5, "must return a dict of numbers, not 0.5"), ({"a": {"b": "good"}}, "'a/b' is 'good'")],
)
def test_results_that_are_not_numbers_raise_an_error_with_the_name(results, message):
    trainer = Idle()
    trainer.register_hooks([EvalHook(0, lambda: results)])
    with pytest.raises(TypeError, match=message):
        trainer.train(0, 1)


def test_a_second_schedule_puts_its_results_and_hooks_do_not_follow_it():
    seen = []
    trainer = Idle()
    first, second = Evaluation(trainer, {"val/a": 1}), Evaluation(trainer, {"full/a": 2})
    hooks = [EvalHook(4, first), EvalHook(6, second, main=False)]
    listener = CallbackHook(
        before_eval=lambda trainer: seen.append("before"),
        on_eval_end=lambda trainer: seen.append("end"),
        after_eval=lambda trainer, results: seen.append(results),
        before_step=lambda trainer: trainer.request_eval() if trainer.iter == 1 else None,
    )
    trainer.register_hooks([*hooks, listener])
    trainer.train(0, 8)
    assert first.at == [1, 3, 8]
    assert second.at == [5, 8]
    assert trainer.storage.latest() == {"val/a": (1.0, 8), "full/a": (2.0, 8)}
    assert [one for one in seen if isinstance(one, dict)] == [{"val/a": 1}] * 3
    assert seen.count("before") == seen.count("end") == 5


def odd(trainer):
    return trainer.iter % 4 == 1


@pytest.mark.parametrize("function", [odd, f"{__name__}:odd"])
def test_a_function_says_when_to_evaluate(function):
    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalWhen(function), EvalHook(0, evaluation)])
    trainer.train(0, 8)
    assert evaluation.at == [1, 5, 8]


@pytest.mark.parametrize(
    ("function", "message"), [(f"{__name__}:even", "there is no 'even'.*did you mean"), (3, "not 3")]
)
def test_a_wrong_function_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        EvalWhen(function)


@pytest.mark.parametrize("metric", ["my_module:points/accuracy", "total_loss"])
def test_a_metric_of_imported_data_is_no_function(metric):
    monitor = Monitor(metric)
    assert (monitor.name, monitor.function) == (metric, None)
