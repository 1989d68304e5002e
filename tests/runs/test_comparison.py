"""Tables of runs."""

import csv
import io

import pytest
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import compare_runs, read_runs


@pytest.fixture
def runs(tmp_path):
    for name, rate, best in (("slow", 0.01, 0.5), ("fast", 0.1, 0.9), ("wide", 0.1, 0.7)):
        config = {
            "SEED": 1,
            "OUTPUT_DIR": name,
            "MODEL": {"NAME": "Net", "ARGS": {"width": 32 if name == "wide" else 8}},
            "SOLVER": {"BASE_LR": rate, "OPTIMIZER": {"NAME": "SGD"}},
        }
        rows = [
            {"iteration": 9, "test/accuracy": best, "test/loss": 2.0, "loss": 1.0, "lr": 0.1},
            {"iteration": 19, "test/accuracy": 0.4, "test/loss": 1.0, "loss": 0.5, "lr": 0.1},
        ]
        make_run(tmp_path / name, rows, config)
    return read_runs([str(tmp_path)])


def test_differences_of_the_config_beside_final_and_best_metrics(runs):
    table = compare_runs(runs)
    assert table.columns[:4] == ["run", "MODEL.ARGS.width", "SOLVER.BASE_LR", "iterations"]
    assert table.columns[4:7] == ["test/loss", "test/loss best", "test/loss best at"]
    assert [row[0] for row in table.rows] == ["fast", "slow", "wide"]
    assert table.rows[0] == ["fast", 8, 0.1, 20, 1.0, 1.0, 19, 0.4, 0.9, 9, 0.5, 0.5, 19]


def test_sorted_by_the_best_value_of_a_metric_or_by_a_key(runs):
    def names(sort):
        return [row[0] for row in compare_runs(runs, sort=sort).rows]

    assert names("test/accuracy") == ["fast", "wide", "slow"]
    assert names("BASE_LR") == names("SOLVER.BASE_LR") == ["slow", "fast", "wide"]
    with pytest.raises(ConfigError, match="no metric or key 'test/acuracy'; did you mean 'test/accuracy'"):
        names("test/acuracy")
    with pytest.raises(ConfigError, match=r"'NAME' is one of MODEL.NAME, SOLVER.OPTIMIZER.NAME"):
        names("NAME")


def test_formats(runs):
    table = compare_runs(runs, ["*/accuracy"])
    assert list(csv.reader(io.StringIO(table.csv())))[1] == ["fast", "8", "0.1", "20", "0.4", "0.9", "9"]
    lines = table.markdown().splitlines()
    assert lines[0] == "| run | width | BASE_LR | iterations | test/accuracy | best | at |"
    assert lines[2] == "| fast | 8 | 0.1 | 20 | 0.4 | 0.9 | 9 |"
    lines = table.text().splitlines()
    assert lines[2].split() == ["fast", "8", "0.1", "20", "0.4", "0.9", "9"]
    assert {line.index("0.4") for line in lines[2:]} == {lines[0].index("accuracy") + len("accuracy") - 3}


def test_a_run_without_a_config_or_a_metric_has_empty_cells(runs, tmp_path):
    make_run(tmp_path / "other", [{"iteration": 3, "loss": None}])
    table = compare_runs(read_runs([str(tmp_path)]), sort="test/accuracy")
    assert table.rows[-1] == ["other", None, None, 4, *[None] * 9]


def test_a_key_that_a_config_lacks_is_an_empty_cell(tmp_path):
    make_run(tmp_path / "old", config={"SEED": 1})
    make_run(tmp_path / "other", config={"SEED": 1, "SOLVER": {"BASE_LR": 0.5}})
    table = compare_runs(read_runs([str(tmp_path)]), ["loss"])
    assert table.columns[:3] == ["run", "SOLVER.BASE_LR", "iterations"]
    assert [row[:2] for row in table.rows] == [["old", None], ["other", 0.5]]


def test_the_mode_of_the_best_checkpoint_says_what_is_better(tmp_path):
    best = {"CHECKPOINT": {"BEST": {"METRIC": "test/score", "MODE": "min"}}}
    for name, value in (("a", 3.0), ("b", 2.0)):
        make_run(tmp_path / name, [{"iteration": 0, "test/score": value}, {"iteration": 1, "test/score": 9.0}], best)
    table = compare_runs(read_runs([str(tmp_path)]))
    assert table.rows == [["b", 2, 9.0, 2.0, 0], ["a", 2, 9.0, 3.0, 0]]
