"""A replayed step equals the run's to the bit, names its samples, and leaves the run's files as they were."""

import json
import logging
import random
import re

import numpy as np
import pytest
import torch
from small_runs import config_trainer
from torch.utils.data import Dataset

from hookline.cli import main
from hookline.config import ConfigError
from hookline.engine.replay import iterations_of, replay, samples_at
from hookline.engine.replay.repeat import compare_curves
from hookline.engine.replay.report import report_text
from hookline.hooks import HookBase
from hookline.runs.reading import Curve

RUN = (
    *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 20),
    *("TEST.EVAL_PERIOD", 5, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy"),
)


class Jittered(Dataset):
    """Images with random noise."""

    def __init__(self):
        self.images = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.images[index] + 0.1 * torch.randn(1, 4, 4) + random.random(), index % 4


JITTERED = ("DATASETS.TRAIN", [f"{__name__}:Jittered"])


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".hookline" not in path.parts and "replay_" not in path.as_posix()
    }


@pytest.mark.parametrize(
    "options",
    [
        JITTERED,
        ("SOLVER.ACCUMULATION_STEPS", 2, "HOOKS", [{"NAME": "EMA", "ARGS": {"decay": 0.9}}]),
        ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "bfloat16", "CHECKPOINT.MAX_TO_KEEP", 1),
    ],
    ids=["augmentation", "accumulation-ema", "bfloat16"],
)
def test_a_replay_equals_the_run_to_the_bit_and_changes_none_of_its_files(tmp_path, options):
    config_trainer(tmp_path, *RUN, *options).train()
    before = content(tmp_path)
    rows = {row["iteration"]: row for row in map(json.loads, (tmp_path / "metrics.json").read_text().splitlines())}
    report = replay(str(tmp_path), 17)
    assert report["checkpoint"] == "model_0000013.pth"
    assert report["compared"]["first_difference"] is None
    assert report["compared"]["values"] > 8
    if "SOLVER.ACCUMULATION_STEPS" not in options:
        assert report["losses"]["loss"] == [rows[17]["loss"]]
    assert [sample["index"] for sample in report["samples"]] == samples_at(str(tmp_path), 17)
    assert len(report["losses_per_sample"]) == 8
    assert content(tmp_path) == before
    assert {path.name for path in (tmp_path / "replay_17").iterdir()} == {"report.json", "samples.png"}
    assert (tmp_path / "replay_17" / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_a_replay_follows_a_plateau_schedule_to_the_step_that_stops_the_run(tmp_path):
    stopping = {"NAME": "EarlyStopping", "ARGS": {"metric": "synthetic/loss", "mode": "min", "min_delta": 9.0}}
    options = (
        *("SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:ReduceLROnPlateau", "SOLVER.WARMUP_ITERS", 0),
        *("SOLVER.LR_SCHEDULER_ARGS", {"factor": 0.5, "patience": 0, "threshold": 0.99}),
        *("SOLVER.LR_SCHEDULER_METRIC", "synthetic/loss", "TEST.EVAL_PERIOD", 3, "HOOKS", [stopping]),
    )
    assert config_trainer(tmp_path, *RUN, *options).train().iteration == 12
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["lr"] for row in rows[6:12]] == [0.05] * 3 + [0.025] * 3
    report = replay(str(tmp_path), 11)
    assert (report["checkpoint"], report["compared"]["first_difference"]) == ("model_0000006.pth", None)
    assert report["compared"]["values"] > 15
    with pytest.raises(ConfigError, match=r"the run ended at iteration 12: .*synthetic/loss"):
        replay(str(tmp_path), 15)
    assert not (tmp_path / "replay_15").exists()


def test_a_replay_from_the_beginning_equals_the_run(tmp_path):
    config_trainer(tmp_path, *RUN, *JITTERED).train()
    report = replay(str(tmp_path), 3, save=True)
    assert report["checkpoint"] == ""
    assert report["compared"]["first_difference"] is None
    assert "All" in report_text(report)
    saved = torch.load(tmp_path / "replay_3" / "step.pth", weights_only=True)
    assert saved["iteration"] == 3
    assert saved["batch"][0].shape == (8, 1, 4, 4)


def test_a_changed_config_is_found_in_the_metrics(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    (tmp_path / "log.txt.rank1").touch()
    report = replay(str(tmp_path), 3, overrides=["SOLVER.BASE_LR", 0.2])
    difference = report["compared"]["first_difference"]
    assert (difference["iteration"], difference["metric"]) == (0, "lr")
    assert "other config: SOLVER.BASE_LR 0.2" in report_text(report)
    assert not report["config_changes"]
    assert re.search(r"the run: torch .*, ranks: 2\n  now: torch .*, ranks: 1", report_text(report))


def test_a_compiled_step_is_replayed_in_its_parts(tmp_path):
    args = {"backend": "eager"}
    config_trainer(tmp_path, *RUN, "SOLVER.COMPILE_STEP", True, "SOLVER.COMPILE_STEP_ARGS", args).train()
    report = replay(str(tmp_path), 17)
    assert report["modules"]
    assert report["overrides"] == ["SOLVER.COMPILE_STEP", "False"]
    assert not report["config_changes"]


def test_a_changed_config_is_found_after_a_checkpoint_and_the_console_stays_as_it_was(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    (console,) = (one for one in logging.getLogger("hookline").handlers if "Console" in type(one).__name__)
    console.setLevel("WARNING")
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("BASE_LR: 0.1", "BASE_LR: 0.2"))  # as a resume would
    report = replay(str(tmp_path), 17)
    assert report["checkpoint"] == "model_0000013.pth"
    difference = report["compared"]["first_difference"]
    assert (difference["iteration"], difference["metric"]) == (14, "lr")
    assert "resumed with another config: SOLVER.BASE_LR was 0.1 and is 0.2\n" in report_text(report)
    assert "--set SOLVER.BASE_LR 0.1\n" in report_text(report)
    assert console.level == logging.WARNING


def test_a_run_without_metrics_json_is_replayed_and_not_compared(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    (tmp_path / "metrics.json").unlink()
    report = replay(str(tmp_path), 3)
    assert report["compared"] == {"values": 0, "first_difference": None}
    assert "no rows on the way" in report_text(report)


@pytest.mark.parametrize(
    ("name", "compared"), [("time_to_event", 1), ("aux_mem", 1), ("time_p95", 0), ("slowest_rank", 0)]
)
def test_only_the_measured_metrics_of_hookline_are_left_out(name, compared):
    run, again = ({name: Curve(np.array([3]), np.array([value]))} for value in (1.0, 2.0))
    found = compare_curves(run, again, 0, 5)
    assert (found["values"], found["first_difference"] is not None) == (compared, bool(compared))


class Counts(HookBase):
    steps = 0

    def after_step(self):
        Counts.steps += 1


def test_a_hook_takes_part_in_the_replay_only(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    replay(str(tmp_path), 16, extra_hooks=[Counts()])
    assert Counts.steps == 3


def test_a_step_that_the_run_does_not_have_is_refused(tmp_path, capsys):
    config_trainer(tmp_path, *RUN).train()
    for iteration in (-1, 20):
        with pytest.raises(ConfigError, match="iteration"):
            replay(str(tmp_path), iteration)
    with pytest.raises(ConfigError, match="no run of hookline"):
        replay(str(tmp_path / "other"), 3)
    (tmp_path / "replay_2").mkdir()
    (tmp_path / "replay_2" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="replay_2: has files that no replay has written"):
        replay(str(tmp_path), 2)
    (tmp_path / "replay_4").write_text("mine")
    with pytest.raises(ConfigError, match="replay_4: has files"):
        replay(str(tmp_path), 4)
    with pytest.raises(SystemExit, match="2"):
        main(["replay", str(tmp_path), "--iter", "3", "--trainer", "os:path"])
    assert "--trainer: os:path is no subclass of DefaultTrainer" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [0, 3])
def test_samples_of_an_endless_sampler_are_those_of_its_one_stream(tmp_path, limit):
    options = ("DATALOADER.SAMPLER_TRAIN", "TrainingSampler", "DATALOADER.LIMIT_TRAIN_BATCHES", limit)
    config_trainer(tmp_path, *RUN, *options).train()
    report = replay(str(tmp_path), 17)
    assert [sample["index"] for sample in report["samples"]] == samples_at(str(tmp_path), 17)


def test_all_steps_that_read_a_sample_are_found(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    run = str(tmp_path)
    steps = iterations_of(run, 7)
    assert len(steps) == 4  # 20 iterations of 8 samples are 4 epochs of 40
    assert steps == [step for step in range(20) if 7 in samples_at(run, step)]
    with pytest.raises(ConfigError, match="sample 40"):
        iterations_of(run, 40)
