import pytest
from metric_runs import Losses

from hookline.hooks import CallbackHook, IterationTimer


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


def test_the_time_of_other_hooks_does_not_count_and_the_speed_is_reported_at_the_end(log, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hookline.hooks.builtin.timing.time.perf_counter", lambda: clock[0])

    def takes(seconds):
        def spend(*_):
            clock[0] += seconds

        return spend

    monkeypatch.setattr(Losses, "run_step", takes(0.5))
    trainer = timed(0, (0, 8), hooks=[CallbackHook(after_step=takes(2.0))])
    assert [seconds for seconds, _ in trainer.storage.history("time").values()] == [0.5] * 8
    assert "Overall training speed: 8 iterations in 4.0 s (0.5 s / it)" in log.messages
    assert "Total training time: 20.0 s (16.0 s on hooks)" in log.messages
