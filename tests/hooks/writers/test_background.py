"""The background thread."""

import json
import signal
import threading
import time

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import HookBase, JSONWriter, PeriodicWriter, RowWriter
from hookline.hooks.writers.background import Background


def test_jobs_run_in_order_on_another_thread():
    background, done = Background(), []
    for number in range(100):
        background.submit(lambda n=number: done.append((n, threading.current_thread())))
    background.drain()
    assert [number for number, _ in done] == list(range(100))
    assert {thread.name for _, thread in done} == {"hookline-writers"}
    background.close()
    assert not any(thread.name == "hookline-writers" and thread.is_alive() for _, thread in done)


def test_submit_blocks_when_the_queue_is_full():
    background, go, given = Background(max_jobs=2), threading.Event(), []
    background.submit(go.wait)

    def give():
        for number in range(5):
            background.submit(lambda: None)
            given.append(number)

    thread = threading.Thread(target=give)
    thread.start()
    time.sleep(0.1)
    assert len(given) <= 4  # submit blocks after it has queued one more
    go.set()
    thread.join()
    background.close()
    assert len(given) == 5


def test_the_next_submit_raises_a_jobs_error_and_the_other_jobs_run():
    background, done = Background(), []

    def fail():
        raise OSError("disk full")

    background.submit(fail)
    background.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="disk full"):
        background.drain()
    background.submit(lambda: done.append(2))
    background.close()
    assert done == [1, 2]


def test_a_job_runs_even_if_its_submit_raises_an_earlier_error():
    background, done, failed = Background(delay=0.01), [], threading.Event()

    def fail():
        raise OSError("disk full")

    background.submit(fail)
    background.submit(failed.set)  # behind it
    assert failed.wait(timeout=60)
    with pytest.raises(OSError, match="disk full"):
        background.submit(lambda: done.append(1))
    background.close()
    assert done == [1]


def test_all_errors_are_reported():
    background = Background()

    def fail(text):
        raise OSError(text)

    for text in ("first", "second", "third"):
        background.submit(lambda text=text: fail(text))
    with pytest.raises(OSError, match="first") as info:
        background.drain()
    assert info.value.__notes__ == ["then also: OSError: second", "then also: OSError: third"]
    background.close()


@pytest.mark.parametrize("then", ["drain", "close"])
def test_it_works_after_an_interrupted_close(then):
    background, go, done = Background(delay=3600.0), threading.Event(), []
    others = threading.enumerate()
    background.submit(lambda: go.wait(timeout=60))

    def interrupt(signum, frame):
        go.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            background.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for thread in threading.enumerate():
        if thread not in others:
            thread.join(timeout=1)  # it may have ended
    for number in (1, 2):
        background.submit(lambda n=number: done.append(n))
        if number == 2:
            time.sleep(0.05)
            assert done == [1]  # jobs are collected again
        waits = threading.Thread(target=getattr(background, then), daemon=True)
        waits.start()
        waits.join(timeout=60)
        assert not waits.is_alive()
        assert done[-1] == number
    background.close()


@pytest.mark.parametrize("end", ["drain", "close", "a full queue"])
def test_jobs_are_collected_until_a_caller_waits(end):
    background, done = Background(max_jobs=3, delay=3600.0), []
    for number in range(3):
        background.submit(lambda n=number: done.append(n))
    time.sleep(0.05)
    assert done == []
    if end == "a full queue":
        background.submit(lambda: done.append(3))  # waits for room
        background.drain()
        assert done == [0, 1, 2, 3]
    else:
        getattr(background, end)()
        assert done == [0, 1, 2]
    background.close()


def test_jobs_run_soon_if_no_caller_waits():
    background, done = Background(delay=0.01), threading.Event()
    background.submit(done.set)
    assert done.wait(timeout=60)
    background.close()


def test_it_can_be_used_after_close():
    background, done = Background(), []
    for number in range(2):
        background.submit(lambda n=number: done.append(n))
        background.close()
    assert done == [0, 1]


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
            deadline = time.monotonic() + 60
            while self.trainer.iter == 25 and not writer._background._errors and time.monotonic() < deadline:
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


def test_writers_can_run_in_the_training_thread(tmp_path):
    threads = []

    class Notes(JSONWriter):
        def write_rows(self, rows):
            threads.append(threading.current_thread())

    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([Notes(str(tmp_path / "m.json"))], 2, background=False)])
    trainer.train(0, 4)
    assert set(threads) == {threading.main_thread()}
