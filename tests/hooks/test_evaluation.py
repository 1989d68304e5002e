import math

import pytest
import torch

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, EvalHook, HookBase, StopTraining


class Idle(TrainerBase):
    def run_step(self):
        pass


class Evaluation:
    """An eval function that notes when it is called."""

    def __init__(self, trainer, results=None):
        self.trainer, self.results, self.at = trainer, results, []

    def __call__(self):
        self.at.append(self.trainer.iter)
        return self.results


@pytest.mark.parametrize(
    ("max_iter", "period", "at"),
    [(30, 15, [14, 30]), (31, 15, [14, 29, 31]), (20, 0, [20]), (20, "5it", [4, 9, 14, 20]), (3, 100, [3])],
)
def test_evaluates_every_period_and_once_after_the_last_iteration(max_iter, period, at):
    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(period, evaluation)])
    trainer.train(0, max_iter)
    assert evaluation.at == at


def test_without_the_evaluation_at_the_end_the_last_period_counts():
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


def test_a_run_whose_end_another_hook_breaks_is_not_evaluated():
    class Fails(HookBase):
        def after_train(self):
            raise RuntimeError("broken")

    trainer = Idle()
    evaluation = Evaluation(trainer)
    trainer.register_hooks([EvalHook(0, evaluation), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 3)
    assert evaluation.at == [3]  # it came first, when nothing had failed yet


def test_a_stopped_run_is_not_evaluated_at_its_end():
    trainer = Idle()
    evaluation = Evaluation(trainer)

    def stop(trainer):
        if trainer.iter == 7:
            raise StopTraining("enough")

    trainer.register_hooks([EvalHook(5, evaluation), CallbackHook(after_step=stop)])
    assert trainer.train(0, 20).reason == "enough"
    assert evaluation.at == [4]


def test_an_evaluation_runs_at_the_end_of_the_step_it_is_requested_in():
    trainer = Idle()
    evaluation = Evaluation(trainer)
    request = CallbackHook(after_step=lambda trainer: trainer.request_eval() if trainer.iter == 3 else None)
    trainer.register_hooks([EvalHook(0, evaluation, eval_after_train=False), request])
    trainer.train(0, 10)
    assert evaluation.at == [3]


def test_nested_results_are_put_by_their_full_names_and_not_smoothed(log):
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


def test_hooks_hear_of_an_evaluation_and_its_results():
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
def test_results_that_are_no_numbers_are_an_error_that_names_them(results, message):
    trainer = Idle()
    trainer.register_hooks([EvalHook(0, lambda: results)])
    with pytest.raises(TypeError, match=message):
        trainer.train(0, 1)
