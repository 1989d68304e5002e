"""CSVWriter."""

import csv

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import CSVWriter, EventStorage, HookBase, PeriodicWriter


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


class Late(HookBase):
    """Puts a metric from the middle of the run on."""

    def after_step(self):
        if self.trainer.iter == 5:
            self.trainer.storage.put_scalar("accuracy", 0.5, smoothing_hint=False)


def run(path, start, end, period=2, hooks=()):
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([CSVWriter(str(path), window_size=1)], period), *hooks])
    trainer.train(start, end)
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_each_written_iteration_has_a_line(tmp_path):
    rows = run(tmp_path / "m.csv", 0, 6)
    assert rows == [{"iteration": str(i), "loss": f"{i}.0"} for i in (1, 3, 5)]


def test_a_new_metric_gets_a_new_column(tmp_path):
    rows = run(tmp_path / "m.csv", 0, 8, hooks=[Late()])
    assert [row["accuracy"] for row in rows] == ["", "", "0.5", ""]
    assert [row["loss"] for row in rows] == ["1.0", "3.0", "5.0", "7.0"]


def test_a_resumed_run_writes_no_iteration_twice(tmp_path):
    path = tmp_path / "m.csv"
    run(path, 0, 8)
    rows = run(path, 4, 10)
    assert [row["iteration"] for row in rows] == ["1", "3", "5", "7", "9"]


def test_an_incomplete_number_at_the_end_is_not_a_row(tmp_path):
    path = tmp_path / "m.csv"
    run(path, 0, 1400)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"1399,") + 3])
    rows = run(path, 1390, 1391)
    assert [row["iteration"] for row in rows[-2:]] == ["1389", "1390"]


def test_a_file_without_a_header_is_kept_under_another_name(tmp_path, caplog):
    path = tmp_path / "m.csv"
    path.write_text("1,2.0\n3,4.0\n")
    assert [row["iteration"] for row in run(path, 4, 6)] == ["5"]
    assert (tmp_path / "m.csv.old").read_text() == "1,2.0\n3,4.0\n"
    assert "its first line is not a header" in caplog.text


def test_a_column_that_a_killed_run_added_is_removed(tmp_path, caplog):
    path, state = tmp_path / "m.csv", {}
    writer = CSVWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0, cur_iter=1)
        writer.write()
        state = {"storage": storage.state_dict(), "writer": writer.state_dict()}
        saved = path.read_bytes()
        storage.put_scalar("accuracy", 1.0, cur_iter=3)
        writer.write()
    assert path.read_bytes() != saved
    writer = CSVWriter(str(path))
    with EventStorage(2) as storage:
        storage.load_state_dict(state["storage"])
        writer.load_state_dict(state["writer"])
        writer.resume(2)
    assert path.read_bytes() == saved
    assert "checkpoint" not in caplog.text  # nothing is missing


def test_rows_appear_once_if_the_disk_failed_after_they_were_written(tmp_path, monkeypatch):
    def failing(path):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hookline.config.files.atomic.sync_directory", failing)
    assert [row["iteration"] for row in run(tmp_path / "m.csv", 0, 6)] == ["1", "3", "5"]


def test_an_incomplete_last_line_is_removed(tmp_path):
    path = tmp_path / "m.csv"
    run(path, 0, 8)
    path.write_bytes(path.read_bytes()[:-6] + b"\xff")
    assert [row["iteration"] for row in run(path, 6, 8)] == ["1", "3", "5", "7"]


def test_a_new_run_keeps_the_old_file(tmp_path):
    path = tmp_path / "m.csv"
    run(path, 0, 8)
    old = path.read_bytes()
    assert len(run(path, 0, 2)) == 1
    assert (tmp_path / "m.csv.old").read_bytes() == old


def test_it_can_be_named_in_a_config(tmp_path):
    from hookline.hooks import WRITER_REGISTRY

    writer = WRITER_REGISTRY.build("CSVWriter", offered={"output_dir": str(tmp_path), "window_size": 5, "max_iter": 3})
    assert writer.path == str(tmp_path / "metrics.csv")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_are_written(tmp_path, value):
    class Bad(TrainerBase):
        def run_step(self):
            self.storage.put_scalar("loss", value)

    trainer = Bad()
    trainer.register_hooks([PeriodicWriter([CSVWriter(str(tmp_path / "m.csv"))], 1)])
    trainer.train(0, 1)
    assert (tmp_path / "m.csv").read_text().splitlines()[1] == f"0,{value!r}"
