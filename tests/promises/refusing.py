"""A folder in which people make mistakes, and a check that a mistake is refused."""

import contextlib

import torch
from loggers import unchanged_logging
from run_folders import make_run

from hookline.cli import main

BASE = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4, hidden: [4]}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 64}}], TEST: [{NAME: synthetic, ARGS: {size: 32}}]}
SOLVER: {MAX_ITER: 3, WARMUP_ITERS: 0, STEPS: []}
TEST: {METRICS: [Accuracy]}
LOG: {PROGRESS_BAR: False, WRITERS: [JSONWriter]}
OUTPUT_DIR: run
"""
TRAIN = "train --config-file base.yaml"


def make_folder(folder):
    """Write configs, files of the user and finished runs."""
    (folder / "base.yaml").write_text(BASE)
    for name in ("mine/config.yaml", "mine/log.txt", "mine/model.py", "mine/model_best.pth", "sub/beside.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "run").mkdir()  # OUTPUT_DIR; default_setup creates it
    (folder / "wrong_import.py").write_text("import no_such_package_of_anyone\n")
    (folder / "bad_syntax.py").write_text("model = (\n")
    (folder / "bad.py").write_text("from hookline.config import LazyCall as L\nmodel = L(dict)(x=1)\n")
    torch.save({"something": torch.ones(3)}, folder / "other.pth")
    make_run(folder / "sweep/a", config={})
    make_run(folder / "wrong_config")
    (folder / "wrong_config/config.yaml").write_text("SEED: [1\n")
    with contextlib.chdir(folder), unchanged_logging():
        assert main([*TRAIN.split(), "OUTPUT_DIR", "done", "SEED", "1"]) == 0


def contents(folder):
    """All paths, with their times of change; that of a run's lock changes when somebody asks for it."""
    ignored = {"__pycache__", "lock"}
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*") if ignored.isdisjoint(path.parts)}


def assert_refused(folder, says, run):
    """Assert that a program ends with 2 and one message."""
    before = contents(folder)
    code, _, err = run()
    assert code == 2, err
    assert err.count("error: ") == 1, err
    assert "Traceback" not in err
    assert says in err
    changed = contents(folder).items() ^ before.items()
    assert not changed, changed
