"""A run that is killed repeatedly ends like an uninterrupted one."""

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparing import left_behind
from forker import Forked
from ranks import ROOT, fork, tool

HERE = Path(__file__).parent

# A run with every kind of state.
CONFIG = {
    "_BASE_": str(ROOT / "configs/digits/convnet.yaml"),
    "MODEL": {"ARGS": {"width": 4, "dropout": 0.2}},
    "DATASETS": {"TRAIN": ["augmented:AugmentedDigits"]},
    "DATALOADER": {"BATCH_SIZE": 48},
    "SOLVER": {
        "LR_SCHEDULER_NAME": "WarmupCosineLR",
        "WARMUP_ITERS": 10,
        "ACCUMULATION_STEPS": 2,
        "CHECKPOINT_PERIOD": 4,
    },
    "TEST": {"EVAL_PERIOD": "1ep"},
    "LOG": {"PERIOD": 7},
    "CHECKPOINT": {"MAX_TO_KEEP": 3, "BEST": {"METRIC": "digits_test/accuracy"}},
    "HOOKS": [
        {"NAME": "EMA", "ARGS": {"decay": 0.9}},
        {"NAME": "EarlyStopping", "ARGS": {"metric": "digits_test/accuracy", "patience": 1000}},
    ],
    "SEED": 3,
}


def arguments(folder: Path, config: dict, **loader) -> list[str]:
    folder.mkdir()
    config = {**config, "OUTPUT_DIR": str(folder / "run"), "DATALOADER": {**config["DATALOADER"], **loader}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config-file", str(folder / "config.yaml")]


def start(argv: list[str], log: Path) -> Forked:
    """Start a run."""
    return fork(tool(*argv), HERE, log=log)


def result(folder: Path) -> dict[str, Any]:
    """Return the final weights and state, and the metrics without timings."""
    left = left_behind(folder / "run")
    return {name: left[name] for name in ("weights", "optimizer", "averages", "random numbers", "best weights", "rows")}


def sweep(tmp_path: Path, kills: int, config: dict, **loader) -> None:
    """Kill runs at random moments, resume each until it has ended, and compare it with an uninterrupted one."""
    for name in ("first", "whole"):  # the first start of a process is slow: the second one is measured
        argv = arguments(tmp_path / name, config, **loader)
        begin = time.monotonic()
        assert start(argv, tmp_path / name / "log.txt").wait() == 0, (tmp_path / name / "log.txt").read_text()[-3000:]
        seconds = time.monotonic() - begin
    whole = result(tmp_path / "whole")
    assert len(whole["rows"]) > 5
    assert result(tmp_path / "first") == whole
    moments, numbers = random.Random(0), itertools.count()
    while kills > 0:
        folder = tmp_path / f"killed{next(numbers)}"
        argv, log = [*arguments(folder, config, **loader), "--resume"], folder / "log.txt"
        while status := kill_or_wait(start(argv, log), moments.uniform(0.1, 0.9) * seconds if kills > 0 else None):
            assert status == -signal.SIGKILL, log.read_text()[-3000:]
            kills -= 1
        killed = result(folder)
        for name in whole:
            assert killed[name] == whole[name], (folder, name)


def kill_or_wait(run: Forked, seconds: float | None) -> int:
    """Kill a run and its loader's workers after some seconds, if any are given; return its exit code."""
    if seconds is not None and not run.ended_within(seconds):
        os.killpg(run.pid, signal.SIGKILL)
    return run.wait()


def test_a_run_killed_three_times_ends_like_an_uninterrupted_one(tmp_path):
    sweep(tmp_path, 3, {**CONFIG, "SOLVER": {**CONFIG["SOLVER"], "MAX_ITER": 36}})


# Saving in this process, without workers, is killed at each of its file operations by test_fault_sweep.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_with_workers_and_asynchronous_saves_end_the_same_after_fifteen_kills(tmp_path):
    config = {**CONFIG, "SOLVER": {**CONFIG["SOLVER"], "MAX_ITER": 60}}
    config["CHECKPOINT"] = {**CONFIG["CHECKPOINT"], "ASYNC": True}
    sweep(tmp_path, 15, config, NUM_WORKERS=2)
