import pytest

from hookline.engine import TrainerBase
from hookline.hooks import HookBase, IterationTimer


class Idle(TrainerBase):
    def run_step(self):
        pass


def times(trainer):
    return [iteration for _, iteration in trainer.storage.history("time").values()]


def test_the_time_of_each_step_from_the_last_of_the_warmup_is_put():
    trainer = Idle()
    trainer.register_hooks([IterationTimer(warmup_iter=3)])
    trainer.train(0, 10)
    assert times(trainer) == list(range(2, 10))
    assert all(0 < seconds < 1 for seconds, _ in trainer.storage.history("time").values())


def test_a_resumed_run_puts_the_time_of_every_step():
    trainer = Idle()
    trainer.register_hooks([IterationTimer(warmup_iter=2)])
    trainer.train(100, 105)
    assert times(trainer) == [100, 101, 102, 103, 104]


def test_the_time_of_other_hooks_after_a_step_does_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hookline.hooks.watching.timing.time.perf_counter", lambda: clock[0])

    class Step(TrainerBase):
        def run_step(self):
            clock[0] += 2.0

    class Slow(HookBase):
        def after_step(self):
            clock[0] += 100.0

    trainer = Step()
    trainer.register_hooks([IterationTimer(warmup_iter=1), Slow()])
    trainer.train(0, 4)
    assert [seconds for seconds, _ in trainer.storage.history("time").values()] == [2.0, 2.0, 2.0, 2.0]


def test_the_speed_of_the_run_is_reported_at_its_end(log, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hookline.hooks.watching.timing.time.perf_counter", lambda: clock[0])

    class Step(TrainerBase):
        def run_step(self):
            clock[0] += 0.5

    trainer = Step()
    trainer.register_hooks([IterationTimer(warmup_iter=0)])
    trainer.train(0, 8)
    assert "Overall training speed: 8 iterations in 4.0 s (0.5 s / it)" in log.messages
    assert "Total training time: 4.0 s (0.0 s on hooks)" in log.messages


@pytest.mark.parametrize("max_iter", [0, 1, 3])
def test_a_run_not_longer_than_the_warmup_has_no_report(log, max_iter):
    trainer = Idle()
    trainer.register_hooks([IterationTimer(warmup_iter=3)])
    trainer.train(0, max_iter)
    assert not any("training speed" in message for message in log.messages)


def test_a_second_run_starts_new_timings():
    trainer = Idle()
    trainer.register_hooks([IterationTimer(warmup_iter=1)])
    trainer.train(0, 3)
    trainer.train(0, 4)
    assert times(trainer) == [0, 1, 2, 3]
