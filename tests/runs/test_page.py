"""The page of curves: its content, its functions under node, and the page in Chromium."""

import json
import re
import shutil
import subprocess
from importlib import resources

import numpy as np
import pytest
from chromium import Browser, find_chromium
from run_folders import make_run

from hookline.config import ConfigError
from hookline.runs import compare_runs, read_runs, write_page
from hookline.runs.figure import smooth
from hookline.runs.selection import charts_over


@pytest.fixture
def page(tmp_path):
    """A page of two runs, and its data."""
    for name in ("a", "<b>"):
        make_run(tmp_path / name, config={"SEED": name}, epochs=4)
    runs = read_runs([str(tmp_path)])
    path = tmp_path / "page.html"
    write_page(runs, str(path), table=compare_runs(runs))
    return path


def data_of(path):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1])


def test_the_page_holds_all_that_it_shows(page):
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["<b>", "a"]
    assert [chart["title"] for chart in data["charts"]] == ["loss", "test/accuracy", "lr", "time"]
    loss = data["charts"][0]["series"]
    assert [(one["run"], one["metric"]) for one in loss] == [
        (i, name) for i in (0, 1) for name in ("loss", "test/loss")
    ]
    assert data["x"][loss[0]["x"]] == [9, 19, 29]
    assert loss[0]["y"] == [1.5, 0.9, None]
    assert data["axes"] == ["iteration", "epoch", "time"]
    assert data["table"]["columns"][:2] == ["run", "SEED"]


def test_the_page_loads_nothing_and_names_are_not_read_as_html(page):
    text = page.read_text()
    assert not re.search(r"(src|href)=\"(?!data:,)|https?://|@import|url\(", text)
    assert "<b>" not in text
    assert len(text) < 40_000


def test_a_long_curve_is_thinned_and_keeps_its_extremes(tmp_path):
    rows = [{"iteration": i, "loss": 5.0 if i == 12_345 else None if i == 7 else i % 10 / 10} for i in range(50_001)]
    runs = read_runs([make_run(tmp_path / "long", rows)])
    write_page(runs, str(tmp_path / "page.html"))
    data = data_of(tmp_path / "page.html")
    (x,), (series,) = data["x"], data["charts"][0]["series"]
    assert len(x) == len(series["y"]) <= 20_002
    assert (x[0], x[-1]) == (0, 50_000)
    assert series["y"][x.index(12_345)] == 5.0


def test_metrics_share_charts_in_the_order_of_interest(tmp_path):
    names = ("time", "lr/b", "lr/a", "a/loss", "train/acc", "test/acc", "rss_mem", "b/loss", "norm")
    rows = [{"iteration": i, **dict.fromkeys(names, 1.0)} for i in (0, 1)]
    runs = read_runs([make_run(tmp_path / "gan", rows)])
    assert charts_over(runs, [], "iteration") == {
        "loss": ["a/loss", "b/loss"],
        "acc": ["test/acc", "train/acc"],
        "norm": ["norm"],
        "lr": ["lr/a", "lr/b"],
        "rss_mem": ["rss_mem"],
        "time": ["time"],
    }
    assert compare_runs(runs).columns[2::3] == ["a/loss", "b/loss", "test/acc"]


def test_a_metric_that_is_not_there_is_named(page, tmp_path):
    runs = read_runs([str(tmp_path / "a")])
    with pytest.raises(
        ConfigError, match=r"no metric matches 'los' \(there are: eta_seconds, .*\); did you mean 'loss'"
    ):
        write_page(runs, str(page), ["los"])


def test_a_file_of_a_run_is_not_replaced(tmp_path):
    folder = make_run(tmp_path / "run", config={"SEED": 1})
    runs = read_runs([folder])
    for name in ("config.yaml", "metrics.json", "model_final.pth"):
        with pytest.raises(ConfigError, match=rf"{name}: is a file of the run"):
            write_page(runs, str(tmp_path / "run" / name))
    with pytest.raises(ConfigError, match="run is a folder"):
        write_page(runs, folder)


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node on the PATH")
def test_the_functions_of_the_page(tmp_path):
    script = resources.files("hookline.runs") / "page.js"
    checks = """
    const assert = require("assert"), page = require(process.argv[2]);
    assert.deepStrictEqual(page.linearTicks(0, 10, 5), [0, 2, 4, 6, 8, 10]);
    assert.deepStrictEqual(page.linearTicks(0.5, 0.5, 5), [0.5]);
    assert.deepStrictEqual(page.logTicks(0.001, 1000, 4), [0.001, 0.1, 10, 1000]);
    assert.deepStrictEqual(page.logTicks(1, 20, 5), [1, 2, 5, 10, 20]);
    assert.deepStrictEqual([0.00012345, 1234567.5, 1234567, 0.5, 0].map(page.format),
      ["0.00012345", "1.235e6", "1234567", "0.5", "0"]);
    assert.deepStrictEqual([12.34, 200, 3723].map(page.formatTime), ["12.3 s", "3:20", "1:02:03"]);
    assert.deepStrictEqual([-5, 4, 6, 99].map((x) => page.nearest([0, 10, 20], x)), [0, 0, 1, 2]);
    assert.deepStrictEqual([-1, 5, 15, 99].map((x) => page.interpolate([0, 10, 20], [0, 1, 3], x)), [0, 0.5, 2, 3]);
    const xs = Array.from({ length: 100000 }, (_, i) => i), ys = xs.map((x) => (x === 777 ? 9 : Math.sin(x)));
    const kept = page.thin(xs, ys, 0, 99999, 300);
    assert(kept.length <= 1204 && kept.includes(777) && kept.includes(99999));
    assert.deepStrictEqual(page.thin(xs, ys, 10, 12, 300), [9, 10, 11, 12, 13]);
    console.log(JSON.stringify(page.smooth([1, null, 3, 2], 0.6)));
    """
    (tmp_path / "check.js").write_text(checks)
    done = subprocess.run([NODE, tmp_path / "check.js", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = smooth(np.array([1, np.nan, 3, 2]), 0.6)
    np.testing.assert_allclose([np.nan if v is None else v for v in json.loads(done.stdout)], expected)


CHART = "document.querySelector('[data-title={}] .overlay').getBoundingClientRect()"


def box(browser, title):
    """The corner and the size of a chart."""
    place = CHART.format(json.dumps(title))
    return browser.run(f"[{place}.left, {place}.top, {place}.width, {place}.height]")


PIXELS = "document.querySelector('[data-title=\"loss\"] canvas').toDataURL()"


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: put it on the PATH or set HOOKLINE_CHROMIUM")
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_chromium(page, dark):
    with Browser(page, 800, dark=dark) as browser:
        assert browser.run("document.body.dataset.ready") == "true"
        assert browser.run("document.documentElement.scrollWidth") == 800
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 150) is dark

        left, top, width, height = box(browser, "loss")
        browser.mouse("Moved", left + width * 0.5, top + height / 2)
        tip = browser.run("document.getElementById('tip').innerText")
        assert "iteration 19" in tip
        assert re.search(r"a · loss\s+0\.9", tip)

        def changed(script):
            before = browser.run(PIXELS)
            browser.run(script)
            return browser.run(PIXELS) != before

        # Zoom by dragging, in all charts; Esc resets.
        whole = browser.run(PIXELS)
        browser.mouse("Pressed", left + width * 0.3, top + 50)
        browser.mouse("Moved", left + width * 0.6, top + 50)
        browser.mouse("Released", left + width * 0.6, top + 50)
        assert browser.run("document.getElementById('reset').hidden") is False
        assert browser.run(PIXELS) != whole
        assert changed("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        assert browser.run(PIXELS) == whole

        slider = "const s = document.getElementById('smoothing'); s.value = {}; s.oninput();"
        assert changed(f"(() => {{ {slider.format(0.9)} }})()")
        assert browser.run("document.getElementById('weight').value") == "0.90"
        assert changed(f"(() => {{ {slider.format(0)} }})()")
        assert browser.run(PIXELS) == whole
        assert changed("document.getElementById('log').click()")
        assert changed("document.querySelector('[value=epoch]').click()")
        browser.mouse("Moved", left + width - 20, top + height / 2)
        assert "epoch 4" in browser.run("document.getElementById('tip').innerText")
        assert changed("document.querySelector('[value=time]').click()")
        assert changed("document.querySelector('#runs input').click()")
        assert changed("document.querySelector('.legend button').click()")

        visible = "[...document.querySelectorAll('.chart')].filter((one) => !one.hidden).length"
        assert browser.run(visible) == 4
        browser.run(
            "(() => { const f = document.getElementById('filter'); f.value = 'acc'; f.oninput({target: f}); })()"
        )
        assert browser.run(visible) == 1

        first = "document.querySelector('#table td').innerText"
        assert browser.run(first) == "<b>"
        browser.run("document.querySelector('#table th').click()")
        browser.run("document.querySelector('#table th').click()")
        assert browser.run(first) == "a"
        assert not browser.errors
        assert all(address.startswith(("file:", "data:")) for address in browser.requests)
