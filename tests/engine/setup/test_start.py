"""What a start shows and writes, with default_setup() and without, and what it leaves to a trainer of one's own."""

import os

import pytest
import torch
from starts import arguments, contents, set_up, train
from torch import nn

from hookline.config import ConfigError, UnknownKeyError, get_cfg
from hookline.engine import DefaultTrainer, default_setup
from hookline.hooks import CallbackHook


def test_the_precision_of_float32_is_set(make):
    before = torch.get_float32_matmul_precision()
    try:
        set_up(make("FLOAT32_PRECISION", "high"), arguments())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


class Failing(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        raise ZeroDivisionError("of a data set")


@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_start_changes_nothing_on_disk_nor_in_the_next_log(quick, tmp_path, there, setup):
    if there:
        train(quick())
    before = contents(tmp_path)
    cfg = quick("SEED", 5)
    if setup:
        default_setup(cfg, arguments())
    with pytest.raises(ZeroDivisionError):
        Failing(cfg)
    assert contents(tmp_path) == before
    train(quick("SEED", 8))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "SEED = 8\n" in log
    assert "SEED = 5\n" not in log


def test_a_trainer_logs_and_saves_its_config_with_default_setup_and_without(quick, tmp_path):
    weights, hooks = [], [{"NAME": "EvalHook", "ARGS": {"eval_period": 3}}]
    for setup in (False, True):
        folder = tmp_path / str(setup)
        cfg = quick("OUTPUT_DIR", str(folder), "SOLVER.BASE_LR", "0.5", "SOLVER.WARMUP_ITERS", "1ep", "HOOKS", hooks)
        trainer = train(cfg, setup=setup)
        weights.append(nn.utils.parameters_to_vector(trainer.model.parameters()))
        log = (folder / "log.txt").read_text()
        assert log.count("Config, where it differs from the defaults") == 1
        assert f"torch {torch.__version__}" in log
        assert "  SOLVER.BASE_LR = 0.5\n" in log
        assert "SOLVER.GAMMA" not in log
        assert "Command line: " in log
        again = get_cfg()
        again.merge_from_file(str(folder / "config.yaml"))
        assert again == cfg
    assert torch.equal(*weights)
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER"):
        DefaultTrainer(quick("SOLVER.MAX_ITER", -1))


def test_unknown_names_are_left_to_the_trainer_or_stop_one_without_a_method_for_them(quick, tmp_path):
    cfg = quick()
    cfg.SOLVER.OPTIMIZER = "ADAMW_8BIT"
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    cfg.DATALOADER.SAMPLER_TRAIN = "ClassAwareSampler"
    default_setup(cfg, arguments())
    with pytest.raises(UnknownKeyError, match="coco_2017_train"):
        DefaultTrainer(cfg)
    assert contents(tmp_path) == {}


def test_a_section_may_be_set_to_the_name_of_its_component_as_in_detectron2(quick):
    cfg = quick()
    cfg.SOLVER.OPTIMIZER = "ADAMW"
    assert type(DefaultTrainer(cfg).optimizer) is torch.optim.AdamW


def test_a_process_of_torchrun_that_has_not_joined_the_others_is_refused(quick, monkeypatch, tmp_path):
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"launch\(main, 1\)"):
        DefaultTrainer(quick())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trial_takes_so_many_steps_and_batches_and_writes_nothing(make, tmp_path, steps):
    seen = []

    class Trainer(DefaultTrainer):
        def build_hooks(self):
            events = ("after_step", "after_epoch", "after_eval_step", "after_save")
            record = {event: lambda *_, event=event: seen.append(event) for event in events}
            return [*super().build_hooks(), CallbackHook(**record)]

    cfg = make(
        *("FAST_DEV_RUN", steps, "SOLVER.MAX_ITER", "9ep", "SOLVER.WARMUP_ITERS", "1ep", "SOLVER.STEPS", ("3ep",)),
        *("TEST.EVAL_PERIOD", "1ep", "CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "HOOKS", ["EarlyStopping"]),
        *("TEST.EXPECTED_RESULTS", [["synthetic", "accuracy", 0.99, 0.01]]),
    )
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    result = trainer.train()
    assert (result.reason, result.iteration) == ("completed", steps)
    assert "synthetic/accuracy" in result.metrics
    assert seen == ["after_step"] * steps + ["after_epoch"] + ["after_eval_step"] * steps
    assert not list(tmp_path.iterdir())
