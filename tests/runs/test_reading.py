"""Reading the folders of runs."""

import subprocess
import sys

import numpy as np
import pytest
from run_folders import make_run

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, default_setup
from hookline.runs import read_run, read_runs


def test_the_curves_and_the_config_of_a_run(tmp_path):
    path = make_run(tmp_path / "one", config={"SEED": 3, "MODEL": {"ARGS": {"width": 8}, "LOSS": {}}}, epochs=4)
    run = read_run(path)
    assert run.name == "one"
    assert run.curves["test/accuracy"].iterations.tolist() == [19, 40]
    np.testing.assert_equal(run.curves["loss"].values, [1.5, 0.9, np.nan])
    assert run.config == {"SEED": 3, "MODEL.ARGS.width": 8, "MODEL.LOSS": {}}
    assert (run.epoch_length, run.max_iter, run.last_iteration) == (10, 40, 40)


def test_epochs(tmp_path):
    run = read_run(make_run(tmp_path / "one", epochs=4))
    assert run.epochs(np.array([9, 19, 40])).tolist() == [1, 2, 4]


def test_a_real_run_knows_the_length_of_its_epochs(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 4, "num_classes": 2, "hidden": []}),
            *("MODEL.LOSS.NAME", "CrossEntropyLoss", "DATALOADER.BATCH_SIZE", 4, "SOLVER.MAX_ITER", "3ep"),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"shape": [4], "size": 20, "num_classes": 2}}]),
            *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 5, "OUTPUT_DIR", str(tmp_path), "MODEL.DEVICE", "cpu"),
        ]
    )
    default_setup(cfg, None)
    DefaultTrainer(cfg).train()
    run = read_run(str(tmp_path))
    assert (run.epoch_length, run.max_iter) == (5, 15)
    assert run.curves["loss"].iterations.tolist() == [4, 9, 14]
    assert run.config["DATALOADER.BATCH_SIZE"] == 4


def test_names_tell_runs_apart(tmp_path, monkeypatch):
    for name in ("sweep/a", "sweep/b", "sweep/b/previous_001", "sweep/deep/er/c"):
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in read_runs(["sweep"])] == ["a", "b", "deep/er/c"]
    assert [run.name for run in read_runs(["sweep/b", "sweep/b/previous_001"])] == ["b", "b/previous_001"]
    assert [run.name for run in read_runs(["sweep/a", "sweep", "sweep/a/metrics.json"])] == ["a", "b", "deep/er/c"]


def test_a_line_that_is_being_written_is_ignored(tmp_path):
    path = make_run(tmp_path / "one")
    with open(tmp_path / "one/metrics.json", "a") as file:
        file.write('{"iteration": 59, "lo')
    assert read_run(path).last_iteration == 40


def test_the_later_of_two_rows_of_an_iteration_counts(tmp_path):
    rows = [{"iteration": i, "loss": i + 100.0} for i in (0, 1, 2)] + [{"iteration": i, "loss": i} for i in (1, 2, 3)]
    curve = read_run(make_run(tmp_path / "one", rows)).curves["loss"]
    assert curve.iterations.tolist() == [0, 1, 2, 3]
    assert curve.values.tolist() == [100, 1, 2, 3]


BAD = ['{"iteration": 1e3}', '{"iteration": 99999999999999999999}', '{"iteration": 1, "loss": 1' + "0" * 400 + "}"]


@pytest.mark.parametrize(
    "line", [*BAD, "{]", "[1]", "3", '{"loss": 1}', '{"iteration": true}', '{"iteration": "4"}', "\x00"]
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = make_run(tmp_path / "one")
    with open(tmp_path / "one/metrics.json", "a") as file:
        file.write(line + '\n{"iteration": 50, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"one/metrics.json: line 5 is damaged.*remove the line"):
        read_runs([path])


def test_values_that_are_not_finite_or_no_numbers(tmp_path):
    path = make_run(tmp_path / "one", [])
    (tmp_path / "one/metrics.json").write_text(
        '{"iteration": 0, "loss": NaN, "a": "b"}\n{"iteration": 1, "loss": -Infinity}\n{"iteration": 2, "loss": 3}\n'
    )
    curves = read_run(path).curves
    assert list(curves) == ["loss"]
    np.testing.assert_equal(curves["loss"].values, [np.nan, np.nan, 3])


def test_a_damaged_config_is_named(tmp_path):
    path = make_run(tmp_path / "one")
    (tmp_path / "one/config.yaml").write_text("SEED: [1\n")
    with pytest.raises(ConfigError, match=r"one/config.yaml"):
        read_run(path)
    (tmp_path / "one/config.yaml").unlink()
    (tmp_path / "one/metrics.json").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        read_run(path)


def test_paths_without_a_run(tmp_path, monkeypatch):
    make_run(tmp_path / "digits")
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started/config.yaml").write_text("SEED: 1")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    for path, message in {
        "digit": "digit: no such folder; did you mean 'digits'",
        "empty": "empty: no run, since no metrics.json",
        "started": "started: no run, .* first LOG.PERIOD, if LOG.WRITERS has JSONWriter",
        "notes.txt": "notes.txt: is not a run; name its folder",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_runs([path])
    with pytest.raises(ConfigError, match="no run is given"):
        read_runs([])


def test_torch_is_not_imported():
    code = "import sys, hookline.runs; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
