"""PeriodicWriter: the thread that writes, and errors of writers."""

import json
import signal
import threading
import time

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, HookBase, JSONWriter, PeriodicWriter, RowWriter


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


class Broken(JSONWriter):
    def write_rows(self, rows):
        raise OSError("disk full")


def test_a_writers_error_ends_the_run(tmp_path):
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([Broken(str(tmp_path / "m.json"))], 2)])
    with pytest.raises(OSError, match="disk full"):
        trainer.train(0, 1_000_000)
    assert trainer.iter < 1_000_000


def test_other_writers_write_all_rows_when_one_fails(tmp_path):
    trainer = Losses()
    trainer.register_hooks(
        [PeriodicWriter([Broken(str(tmp_path / "a.json")), JSONWriter(str(tmp_path / "b.json"))], 2)]
    )
    with pytest.raises(OSError, match="disk full"):
        trainer.train(0, 100)
    rows = (tmp_path / "b.json").read_text().splitlines()
    assert len(rows) >= trainer.finished_iter // 2


def test_no_row_is_lost_when_another_writers_error_is_raised(tmp_path):
    class BrokenLater(JSONWriter):
        def write_rows(self, rows):
            if rows[-1][0] >= 19:
                raise RuntimeError("broken writer")

    class Recorder(RowWriter):
        def write_rows(self, rows):
            recorded.extend(iteration for iteration, _ in rows)

    class Waits(HookBase):
        """Waits for the failure at 19 before 29 is written."""

        def after_step(self):
            writer._next_use = 0.0
            deadline = time.monotonic() + 60
            while self.trainer.iter in (15, 25) and not writer._running.done() and time.monotonic() < deadline:
                time.sleep(0.01)

    recorded, path = [], tmp_path / "m.json"
    writer = PeriodicWriter([JSONWriter(str(path)), BrokenLater(str(tmp_path / "b.json")), Recorder()], 10)
    trainer = Losses()
    trainer.register_hooks([writer, Waits()])
    with pytest.raises(RuntimeError, match="broken writer"):
        trainer.train(0, 100)
    assert trainer.finished_iter == 29
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [9, 19, 29]
    assert recorded == [9, 19, 29]


def test_nothing_is_lost_when_a_step_fails(tmp_path):
    class Fails(Losses):
        def run_step(self):
            super().run_step()
            if self.iter == 7:
                raise RuntimeError("step")

    trainer = Fails()
    trainer.register_hooks([PeriodicWriter([JSONWriter(str(tmp_path / "m.json"), window_size=1)], 3)])
    with pytest.raises(RuntimeError, match="step"):
        trainer.train(0, 100)
    assert [json.loads(line)["loss"] for line in (tmp_path / "m.json").read_text().splitlines()] == [2.0, 5.0, 7.0]


def test_rows_are_written_on_another_thread_while_training_goes_on(tmp_path):
    class Notes(JSONWriter):
        def write_rows(self, rows):
            threads.append(threading.current_thread().name)

    threads, trainer = [], Losses()
    trainer.register_hooks([PeriodicWriter([Notes(str(tmp_path / "m.json"))], 2)])
    trainer.train(0, 4)
    assert threads
    assert all(name.startswith("hookline-writers") for name in threads)
    assert not any(thread.name.startswith("hookline-writers") for thread in threading.enumerate())


def test_training_waits_if_many_rows_wait_for_the_thread(monkeypatch):
    monkeypatch.setattr("hookline.hooks.writers.periodic._MAX_JOBS", 3)
    go, written = threading.Event(), []

    class Slow(RowWriter):
        def write_rows(self, rows):
            assert go.wait(60)
            written.append(rows[-1][0])

    class Sees(HookBase):
        def before_step(self):
            if self.trainer.iter == 4:
                threading.Timer(0.2, go.set).start()
            seen.append((self.trainer.iter, go.is_set()))

    seen, trainer = [], Losses()
    trainer.register_hooks([PeriodicWriter([Slow()], 1), Sees()])
    trainer.train(0, 10)
    assert written == list(range(10))
    assert dict(seen)[9]


def test_an_interrupted_wait_for_the_thread_can_be_repeated(tmp_path):
    go, written = threading.Event(), []

    class Slow(RowWriter):
        def write_rows(self, rows):
            assert go.wait(60)
            written.append(rows[-1][0])

    def interrupt(signum, frame):
        go.set()
        raise KeyboardInterrupt

    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([Slow()], 1)])
    save = CallbackHook(after_step=lambda t: t.emit("before_save", "checkpoint") if t.iter == 3 else None)
    trainer.register_hooks([save])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(0, 10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert written[:3] == [0, 1, 2]
