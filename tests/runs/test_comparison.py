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
        model = {"NAME": "Net", "ARGS": {"width": 32 if name == "wide" else 8}}
        config = {"SEED": 1, "OUTPUT_DIR": name, "MODEL": model, "SOLVER": {"BASE_LR": rate}}
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
    table = compare_runs(runs, ["*/accuracy"])
    assert list(csv.reader(io.StringIO(table.csv())))[1] == ["fast", "8", "0.1", "20", "0.4", "0.9", "9"]
    assert table.text().splitlines()[2].split() == ["fast", "8", "0.1", "20", "0.4", "0.9", "9"]


def test_sorted_by_the_best_value_of_a_metric_with_empty_cells_for_what_a_run_lacks(runs, tmp_path):
    make_run(tmp_path / "other", [{"iteration": 3, "loss": None}])
    table = compare_runs(read_runs([str(tmp_path)]), sort="test/accuracy")
    assert [row[0] for row in table.rows] == ["fast", "wide", "slow", "other"]
    assert table.rows[-1] == ["other", None, None, 4, *[None] * 9]
    with pytest.raises(ConfigError, match="test/accuracy"):
        compare_runs(runs, sort="test/acuracy")


def test_the_mode_of_the_best_checkpoint_says_what_is_better(tmp_path):
    best = {"CHECKPOINT": {"BEST": {"METRIC": "test/score", "MODE": "min"}}}
    for name, value in (("a", 3.0), ("b", 2.0)):
        make_run(tmp_path / name, [{"iteration": 0, "test/score": value}, {"iteration": 1, "test/score": 9.0}], best)
    table = compare_runs(read_runs([str(tmp_path)]))
    assert table.rows == [["b", 2, 9.0, 2.0, 0], ["a", 2, 9.0, 3.0, 0]]


def test_groups_of_runs_that_differ_only_in_a_key_have_mean_and_deviation(tmp_path):
    for rate, seed, value in ((0.1, 1, 0.5), (0.1, 2, 0.7), (0.1, 3, 0.9), (0.2, 1, 0.6)):
        rows = [{"iteration": 4, "test/accuracy": 0.95 - rate}, {"iteration": 9, "test/accuracy": value}]
        make_run(tmp_path / f"{rate}_{seed}", rows, {"SEED": seed, "SOLVER": {"BASE_LR": rate}})
    runs = read_runs([str(tmp_path)])
    table = compare_runs(runs, ["*/accuracy"], group=["SEED"], sort="test/accuracy")
    assert table.columns[:4] == ["runs", "SOLVER.BASE_LR", "iterations", "test/accuracy"]
    assert table.columns[4:] == ["test/accuracy deviation", "test/accuracy best"]
    assert table.rows == [[3, 0.1, 10, pytest.approx(0.7), pytest.approx(0.2), 0.9], [1, 0.2, 10, 0.6, None, 0.75]]
    assert table.text().split()[:6] == ["runs", "BASE_LR", "iterations", "test/accuracy", "deviation", "best"]
    with pytest.raises(ConfigError, match="'SEED'"):
        compare_runs(runs, group=["SED"])
    rows = [{"iteration": 4, "test/accuracy": 0.85}, {"iteration": 9, "test/accuracy": float("nan")}]
    make_run(tmp_path / "failed", rows, {"SEED": 4, "SOLVER": {"BASE_LR": 0.1}})
    table = compare_runs(read_runs([str(tmp_path)]), ["*/accuracy"], group=["SEED"], sort="test/accuracy")
    assert table.rows[0] == [4, 0.1, 10, None, None, 0.9]
