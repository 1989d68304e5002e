"""Files with a line per row, JSON lines and CSV: what is in them, resumes, and disks that fail."""

import copy
import csv
import errno
import os

import pytest
import torch
from metric_runs import at, iterations_of, put, rows_of, train_losses, write
from small_runs import config_trainer

from hookline.hooks import (
    CallbackHook,
    CSVWriter,
    EventStorage,
    JSONWriter,
    PeriodicWriter,
    TensorboardXWriter,
)

FILES = {"metrics.json": JSONWriter, "metrics.csv": CSVWriter}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.json"


def writers(folder, names=tuple(FILES)):
    return [FILES[name](str(folder / name), 1) for name in names]


def csv_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_json_row_has_the_iteration_then_metrics_by_name_and_null_for_nan(path):
    with EventStorage(3) as storage:
        storage.put_scalars(b=2, a=1, nan=torch.tensor(float("nan")), inf=float("inf"), smoothing_hint=False)
        JSONWriter(str(path)).write()
    assert path.read_text() == '{"iteration": 3, "a": 1.0, "b": 2.0, "inf": null, "nan": null}\n'


def test_a_csv_file_gets_a_column_when_a_metric_appears(tmp_path):
    path = tmp_path / "m.csv"
    write([CSVWriter(str(path), 1)], 2, put("accuracy", 5), put('a,"b"', 3), end=8)
    rows = csv_rows(path)
    assert [row["accuracy"] for row in rows] == ["", "", "1.0", ""]
    assert [row['a,"b"'] for row in rows] == ["", "1.0", "", ""]
    assert [(row["iteration"], row["loss"]) for row in rows] == [(str(i), f"{i}.0") for i in (1, 3, 5, 7)]


def test_a_killed_and_resumed_run_has_the_files_of_an_uninterrupted_one(tmp_path, log):
    """Writers may come in another order, and a writer that is new has the rows of the resumed run."""
    folder = tmp_path / "run"
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    write(writers(tmp_path / "whole"), 5)
    states = []

    def save(trainer):
        trainer.emit("before_save", "checkpoint")
        states.append(copy.deepcopy(trainer.state_dict()))

    write(writers(folder), 5, at(29, lambda trainer: trainer.request_save()), at(29, save, "on_save"), end=45)
    [state] = states
    added = CSVWriter(str(folder / "added.csv"), 1)
    write([added, *writers(folder, reversed(FILES))], 5, start=30, state=state)
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [row["iteration"] for row in csv_rows(folder / "added.csv")] == ["34", "39", "44", "49"]
    (folder / "metrics.csv").unlink()
    os.truncate(folder / "metrics.json", 57)
    write(writers(folder), 5, start=30, state=state)
    warned = [name for name in os.listdir(folder) if f"{name}: rows up to iteration 29 are missing" in log.text]
    assert sorted(warned) == ["added.csv", "metrics.csv", "metrics.json"]
    assert iterations_of(folder / "metrics.json")[-4:] == [34, 39, 44, 49]


ROW = b'{"iteration": 19}\n'
RESUMED = [  # writer, the file before, first iteration of the resumed run, the file after, None: it was moved away
    (JSONWriter, ROW + b'{"iteration": 29}\n{"iteration": 30}\n', 29, ROW),
    (JSONWriter, ROW + b'{"iteration": 29, "lo', 100, ROW),
    (JSONWriter, ROW + b"\x00\xff\x80", 100, ROW),
    (JSONWriter, ROW, 0, None),
    (JSONWriter, b"my notes\nof two lines\n", 20, None),
    (CSVWriter, b"iteration,a\r\n3,1\r\n5,2\r\n", 4, b"iteration,a\r\n3,1\r\n"),
    (CSVWriter, b"iteration,a\r\n3,1\r\n139", 200, b"iteration,a\r\n3,1\r\n"),
    (CSVWriter, b"1,2.0\n3,4.0\n", 4, None),
]


@pytest.mark.parametrize(("writer", "before", "start", "after"), RESUMED)
def test_a_resume_removes_rows_that_come_again_and_keeps_files_that_are_not_its_own(
    tmp_path, writer, before, start, after
):
    path = tmp_path / "metrics"
    (tmp_path / "metrics.old").write_text("an earlier backup")
    path.write_bytes(before)
    inode = path.stat().st_ino
    writer(str(path)).resume(start)
    if after is None:
        assert (tmp_path / "metrics.old2").read_bytes() == before
        assert not path.exists()
    else:
        assert path.read_bytes() == after
        assert (path.stat().st_ino == inode) == (before == after)
    assert (tmp_path / "metrics.old").read_text() == "an earlier backup"


def test_writers_of_two_periods_resume_without_losing_rows(tmp_path):
    """At the save one has written the last rows, the other not yet."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "run").mkdir()

    def run(name, *hooks, **arguments):
        files = {period: JSONWriter(str(tmp_path / name / f"{period}.json"), 1) for period in (10, 1)}
        writers = [PeriodicWriter([writer], period) for period, writer in files.items()]
        return train_losses(*writers, put("score", 3), *hooks, **arguments)

    run("whole", end=20)
    states = []
    run("run", at(4, lambda trainer: states.append(copy.deepcopy(trainer.state_dict())), "on_save"), end=7)
    run("run", start=5, end=20, state=states[0])
    for name in ("10.json", "1.json"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert {"iteration": 3, "score": 1.0} in rows_of(tmp_path / "run/10.json")


@pytest.mark.parametrize("name", FILES)
def test_a_run_that_continues_on_a_full_disk_loses_no_row(tmp_path, name, monkeypatch, log):
    def limited(descriptor, data):
        if full and os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / name)):
            write(descriptor, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def fill(trainer):
        nonlocal full
        full = 20 <= trainer.iter < 42

    full, write = False, os.write
    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr("hookline.hooks.writers.periodic._DELAY", 0.0)
    train_losses(CallbackHook(after_step=fill), PeriodicWriter(writers(tmp_path), 5, "continue"))
    rows = rows_of(tmp_path / name) if name == "metrics.json" else csv_rows(tmp_path / name)
    assert [int(row["iteration"]) for row in rows] == [*range(4, 50, 5)]
    assert log.text.count("Training continues, and rows wait in memory") == 1


def test_writers_without_a_path_write_into_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = [JSONWriter("rows.json"), CSVWriter(output_dir="table")]
    writers = [JSONWriter(), CSVWriter(), TensorboardXWriter(), *elsewhere]
    trainer = config_trainer(tmp_path / "run", "SOLVER.MAX_ITER", 2)
    trainer.register_hooks([PeriodicWriter(writers, 1)])
    trainer.train()
    assert {"metrics.json", "metrics.csv"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert len(list((tmp_path / "run").glob("events.*"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "run", "table"]
