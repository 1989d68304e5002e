"""CHECKPOINT.BEST.METRIC is the monitor of the whole run: the default of what watches a metric."""

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer
from hookline.engine.setup.check import check_config
from hookline.hooks import BestCheckpointer, EarlyStopping

PLATEAU = "torch.optim.lr_scheduler:ReduceLROnPlateau"


def make(tmp_path, hooks=(), config=None, **options):
    data = (torch.randn(8, 2), torch.zeros(8, 1))
    return Trainer(
        nn.Linear(2, 1),
        data,
        data,
        loss=nn.MSELoss(),
        metrics=["Loss"],
        length=6,
        batch_size=8,
        eval_period=1,
        hooks=hooks,
        output_dir=tmp_path / "run",
        seed=1,
        config={"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False, **(config or {})},
        **options,
    )


MONITOR = {"monitor": "test/loss", "monitor_mode": "min"}


@pytest.mark.parametrize("hook", [EarlyStopping(patience=2), {"NAME": "EarlyStopping", "ARGS": {"patience": 2}}])
def test_early_stopping_best_and_plateau_follow_it(hook, tmp_path):
    trainer = make(
        tmp_path, [hook], lr=0.0, lr_scheduler={"NAME": PLATEAU, "ARGS": {"patience": 0, "factor": 0.5}}, **MONITOR
    )
    assert trainer.scheduler.mode == "min"
    result = trainer.train()
    assert result.reason == "early stopping: test/loss has not been better than " + result.reason.split()[-4] + (
        " for 2 evaluations"
    )
    assert result.iteration == 3
    best = trainer.find_hook(BestCheckpointer)
    assert best.best[0][0] == result.metrics["test/loss"]
    assert (tmp_path / "run/model_best.pth").exists()
    trainer = make(tmp_path, [EarlyStopping(mode="max")], **MONITOR)
    assert trainer.find_hook(EarlyStopping).mode == "max"  # its own argument


def test_a_metric_and_mode_of_its_own_have_precedence(tmp_path):
    args = {"NAME": PLATEAU, "ARGS": {"mode": "max"}}
    trainer = make(tmp_path, [EarlyStopping("test/loss", mode="max")], lr_scheduler=args, **MONITOR)
    assert trainer.find_hook(EarlyStopping).mode == "max"
    assert trainer.scheduler.mode == "max"
    own = {"SOLVER.LR_SCHEDULER_METRIC": "test/loss"}
    trainer = make(tmp_path, lr_scheduler=PLATEAU, monitor="test/loss", config=own)
    assert trainer.scheduler.mode == "min"  # torch's default: the metric is the scheduler's own


@pytest.mark.parametrize(
    "hook", [EarlyStopping(), "EarlyStopping", {"NAME": "EarlyStopping", "ARGS": {"period": "1ep"}}]
)
def test_without_a_metric_anywhere_the_check_says_so(hook, tmp_path):
    with pytest.raises(ConfigError, match=r"HOOKS\[0\].ARGS.metric: is missing, and so is CHECKPOINT.BEST.METRIC"):
        make(tmp_path, [hook])


def test_a_wrong_monitor_is_named_at_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"no metric 'test/los' among test/loss; did you mean 'test/loss'"):
        make(tmp_path, [EarlyStopping()], monitor="test/los")
    with pytest.raises(ConfigError, match=r"Trainer\(monitor_mode=...\).*'min'"):
        make(tmp_path, monitor="test/loss", monitor_mode="mn")
    with pytest.raises(ConfigError, match="not the function my_module:score"):
        make(tmp_path, lr_scheduler=PLATEAU, monitor="my_module:score")


def test_a_trainer_without_a_config_needs_the_argument():
    trainer = SimpleTrainer(nn.Linear(1, 1), [torch.ones(1)], torch.optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(ConfigError, match="EarlyStopping has no metric, and the run has none either"):
        trainer.register_hooks([EarlyStopping()])


def test_a_trial_run_follows_it_and_keeps_no_best(tmp_path):
    trainer = make(tmp_path, [EarlyStopping()], lr_scheduler=PLATEAU, config={"FAST_DEV_RUN": 1}, **MONITOR)
    assert trainer.train().reason == "completed"
    assert not (tmp_path / "run").exists()


def test_plateau_without_a_metric_anywhere():
    cfg = get_cfg()
    cfg.SOLVER.LR_SCHEDULER_NAME = PLATEAU
    with pytest.raises(ConfigError, match=r"its default is CHECKPOINT.BEST.METRIC, which is empty too"):
        check_config(cfg)
