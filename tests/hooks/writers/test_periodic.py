"""PeriodicWriter: when writers are called, and what happens if one fails."""

import pytest
from metric_runs import Losses, at, rows_of, write

from hookline.hooks import (
    CallbackHook,
    EventWriter,
    JSONWriter,
    PeriodicWriter,
    get_event_storage,
)


class Recorder(EventWriter):
    def __init__(self):
        self.calls = []

    def resume(self, start_iter):
        self.calls.append(("resume", start_iter))

    def write(self):
        self.calls.append(("write", get_event_storage().iter))

    def close(self):
        self.calls.append(("close", None))


def test_writers_are_resumed_written_and_closed_in_turn():
    """They write at each period, when a hook requests it, after the last step and after training."""
    writer = Recorder()
    write([writer], 4, at(5, lambda trainer: trainer.request_write()), start=2, end=10)
    writes = [("write", iteration) for iteration in (3, 5, 7, 9, 10)]
    assert writer.calls == [("resume", 2), *writes, ("close", None)]


def test_after_write_gets_the_metrics_that_were_written():
    seen = []
    write([], 2, CallbackHook(after_write=lambda trainer, metrics: seen.append((trainer.iter, dict(metrics)))), end=4)
    assert seen[:2] == [(1, {"loss": 0.5}), (3, {"loss": 1.5})]


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("fails", ["the step", "a hook"])
def test_nothing_is_lost_when_a_step_or_a_hook_fails(tmp_path, fails):
    class Fails(Losses):
        def run_step(self):
            super().run_step()
            if self.iter == 7 and fails == "the step":
                raise RuntimeError("broken")

    def broken(trainer):
        raise RuntimeError("broken")

    trainer = Fails()
    trainer.register_hooks([PeriodicWriter([JSONWriter(str(tmp_path / "m.json"), 1)], 3), at(7, broken)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 100)
    assert [row["loss"] for row in rows_of(tmp_path / "m.json")] == [2.0, 5.0, 7.0]
