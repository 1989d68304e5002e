"""The files of ``hookline plot``."""

import sys

import pytest
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import read_runs, write_curves


@pytest.mark.parametrize("name", ["one.png", "one.svg", "one.pdf"])
def test_only_an_earlier_plot_is_replaced(tmp_path, name):
    pytest.importorskip("matplotlib")
    runs, out = read_runs([make_run(tmp_path / "one")]), tmp_path / name
    for _ in range(2):
        write_curves(runs, str(out), ["loss"])
    for path in (out, tmp_path / "one/curves.png"):
        path.write_text("mine")
        with pytest.raises(ConfigError, match="is no output of hookline"):
            write_curves(runs, str(out) if path == out else "", ["loss"])
        assert path.read_text() == "mine"


def test_wrong_names_leave_the_files_of_the_folder_alone(tmp_path):
    pytest.importorskip("matplotlib")
    path = make_run(tmp_path / "one")
    (tmp_path / "one/curves.png").write_text("mine")
    runs = read_runs([path])
    for arguments, names in (
        ({"metrics": ["los"]}, "'los'"),
        ({"out": str(tmp_path / "x.txt")}, "x.txt"),
        ({"out": str(tmp_path / "nowhere/x.png")}, "nowhere/x.png"),
    ):
        with pytest.raises(ConfigError, match=names):
            write_curves(runs, **arguments)
    assert (tmp_path / "one/curves.png").read_text() == "mine"


def test_without_matplotlib_an_error_says_what_to_install(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[plot\]'"):
        write_curves(read_runs([make_run(tmp_path / "one")]))
