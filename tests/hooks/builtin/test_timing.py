import re

import pytest
from metric_runs import Losses

from hookline.hooks import CallbackHook, IterationTimer, PeriodicWriter


def timed(warmup, *runs, hooks=()):
    """Train in runs from a first to a last iteration; return the trainer."""
    trainer = Losses()
    trainer.register_hooks([IterationTimer(warmup_iter=warmup), *hooks])
    for start, end in runs:
        trainer.train(start, end)
    return trainer


@pytest.mark.parametrize(
    ("warmup", "runs", "iterations"),
    [
        (3, [(0, 10)], range(2, 10)),  # from the last of the warm-up on
        (2, [(100, 105)], range(100, 105)),  # a resumed run: all
        (1, [(0, 3), (0, 4)], range(4)),  # a second run starts new timings
    ],
)
def test_the_time_of_each_step_is_put(warmup, runs, iterations):
    times = timed(warmup, *runs).storage.history("time").values()
    assert [iteration for _, iteration in times] == list(iterations)
    assert all(0 < seconds < 1 for seconds, _ in times)


@pytest.mark.parametrize(
    ("steps", "seconds", "data_time", "hints"),
    [(250, 0.01, 0.0043, 1), (99, 0.01, 0.0043, 0), (250, 0.01, 0.002, 0), (250, 0.001, 0.0009, 0)],
)
def test_a_run_that_waits_for_data_is_told_once_after_a_hundred_steps(
    log, monkeypatch, clock, steps, seconds, data_time, hints
):
    def run_step(trainer):
        clock.now += seconds
        trainer.storage.put_scalar("data_time", data_time)
        assert trainer.iter >= 100 or len(log.messages) == 1

    monkeypatch.setattr(Losses, "run_step", run_step)
    timed(3, (0, steps), hooks=[PeriodicWriter([], period=20)])
    hint = "data time is 43 % of a step: raise DATALOADER.NUM_WORKERS, or num_workers of your own loader"
    assert log.messages.count(hint) == hints
    assert len([line for line in log.messages if "data time" in line]) == hints


def test_the_time_of_other_hooks_does_not_count_and_the_speed_is_reported_at_the_end(log, monkeypatch, clock):
    monkeypatch.setattr(Losses, "run_step", clock.takes(0.5))
    both = CallbackHook(before_step=clock.takes(0.25), after_step=clock.takes(1.75))
    trainer = timed(4, (0, 8), hooks=[both])
    assert [seconds for seconds, _ in trainer.storage.history("time").values()] == [0.75] * 5
    assert "Overall training speed: 4 iterations in 3.0 s (0.75 s / it)" in log.messages
    assert "Total training time: 20.0 s (16.0 s on hooks)" in log.messages
    assert re.search(r"Callback\S* +16 s +\S+ \S+ +80\.0%", log.text)
