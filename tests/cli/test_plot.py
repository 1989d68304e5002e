"""``hookline plot`` and ``hookline compare``."""

import csv
import io

import pytest
from run_folders import make_run

from hookline.cli import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        make_run(tmp_path / "sweep" / name, config={"SOLVER": {"BASE_LR": rate}})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plot_says_what_it_wrote(runs, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", "sweep/a"]) == 0
    assert capsys.readouterr().out == "Wrote sweep/a/curves.png\n"
    assert main(["plot", "sweep", "--out", "two.png", "--metrics", "loss", "*/accuracy"]) == 0
    assert capsys.readouterr().out == "Wrote two.png\n"
    assert (runs / "two.png").exists()


def test_compare_prints_a_table(runs, capsys):
    assert main(["compare", "sweep", "--format", "csv", "--sort", "loss"]) == 0
    out = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["run"], row["SOLVER.BASE_LR"], row["test/accuracy best"]) for row in rows] == [
        ("a", "0.1", "0.75"),
        ("b", "0.2", "0.75"),
    ]
