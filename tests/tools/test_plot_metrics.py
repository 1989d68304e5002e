"""``tools/plot_metrics.py``."""

import pytest
from run_folders import make_run
from run_tools import run_tool


def test_runs_are_drawn_into_an_image(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    image = tmp_path / "curves.png"
    code, out, _ = run_tool("plot_metrics.py", [image, make_run(tmp_path / "one")], capsys)
    assert code == 0
    assert "one  test/accuracy: 0.75 at iteration 40" in out
    assert image.exists()


def test_a_missing_run_exits_with_2(tmp_path, capsys):
    code, _, err = run_tool("plot_metrics.py", ["x.png", tmp_path / "none"], capsys)
    assert code == 2
    assert "none: no such folder" in err
