"""``hookline plot`` and ``hookline compare``."""

import csv
import io
import subprocess
import sys

import pytest
from run_folders import make_run

from hookline.cli import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        make_run(tmp_path / "sweep" / name, config={"SOLVER": {"BASE_LR": rate}}, epochs=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plot_says_what_it_wrote(runs, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", "sweep/a"]) == 0
    assert capsys.readouterr().out == "Wrote sweep/a/curves.png\n"
    assert main(["plot", "sweep", "--x", "epoch", "--out", "two.png", "--metrics", "loss", "*/accuracy"]) == 0
    assert capsys.readouterr().out == "Wrote two.png\n"
    assert (runs / "two.png").exists()


def test_compare_prints_a_table(runs, capsys):
    assert main(["compare", "sweep", "--format", "csv", "--sort", "BASE_LR"]) == 0
    out = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["run"], row["SOLVER.BASE_LR"], row["test/accuracy best"]) for row in rows] == [
        ("a", "0.1", "0.75"),
        ("b", "0.2", "0.75"),
    ]
    assert main(["compare", "sweep", "--metrics", "loss", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("| run | BASE_LR | iterations | loss | best | at |")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot"], "error: no run is given; name its folder before the options"),
        (["plot", "swep"], "error: swep: no such folder; did you mean 'sweep'?"),
        (["plot", "sweep/a", "--metrics", "accuracy"], "did you mean 'test/accuracy'?"),
        (["plot", "sweep/a", "--out", "x.txt"], "error: x.txt: the file must end with .png"),
        (["plot", "--schedule", "none.yaml"], "error: none.yaml"),
        (
            ["compare", "sweep", "--sort", "lost"],
            "error: --sort: there is no metric or key 'lost'; did you mean 'loss'?",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(runs, capsys, words, message):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_neither_imports_torch(runs):
    code = "import sys; from hookline.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for words in (["plot", "sweep/a", "--out", "x.png"], ["compare", "sweep"]):
        assert subprocess.run([sys.executable, "-c", code, *words], check=False).returncode == 0
