"""What wins on a resume, the config or the checkpoint."""

import functools
import json
import logging

import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, seed_all_rng
from hookline.hooks import CallbackHook


@pytest.fixture
def log():
    """What hookline logs, also once its logger has been set up not to pass messages on."""

    class Lines(logging.Handler):
        def __init__(self):
            super().__init__(logging.WARNING)
            self.text = ""

        def emit(self, record):
            self.text += record.getMessage() + "\n"

    handler = Lines()
    logging.getLogger("hookline").addHandler(handler)
    yield handler
    logging.getLogger("hookline").removeHandler(handler)


@pytest.fixture
def make(tmp_path):
    """Trainers of one run: a small MLP on synthetic data."""

    def make(*overrides, resume=False):
        cfg = get_cfg()
        cfg.MODEL.NAME = "MLP"
        cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
        cfg.merge_from_list(["MODEL.ARGS.in_features", 8, "MODEL.ARGS.num_classes", 4, "MODEL.ARGS.hidden", (4,)])
        cfg.DATASETS.TRAIN = ("synthetic",)
        cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupConstantLR"
        cfg.SOLVER.WARMUP_ITERS = 0
        cfg.SOLVER.MAX_ITER = 4
        cfg.LOG.WRITERS = []
        cfg.SEED = 0
        cfg.OUTPUT_DIR = str(tmp_path)
        cfg.merge_from_list(list(overrides))
        seed_all_rng(0)
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=resume)
        return trainer

    return make


def rates(trainer):
    seen = []
    note = CallbackHook(before_step=lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))
    trainer.register_hooks([note])
    trainer.train()
    return seen


def test_a_learning_rate_changed_in_the_config_is_used_and_said(make, log):
    make("SOLVER.BASE_LR", 0.01).train()
    trainer = make("SOLVER.BASE_LR", 0.5, "SOLVER.MAX_ITER", 6, resume=True)
    assert rates(trainer) == [0.5, 0.5]
    assert "SOLVER.BASE_LR: 0.5 instead of 0.01" in log.text


def test_a_longer_run_follows_its_own_schedule_from_the_first_step(make):
    linear = ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.BASE_LR", 1.0]
    whole = rates(make(*linear, "SOLVER.MAX_ITER", 8))
    make(*linear).train()
    assert rates(make(*linear, "SOLVER.MAX_ITER", 8, resume=True)) == pytest.approx(whole[4:])


def test_weight_decay_changed_in_the_config_is_used(make):
    make("SOLVER.WEIGHT_DECAY", 0.1).train()
    trainer = make("SOLVER.WEIGHT_DECAY", 0.2, resume=True)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.2


def test_what_hooks_changed_in_the_run_is_kept(make):
    first = make()

    def change(trainer):
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.7

    first.register_hooks([CallbackHook(after_step=change)])
    first.train()
    assert make("SOLVER.BASE_LR", 0.5, resume=True).optimizer.param_groups[0]["weight_decay"] == 0.7


def test_an_unchanged_config_changes_nothing_and_says_nothing(make, log):
    first = make()
    first.train()
    second = make(resume=True)
    assert "Resuming with another" not in log.text
    assert str(second.optimizer.state_dict()["param_groups"]) == str(first.optimizer.state_dict()["param_groups"])


def test_how_the_optimizer_computes_comes_from_the_config(make):
    make("SOLVER.OPTIMIZER.ARGS.foreach", True).train()
    trainer = make("SOLVER.OPTIMIZER.ARGS.foreach", False, resume=True)
    assert trainer.optimizer.param_groups[0]["foreach"] is False


def test_another_model_is_refused_with_what_to_do(make):
    make().train()
    with pytest.raises(ConfigError, match=r"another model.*MODEL\.WEIGHTS"):
        make("MODEL.ARGS.hidden", (4, 4), resume=True)


def test_smoothed_metrics_go_on_over_a_resume(make, tmp_path):
    def rows(folder):
        keep = ("iteration", "loss", "lr")
        lines = (json.loads(line) for line in (folder / "metrics.json").read_text().splitlines())
        return [{key: row[key] for key in keep if key in row} for row in lines]

    log = ["LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 8, "SOLVER.CHECKPOINT_PERIOD", 3]
    make(*log, "SOLVER.MAX_ITER", 20, "OUTPUT_DIR", str(tmp_path / "whole")).train()
    broken = make(*log, "SOLVER.MAX_ITER", 20)

    class Killed(BaseException):
        pass

    def kill(trainer):
        raise Killed

    for stop in (7, 13):
        broken.register_hooks([CallbackHook(before_step=lambda t, s=stop: kill(t) if t.iter == s else None)])
        with pytest.raises(Killed):
            broken.train()
        broken = make(*log, "SOLVER.MAX_ITER", 20, resume=True)
    broken.train()
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert [row["iteration"] for row in rows(tmp_path)] == [7, 15, 19]
    ours, theirs = (
        torch.load(folder / "model_final.pth", weights_only=True)["model"] for folder in (tmp_path, tmp_path / "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_evaluation_between_the_last_writing_and_the_checkpoint_is_written_once(make, tmp_path):
    """Evaluated at 4, saved at 5, written at 7, killed at 9: the row of 4 was written after the checkpoint."""
    make = functools.partial(make, "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"], "TEST.EVAL_PERIOD", 5)
    make = functools.partial(make, "LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 8, "SOLVER.CHECKPOINT_PERIOD", 6)
    killed = make("SOLVER.MAX_ITER", 12)

    def kill(trainer):
        if trainer.iter == 9:
            raise KeyboardInterrupt

    killed.register_hooks([CallbackHook(before_step=kill)])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    make("SOLVER.MAX_ITER", 12, resume=True).train()
    iterations = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert iterations == [4, 7, 9, 11, 12]
