"""Files with a line per row: resumes, and disks that fail."""

import copy
import errno
import json
import logging
import os
import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hookline.config import ConfigError
from hookline.config.files.atomic import WriteError
from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, CSVWriter, HookBase, JSONWriter, PeriodicWriter, TensorboardXWriter
from hookline.hooks.writers.files import AppendFile, back_up


class Losses(TrainerBase):
    """The loss is the iteration."""

    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


class Saves(HookBase):
    """Saves the state at one iteration and copies the folder at a later one, as after a kill."""

    def __init__(self, folder, at=29, killed_at=45):
        self.folder, self.at, self.killed_at = folder, at, killed_at

    def on_save(self):
        trainer = self.trainer
        trainer.emit("before_save", "checkpoint")
        if trainer.iter == self.at:
            self.state = copy.deepcopy(trainer.state_dict())
            self.rows = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        if trainer.iter == self.killed_at:
            shutil.copytree(self.folder, self.folder.parent / "killed")

    def after_step(self):
        if self.trainer.iter in (self.at, self.killed_at):
            self.trainer.request_save()


def writers(folder):
    return [JSONWriter(str(folder / "metrics.json"), 1), CSVWriter(str(folder / "metrics.csv"), 1)]


def run(made, start=0, stop=50, hooks=(), state=None):
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter(made, 5), *hooks])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(start, stop)


@pytest.fixture
def killed(tmp_path):
    """The folder of a run killed at iteration 45, and its state at iteration 29."""
    whole = tmp_path / "whole"
    whole.mkdir()
    saves = Saves(whole)
    run(writers(whole), hooks=[saves])
    return tmp_path / "killed", saves


def iterations(folder):
    return [json.loads(line)["iteration"] for line in (folder / "metrics.json").read_text().splitlines()]


def same_files(folder, other):
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in ("metrics.json", "metrics.csv"))


def test_a_killed_and_resumed_run_has_the_files_of_an_uninterrupted_run(tmp_path, killed, caplog):
    folder, saves = killed
    assert iterations(folder)[-1] == 44
    run(writers(folder), 30, state=saves.state)
    assert same_files(folder, tmp_path / "whole")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_rows_are_in_the_file_when_a_checkpoint_is_saved(killed):
    _, saves = killed
    assert saves.rows["metrics.json"].splitlines()[-1] == b'{"iteration": 29, "loss": 29.0}'
    assert saves.rows["metrics.csv"].splitlines()[-1] == b"29,29.0"


def test_rows_are_on_the_disk_when_a_checkpoint_is_saved(tmp_path, monkeypatch):
    synced = {}

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced[os.path.basename(path)] = os.path.getsize(path)

    class Looks(HookBase):
        def on_save(self):
            self.trainer.emit("before_save", "checkpoint")
            self.synced = {path.name: synced.get(path.name) for path in tmp_path.iterdir()}
            self.sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}

        def after_step(self):
            if self.trainer.iter == 29:
                self.trainer.request_save()

    monkeypatch.setattr(os, "fsync", fsync)
    looks = Looks()
    run(writers(tmp_path), hooks=[looks])
    assert looks.synced == looks.sizes


def removed(path):
    path.unlink()


def emptied(path):
    path.write_bytes(b"")


def truncated(path):
    path.write_bytes(path.read_bytes()[:57])


@pytest.mark.parametrize("name", ["metrics.json", "metrics.csv"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (removed, "the rows of all iterations up to 29 are missing"),
        (emptied, "the rows of all iterations up to 29 are missing"),
        (truncated, "up to 29 are missing, and cannot be restored"),
    ],
)
def test_a_resume_warns_about_missing_rows(killed, caplog, name, damage, says):
    folder, saves = killed
    damage(folder / name)
    before = (folder / name).read_bytes() if (folder / name).exists() else b""
    run(writers(folder), 30, state=saves.state)
    assert says in caplog.text
    assert f"{folder / name}: " in caplog.text
    assert iterations(folder)[-4:] == [34, 39, 44, 49]
    if before:
        assert (folder / f"{name}.old").read_bytes() == before


@pytest.mark.parametrize("order", [(1, 0), (0,), (1,)])
def test_the_order_and_number_of_writers_may_change_on_a_resume(tmp_path, killed, order):
    folder, saves = killed
    made = writers(folder)
    run([made[index] for index in order], 30, state=saves.state)
    if len(order) == 2:
        assert same_files(folder, tmp_path / "whole")
    for index in order:
        name = ("metrics.json", "metrics.csv")[index]
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_writer_added_on_a_resume_starts_with_the_rows_of_that_run(tmp_path, killed):
    folder, saves = killed
    added = CSVWriter(str(folder / "added.csv"), 1)
    run([added, *writers(folder)], 30, state=saves.state)
    assert same_files(folder, tmp_path / "whole")
    text = (folder / "added.csv").read_text()
    assert [line.split(",")[0] for line in text.splitlines()] == ["iteration", "34", "39", "44", "49"]


# ---------------------------------------------------------------------------- disks that fail


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full for the files in ``disk.full``."""

    class Disk:
        full = ()

    def limited(descriptor, data):
        if any(os.path.samestat(os.fstat(descriptor), os.stat(path)) for path in Disk.full if os.path.exists(path)):
            write(descriptor, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    write = os.write
    monkeypatch.setattr(os, "write", limited)
    return Disk


def full_disk(disk, folder, since, until=1000):
    """A hook that makes the disk full for the folder's files during these iterations."""

    def after_step(trainer):
        disk.full = list(folder.iterdir()) if since <= trainer.iter < until else []

    def after_write(trainer, metrics):
        writer = trainer.find_hook(PeriodicWriter)
        writer._wait()
        writer._next_use = 0.0

    return CallbackHook(after_step=after_step, after_write=after_write)


def run_on(folder, hooks=(), stop=50, **arguments):
    folder.mkdir()
    made = [*writers(folder), TensorboardXWriter(output_dir=str(folder), window_size=1)]
    trainer = Losses()
    trainer.register_hooks([*hooks, PeriodicWriter(made, 5, **arguments)])
    return trainer.train(0, stop)


def losses(folder):
    events = EventAccumulator(str(folder)).Reload()
    return [event.step for event in events.Scalars("train/loss")]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_rows_that_failed_once_are_written_by_the_next_write(tmp_path, disk, on_error):
    run_on(tmp_path / "whole")
    full = full_disk(disk, tmp_path / "full", 24, 25)
    run_on(tmp_path / "full", [full], on_error=on_error)
    assert same_files(tmp_path / "full", tmp_path / "whole")
    assert losses(tmp_path / "full") == losses(tmp_path / "whole")


def test_a_full_disk_stops_the_run_with_advice_for_every_file(tmp_path, disk, caplog):
    with pytest.raises(WriteError, match="No space left on device; make room there, keep fewer checkpoints"):
        run_on(tmp_path / "run", [full_disk(disk, tmp_path / "run", 20)])
    for name in ("metrics.json", "metrics.csv", "run"):
        assert f"/{name}: No space left on device" in caplog.text


def test_a_run_that_continues_on_a_full_disk_loses_no_row(tmp_path, disk, caplog):
    run_on(tmp_path / "whole")
    run_on(tmp_path / "full", [full_disk(disk, tmp_path / "full", 20, 42)], on_error="continue")
    assert same_files(tmp_path / "full", tmp_path / "whole")
    assert losses(tmp_path / "full") == losses(tmp_path / "whole")
    assert caplog.text.count("Training continues, and the rows wait in memory") == 3  # once for each file


def test_a_run_whose_last_rows_cannot_be_written_fails(tmp_path, disk):
    ended = []
    hooks = [full_disk(disk, tmp_path / "run", 20), CallbackHook(after_run=lambda trainer: ended.append(trainer.iter))]
    with pytest.raises(WriteError, match="No space left on device"):
        run_on(tmp_path / "run", hooks, on_error="continue")
    assert ended == [50]


def test_a_resume_after_a_save_on_a_full_disk_warns_about_rows_that_may_be_missing(tmp_path, disk, caplog):
    folder = tmp_path / "run"
    saves = Saves(folder, 29, 45)
    with pytest.raises(WriteError):
        run_on(folder, [full_disk(disk, folder, 20), saves], on_error="continue")
    disk.full = []
    caplog.clear()
    run(writers(tmp_path / "killed"), 30, state=saves.state)
    assert "the rows after iteration 19 up to 29 are missing" in caplog.text
    assert iterations(tmp_path / "killed") == [4, 9, 14, 19, 34, 39, 44, 49]


# ---------------------------------------------------------------------------- AppendFile


def short_writes(monkeypatch, sizes):
    """Limit the bytes that each call of os.write takes; after the last size it fails with ENOSPC."""
    write, sizes = os.write, iter(sizes)

    def limited(descriptor, data):
        size = next(sizes, None)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", limited)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    short_writes(monkeypatch, [2, 1, 3])
    file.write(b"abcdef")
    assert (tmp_path / "f").read_bytes() == b"abcdef"


def test_what_a_failed_write_has_left_is_removed_by_the_next_one(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    file.write(b"first\n")
    with monkeypatch.context() as patch:
        short_writes(patch, [3])
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    assert (tmp_path / "f").read_bytes() == b"first\nsec"
    file.write("third\n")
    assert (tmp_path / "f").read_bytes() == b"first\nthird\n"


def test_what_a_failed_write_has_left_is_removed_at_the_end(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    file.write(b"first\n")
    with monkeypatch.context() as patch:
        short_writes(patch, [3])
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"first\n"


@pytest.mark.parametrize("writer", [JSONWriter, CSVWriter])
def test_a_fifo_or_a_folder_is_refused(tmp_path, writer):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is a FIFO"):
        writer(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="is a folder"):
        writer(str(tmp_path))


def test_earlier_backups_are_kept(tmp_path):
    path = tmp_path / "metrics.json"
    for number in range(3):
        path.write_text(str(number))
        back_up(str(path))
    assert not path.exists()
    kept = [tmp_path / f"metrics.json.{ending}" for ending in ("old", "old2", "old3")]
    assert [file.read_text() for file in kept] == ["0", "1", "2"]
