"""The learning rates of a config, without training."""

from pathlib import Path

import numpy as np
import pytest

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, default_setup
from hookline.engine.program.schedule import schedule_of
from hookline.runs import read_run

CONFIG = """
MODEL: {NAME: MLP, ARGS: {in_features: 4, num_classes: 2, hidden: [3]}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {shape: [4], size: 20, num_classes: 2}}]}
DATALOADER: {BATCH_SIZE: 4}
SOLVER: {MAX_ITER: 3ep, WARMUP_ITERS: 1ep, LR_SCHEDULER_NAME: WarmupCosineLR}
LOG: {WRITERS: [JSONWriter], PERIOD: 1}
OUTPUT_DIR: run
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return "run.yaml"


STEP_LR = [
    *("SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:StepLR", "SOLVER.WARMUP_ITERS", "0"),
    *("SOLVER.LR_SCHEDULER_ARGS", "{'step_size': 1}", "SOLVER.LR_SCHEDULER_INTERVAL", "epoch"),
]


@pytest.mark.parametrize("opts", [[], STEP_LR])
def test_the_rates_are_those_that_a_run_logs(config, opts):
    schedule = schedule_of(config, opts)
    assert schedule.epoch_length == 5
    assert not Path("run").exists()

    cfg = get_cfg()
    cfg.merge_from_file(config)
    cfg.merge_from_list(opts)
    default_setup(cfg, None)
    DefaultTrainer(cfg).train()
    np.testing.assert_allclose(schedule.curves["lr"].values, read_run("run").curves["lr"].values, rtol=1e-6)


def test_groups_with_other_rates_have_curves_of_their_own(config):
    curves = schedule_of(config, ["SOLVER.BIAS_LR_FACTOR", "2.0"]).curves
    assert list(curves) == ["lr", "lr x2"]
    np.testing.assert_allclose(curves["lr x2"].values, 2 * curves["lr"].values)


def test_rates_that_depend_on_training_are_refused(config):
    plateau = ["SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:ReduceLROnPlateau", "SOLVER.WARMUP_ITERS", "0"]
    plateau += ["DATASETS.TEST", "['synthetic']", "TEST.METRICS", "['Loss']", "TEST.EVAL_PERIOD", "1ep"]
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau follows the metric 'synthetic/loss'.*only in training"):
        schedule_of(config, [*plateau, "SOLVER.LR_SCHEDULER_METRIC", "synthetic/loss"])
