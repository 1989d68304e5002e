"""The files of ``hookline plot``."""

import math
import sys

import numpy as np
import pytest
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import read_runs, write_curves
from hookline.runs.figure import draw_curve


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    Figure = pytest.importorskip("matplotlib.figure").Figure
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k)))
    return saved


def test_twelve_runs_are_in_natural_order_with_a_style_each(tmp_path, figures):
    rows = [{"iteration": i, "loss": 1 / (i + 1), "lr": 0.1 / (i + 1), "test/loss": 2.0} for i in range(50)]
    names = ["lr1e-4", "lr0.003", "lr0.01", *map(str, range(9))]
    paths = [make_run(tmp_path / name, rows) for name in names]
    write_curves(read_runs(paths), str(tmp_path / "all.png"))
    [figure] = figures
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*map(str, range(9)), *names[:3]]
    assert {axes.get_title(): axes.get_yscale() for axes in figure.axes} == {
        **{"loss": "linear", "test/loss": "linear", "lr": "log"},
    }
    for axes in figure.axes:
        whole = [line for line in axes.lines if line.get_alpha() is None]
        assert len({(line.get_color(), line.get_linestyle()) for line in whole}) == 12
        assert len(axes.lines) == (12 if axes.get_title() == "lr" else 24)  # with the raw ones
        assert axes.get_legend() is None


def test_metrics_of_one_run_whose_names_end_alike_share_a_chart(tmp_path, figures):
    write_curves(read_runs([make_run(tmp_path / "one")]))
    [figure] = figures
    titles = {axes.get_title(): len(axes.lines) for axes in figure.axes}
    assert titles == {"loss": 2, "test/accuracy": 1, "lr": 1, "time": 1}
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["loss", "test/loss"]


def test_a_long_curve_is_averaged_and_nan_is_a_gap(figures):
    from matplotlib.figure import Figure

    axes, values = Figure().subplots(), np.tile([0.0, 2.0], 50)
    values[40:50] = math.nan
    draw_curve(axes, np.arange(100), values, color="C0")
    raw, smooth = (line.get_ydata() for line in axes.lines)
    np.testing.assert_array_equal(raw, values)
    np.testing.assert_array_equal(smooth[10:30], np.ones(20))
    assert np.isnan(smooth[40:50]).all()
    assert np.isfinite(smooth[50:]).all()


@pytest.mark.filterwarnings("error")
def test_values_that_a_logarithmic_scale_cannot_show_give_no_warning(tmp_path, figures):
    rows = [{"iteration": i, "loss": None, "lr": 0.0, "lr/head": 0.1 if i < 50 else 0.0} for i in range(60)]
    runs = read_runs([make_run(tmp_path / "one", rows), make_run(tmp_path / "two", rows)])
    for log in (False, True):
        write_curves(runs, str(tmp_path / "x.png"), log=log)
        scales = {axes.get_title(): axes.get_yscale() for axes in figures[-1].axes}
        assert scales == {"loss": "linear", "lr": "linear", "lr/head": "log"}


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


def test_without_matplotlib_an_error_says_what_to_install(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[plot\]'"):
        write_curves(read_runs([make_run(tmp_path / "one")]))
