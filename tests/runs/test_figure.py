"""The files of ``hookline plot``."""

import importlib.util
import sys

import numpy as np
import pytest
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import read_runs, write_curves
from hookline.runs.figure import _smooth

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
PNG = b"\x89PNG"


@needs_matplotlib
def test_an_image_is_written_beside_the_metrics_of_one_run(tmp_path):
    path = make_run(tmp_path / "one", epochs=4)
    assert write_curves(read_runs([path]), axis="epoch", smoothing=0.5, log=True) == f"{path}/curves.png"
    assert (tmp_path / "one/curves.png").read_bytes().startswith(PNG)


@needs_matplotlib
def test_the_image_of_several_runs_is_written_into_the_current_folder(tmp_path, monkeypatch):
    for name in ("a", "b"):
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    runs = read_runs(["."])
    assert write_curves(runs) == "curves.png"
    assert write_curves(runs, "one.svg", ["loss", "test/*"]) == "one.svg"
    assert "<svg" in (tmp_path / "one.svg").read_text()


@needs_matplotlib
def test_an_axis_or_an_ending_that_is_not_there(tmp_path):
    runs = read_runs([make_run(tmp_path / "one", [{"iteration": 1, "loss": 1.0}])])
    with pytest.raises(ConfigError, match=r"one cannot be drawn by epoch: .* log.txt"):
        write_curves(runs, axis="epoch")
    with pytest.raises(ConfigError, match=r"x.txt: the file must end with .png"):
        write_curves(runs, str(tmp_path / "x.txt"))
    with pytest.raises(ConfigError, match="smoothing must be at least 0 and less than 1, not 1"):
        write_curves(runs, smoothing=1)
    with pytest.raises(ConfigError, match=r"nowhere/x.png cannot be written"):
        write_curves(runs, str(tmp_path / "nowhere/x.png"))


@needs_matplotlib
def test_a_wrong_name_leaves_the_files_of_the_folder_alone(tmp_path):
    path = make_run(tmp_path / "one")
    (tmp_path / "one/.hookline").mkdir()
    (tmp_path / "one/.hookline/files").write_text('"metrics.json"\n')
    (tmp_path / "one/curves.png").write_text("mine")
    with pytest.raises(ConfigError, match="no metric matches 'los'"):
        write_curves(read_runs([path]), metrics=["los"])
    assert (tmp_path / "one/curves.png").read_text() == "mine"
    write_curves(read_runs([path]), metrics=["loss"])
    assert (tmp_path / "one/curves.png.old").read_text() == "mine"


def test_without_matplotlib_an_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"an image needs matplotlib: pip install 'hookline\[plot\]'"):
        write_curves(read_runs([make_run(tmp_path / "one")]))


def test_smoothing_has_no_bias_at_the_start():
    np.testing.assert_allclose(_smooth(np.full(5, 3.0), 0.9), 3.0)
    assert _smooth(np.array([1.0, np.nan, 2.0]), 0.5).tolist()[0] == 1.0
