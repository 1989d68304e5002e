"""Reading the folders of runs."""

import os

import numpy as np
import pytest
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import compare_runs, read_run, read_runs


def test_the_curves_and_the_config_of_a_run(tmp_path):
    path = make_run(tmp_path / "one", config={"SEED": 3, "MODEL": {"ARGS": {"width": 8}, "LOSS": {}}})
    with open(tmp_path / "one/metrics.json", "a") as file:
        file.write('{"iteration": 59, "lo')  # being written
    run = read_run(path)
    assert run.name == "one"
    assert run.curves["test/accuracy"].iterations.tolist() == [19, 40]
    np.testing.assert_equal(run.curves["loss"].values, [1.5, 0.9, np.nan])
    assert run.config == {"SEED": 3, "MODEL.ARGS.width": 8}
    assert run.last_iteration == 29


def test_names_tell_runs_apart(tmp_path, monkeypatch):
    for name in ("sweep/a", "sweep/b", "sweep/b/previous_001", "sweep/deep/er/c"):
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in read_runs(["sweep"])] == ["a", "b", "deep/er/c"]
    assert [run.name for run in read_runs(["sweep/b", "sweep/b/previous_001"])] == ["b", "b/previous_001"]
    assert [run.name for run in read_runs(["sweep/a", "sweep", "sweep/a/metrics.json"])] == ["a", "b", "deep/er/c"]


def test_the_later_of_two_rows_of_an_iteration_counts_and_other_values_are_left_out(tmp_path):
    rows = [{"iteration": i, "loss": i + 100.0, "a": "b"} for i in (0, 1, 2)]
    rows += [{"iteration": i, "loss": value} for i, value in ((1, 1), (2, float("-inf")), (3, float("nan")))]
    curves = read_run(make_run(tmp_path / "one", rows)).curves
    assert list(curves) == ["loss"]
    assert curves["loss"].iterations.tolist() == [0, 1, 2, 3]
    np.testing.assert_equal(curves["loss"].values, [100, 1, np.nan, np.nan])


@pytest.mark.parametrize("line", ['{"iteration": 1e3}', '{"loss": 1}', "[1]", "{]", "\x00"])
def test_a_corrupt_line_is_named(tmp_path, line):
    path = make_run(tmp_path / "one")
    with open(tmp_path / "one/metrics.json", "a") as file:
        file.write(line + '\n{"iteration": 50, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"one/metrics.json: line 5"):
        read_runs([path])


def test_a_pipe_is_refused_and_control_characters_of_files_do_not_reach_the_terminal(tmp_path):
    rows, evil = [{"iteration": 0, "loss": 1.0, "a/\x1b[31m": 2.0}], {"\x1b[2J": "\x1b]0;"}
    runs = read_runs([make_run(tmp_path / name, rows, {**evil, "A": name}) for name in ("one", "\x1b[32m")])
    table = compare_runs(runs)
    assert {"loss", "a/\\x1b[31m"} <= set(table.columns)
    assert "\x1b" not in table.text() + table.csv()
    os.mkfifo(tmp_path / "metrics.json")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_runs([str(tmp_path)])
