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
from ranks import fork, tool
from sweep_parts import CONFIG

HERE = Path(__file__).parent

# Also with accumulation and early stopping.
CONFIG = {
    **CONFIG,
    "SOLVER": {**CONFIG["SOLVER"], "LR_SCHEDULER_NAME": "WarmupCosineLR", "ACCUMULATION_STEPS": 2, "MAX_ITER": 40},
    "HOOKS": [*CONFIG["HOOKS"], {"NAME": "EarlyStopping", "ARGS": {"metric": "synthetic/loss", "patience": 1000}}],
}


def arguments(folder: Path, config: dict) -> list[str]:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "OUTPUT_DIR": str(folder / "run")}))
    return ["--config-file", str(folder / "config.yaml")]


def start(argv: list[str], log: Path) -> Forked:
    """Start a run."""
    return fork(tool(*argv), HERE, log=log)


def result(folder: Path) -> dict[str, Any]:
    """Return what a run left. How many checkpoints are kept may depend on the kills."""
    left = left_behind(folder / "run")
    return {name: value for name, value in left.items() if name not in ("state", "files")}


def sweep(tmp_path: Path, kills: int, config: dict) -> None:
    """Kill runs at random moments, resume each until it has ended, and compare it with an uninterrupted one."""
    for name in ("first", "whole"):  # the first start of a process is slow: the second one is measured
        argv = arguments(tmp_path / name, config)
        begin = time.monotonic()
        assert start(argv, tmp_path / name / "log.txt").wait() == 0, (tmp_path / name / "log.txt").read_text()[-3000:]
        seconds = time.monotonic() - begin
    whole = result(tmp_path / "whole")
    assert len(whole["rows"]) > 5
    assert result(tmp_path / "first") == whole
    moments, numbers = random.Random(0), itertools.count()
    while kills > 0:
        folder = tmp_path / f"killed{next(numbers)}"
        argv, log = [*arguments(folder, config), "--resume"], folder / "log.txt"
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
    sweep(tmp_path, 3, CONFIG)


# Saving in this process, without workers, is killed at each of its file operations by test_fault_sweep.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_with_workers_and_asynchronous_saves_end_the_same_after_fifteen_kills(tmp_path):
    loader = {**CONFIG["DATALOADER"], "NUM_WORKERS": 2}
    sweep(tmp_path, 15, {**CONFIG, "CHECKPOINT": {**CONFIG["CHECKPOINT"], "ASYNC": True}, "DATALOADER": loader})
