import pytest
import torch
from small_runs import Net, make_trainer

from hookline.config import ConfigError
from hookline.hooks import CallbackHook, GradientAccumulationScheduler


def counts(hook, steps=8, start=0):
    """The number of micro-batches of each iteration."""
    seen = []
    count = CallbackHook(before_step=lambda t: seen.append(0), after_backward=lambda t: seen.append(seen.pop() + 1))
    trainer = make_trainer(hook, count, model=Net(), data=[torch.ones(6, 2)] * 3)
    trainer.train(start, steps)
    assert trainer.accumulation_steps == 1  # as before
    return seen


def test_the_number_of_micro_batches_changes_at_its_time():
    assert counts(GradientAccumulationScheduler({"1ep": 2, 5: 3})) == [1, 1, 1, 2, 2, 3, 3, 3]
    assert counts(GradientAccumulationScheduler({7: 1, 0: 6})) == [6] * 7 + [1]
    assert counts(GradientAccumulationScheduler({"1ep": 2, 5: 3}), start=4) == [2, 3, 3, 3]  # a resumed run


@pytest.mark.parametrize("schedule", [{}, {"1ep": 0}, {"1ep": 1.5}, {"1h": 2}, [2]])
def test_other_schedules_are_refused(schedule):
    with pytest.raises(ConfigError):
        GradientAccumulationScheduler(schedule)
