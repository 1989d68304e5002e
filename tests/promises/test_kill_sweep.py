"""A run that is killed repeatedly ends like an uninterrupted one."""

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from comparing import frozen, json_rows
from forker import Forked, forker

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return forker.start([ROOT / "tools/train_net.py", *argv], HERE, environment, log=log)


def result(folder: Path) -> dict[str, Any]:
    """Return the final weights, their EMA, and the metrics without timings."""
    final = torch.load(folder / "run/model_final.pth", weights_only=True)
    [average] = [state["averaged_model"] for key, state in final["trainer"]["hooks"].items() if key.startswith("EMA")]
    rows = json_rows(folder / "run/metrics.json", ("time", "data_time", "eta_seconds"))
    return {"weights": frozen(final["model"]), "average": frozen(average), "rows": rows}


def temporary_files(run: Path) -> list[str]:
    return [name for name in os.listdir(run) if name.startswith(".") or "tmp" in name] if run.is_dir() else []


class Sweep:
    """Kills runs with SIGKILL at random moments until there were enough kills, and finishes each run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills = 0
        self.kills_while_saving = 0

    def carry_through(self, folder: Path, argv: list[str], max_kills: int, startup: float) -> None:
        """Do one run that is killed ``max_kills`` times or until it ends."""
        kills = 0
        while True:
            run = start([*argv, "--resume"], folder / "log.txt")
            if kills < max_kills and not self._ended_before_kill(run, folder / "run", startup):
                os.killpg(run.pid, signal.SIGKILL)  # its loader workers too
                kills += 1
            status = run.wait()
            if status == 0:
                break
            assert status == -signal.SIGKILL, (folder / "log.txt").read_text()[-3000:]
        self.kills += kills

    def _ended_before_kill(self, run: Forked, folder: Path, startup: float) -> bool:
        """Wait for a random moment of the run; every third time, for one while a file is written."""
        before = set(temporary_files(folder))
        life = startup * self.random.uniform(0.2, 1.8)
        if self.random.random() < 0.33:
            # Nothing is saved just after the start, so wait until training has begun.
            deadline = time.monotonic() + 3 * startup
            while time.monotonic() < deadline and not run.ended_within(0.0005):
                if set(temporary_files(folder)) - before:
                    self.kills_while_saving += 1
                    return False
            return run.ended_within(0)
        return run.ended_within(life)


def sweep(tmp_path: Path, kills: int, seed: int, config: dict, while_saving: int = 0, **loader) -> Sweep:
    """Kill runs ``kills`` times, and some of them while a file is written; each must end like the reference."""
    for name in ("first", "whole"):  # the first start of a process is slow: the second one is measured
        argv = arguments(tmp_path / name, config, **loader)
        begin = time.monotonic()
        assert start(argv, tmp_path / name / "log.txt").wait() == 0, (tmp_path / name / "log.txt").read_text()[-3000:]
        seconds = time.monotonic() - begin
    whole = result(tmp_path / "whole")
    assert len(whole["rows"]) > 5
    assert result(tmp_path / "first") == whole
    done = Sweep(seed)
    numbers = itertools.count()
    while done.kills < kills or done.kills_while_saving < while_saving:
        folder = tmp_path / f"killed{next(numbers)}"
        done.carry_through(folder, arguments(folder, config, **loader), max(kills - done.kills, 3), startup=seconds / 2)
        killed = result(folder)
        for name in whole:
            assert killed[name] == whole[name], (folder, name)
    return done


def test_a_run_killed_three_times_ends_like_an_uninterrupted_one(tmp_path):
    config = {**CONFIG, "SOLVER": {**CONFIG["SOLVER"], "MAX_ITER": 36}}
    assert sweep(tmp_path, kills=3, seed=0, config=config).kills >= 3


# Saving in this process, without workers, is killed at each of its file operations by test_fault_sweep.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_with_workers_and_asynchronous_saves_killed_thirty_times_end_like_an_uninterrupted_one(tmp_path):
    config = {**CONFIG, "SOLVER": {**CONFIG["SOLVER"], "MAX_ITER": 100}}
    config["CHECKPOINT"] = {**CONFIG["CHECKPOINT"], "ASYNC": True}
    done = sweep(tmp_path, 30, seed=102, config=config, while_saving=5, NUM_WORKERS=2)
    assert done.kills >= 30
    assert done.kills_while_saving >= 5
