import pytest
from metric_runs import Losses
from small_runs import make_trainer
from torch import nn

from hookline.config import Duration
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import (
    CallbackHook,
    EvalHook,
    Every,
    PeriodicCheckpointer,
    PeriodicWriter,
)


@pytest.mark.parametrize(
    ("period", "expected"),
    [(5, [4, 9]), (0, []), ("1ep", [3, 7, 11]), ("0.5ep", [1, 3, 5, 7, 9, 11]), ("1.5ep", [5, 11])],
)
def test_periods_end_at_the_expected_steps(period, expected):
    """An epoch has four."""
    every, found = Every(period), []
    note = CallbackHook(after_step=lambda t: found.append(t.iter) if every(t) else None)
    make_trainer(note).train(0, 12)
    assert found == expected


def test_periods_in_time_follow_the_clock(monkeypatch):
    now, every, trainer = [0.0], Every("10s"), Losses()
    monkeypatch.setattr(trainer, "clock", lambda: now[0])
    found = []
    for trainer.iter in range(8):
        now[0] += 4.0
        found.append(every(trainer))
    assert found == [False, False, True, False, False, True, False, False]


def test_the_period_of_a_hook_can_be_set_as_detectron2s(tmp_path):
    calls, saves = [], []

    class Checkpoints(PeriodicCheckpointer):
        def save(self, name, **kwargs):
            saves.append(self.trainer.finished_iter)

    evaluate = EvalHook(5, lambda: calls.append(None), eval_after_train=False)
    hooks = [evaluate, Checkpoints(Checkpointer(nn.Linear(1, 1), str(tmp_path)), "1ep"), PeriodicWriter([])]
    assert (evaluate._period, hooks[1].period, hooks[2]._period) == (5, Duration.parse("1ep"), 20)
    evaluate._period, hooks[1].period, hooks[2]._period = 2, 3, 7
    assert (evaluate._period, hooks[1].period, hooks[2]._period) == (2, 3, 7)
    trainer = Losses()
    trainer.register_hooks(hooks)
    trainer.train(0, 6)
    assert (len(calls), saves) == (3, [2, 5, 5])


def test_an_eval_hook_that_skips_init_evaluates():
    class Own(EvalHook):
        def __init__(self, period, function):
            self._period, self._func = period, function

    calls = []
    trainer = Losses()
    trainer.register_hooks([Own(2, lambda: calls.append(trainer.iter))])
    trainer.train(0, 5)
    assert calls == [1, 3, 5]
