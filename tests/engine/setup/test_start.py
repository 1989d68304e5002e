import argparse
import pickle
import re

import pytest
import torch
from starts import arguments, contents, set_up, train

from hookline.config import ConfigError, UnknownKeyError, get_cfg
from hookline.engine import (
    DefaultTrainer,
    default_setup,
)
from hookline.engine.data import build_train_loader
from hookline.engine.setup.start import take_start
from hookline.hooks import JSONWriter


def test_the_log_shows_environment_and_changed_keys(make, tmp_path, capsys):
    set_up(make("SOLVER.BASE_LR", "0.5", "SEED", "3"), arguments())
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert "  SOLVER.BASE_LR = 0.5\n" in shown
    assert "SOLVER.GAMMA" not in shown
    assert len(shown.splitlines()) < 30
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "  SOLVER.BASE_LR = 0.5\n" in log
    assert "Command line: " in log
    assert re.match(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rank0\] hookline\.engine\.setup\.start INFO: hookline ", log
    )


def test_the_saved_config_loads_as_the_same_config(make, tmp_path):
    hooks = [{"NAME": "EvalHook", "ARGS": {"eval_period": 3}}]
    cfg = make("SOLVER.MAX_ITER", "3ep", "HOOKS", hooks, "SEED", "-1")
    set_up(cfg, arguments())
    again = get_cfg()
    again.merge_from_file(str(tmp_path / "run" / "config.yaml"))
    assert again == cfg
    assert again.diff(cfg) == {}


def test_an_evaluation_does_not_change_the_runs_config(make, tmp_path):
    set_up(make("SEED", "3"), arguments())
    before = (tmp_path / "run" / "config.yaml").read_text()
    set_up(make("SEED", "4"), arguments(eval_only=True))
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert not (tmp_path / "run" / "previous_001").exists()


def test_the_precision_of_float32_is_set(make):
    before = torch.get_float32_matmul_precision()
    try:
        set_up(make("FLOAT32_PRECISION", "high"), arguments())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_setup_without_arguments(make, tmp_path):
    set_up(make(), argparse.Namespace())
    set_up(make(), None)
    assert (tmp_path / "run" / "config.yaml").exists()


class Failing(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        raise ZeroDivisionError("of a data set")


@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_start_changes_nothing_on_disk(quick, tmp_path, there, setup):
    if there:
        train(quick())
    before = contents(tmp_path)
    cfg = quick("SEED", 5)
    if setup:
        default_setup(cfg, arguments())
    with pytest.raises(ZeroDivisionError):
        Failing(cfg)
    assert contents(tmp_path) == before


def test_a_failed_start_adds_nothing_to_the_next_log(quick, tmp_path):
    default_setup(quick("SEED", 5), arguments())
    train(quick("SEED", 8))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "SEED = 8\n" in log
    assert "SEED = 5\n" not in log


def test_the_first_file_written_begins_the_prepared_run(quick, tmp_path):
    train(quick("SEED", 1))
    default_setup(quick("SEED", 2), arguments())
    assert not (tmp_path / "run" / "previous_001").exists()
    writer = JSONWriter(str(tmp_path / "run" / "metrics.json"))
    writer.resume(0)
    assert "SEED: 2\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert "SEED: 1\n" in (tmp_path / "run" / "previous_001" / "config.yaml").read_text()


def test_a_trainer_without_setup_writes_the_same_config_and_log(quick, tmp_path):
    logs, states = [], []
    for folder, setup in (("alone", False), ("after", True)):
        trainer = train(quick("OUTPUT_DIR", str(tmp_path / folder)), setup=setup)
        states.append(torch.cat([value.flatten() for value in trainer.model.state_dict().values()]))
        logs.append((tmp_path / folder / "log.txt").read_text())
        assert "SEED: 3\n" in (tmp_path / folder / "config.yaml").read_text()
    assert torch.equal(*states)
    for log in logs:
        assert log.count("Config, where it differs from the defaults") == 1
        assert "  SEED = 3\n" in log
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER: is 0"):
        DefaultTrainer(quick("SOLVER.MAX_ITER", 0))


def test_a_trainer_without_setup_draws_a_seed_and_keeps_the_config(quick):
    cfg = quick("SEED", -1)
    seeds = {DefaultTrainer(cfg).cfg.SEED for _ in range(2)}
    assert len(seeds) == 2
    assert min(seeds) >= 0
    assert cfg.SEED == -1


class Ported(DefaultTrainer):
    """Builds what its config names by names that hookline does not know."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        assert cfg.SOLVER.OPTIMIZER == "ADAMW_8BIT"
        return torch.optim.AdamW(model.parameters(), cfg.SOLVER.BASE_LR)

    @classmethod
    def build_train_loader(cls, cfg):
        assert (cfg.DATASETS.TRAIN, cfg.DATALOADER.SAMPLER_TRAIN) == (("coco_2017_train",), "ClassAwareSampler")
        cfg = get_cfg()
        cfg.MODEL.DEVICE = "cpu"
        cfg.DATASETS.TRAIN = ("synthetic",)
        return build_train_loader(cfg)


def ported(cfg):
    cfg.SOLVER.OPTIMIZER = "ADAMW_8BIT"
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    cfg.DATALOADER.SAMPLER_TRAIN = "ClassAwareSampler"
    return cfg


def test_unknown_names_are_left_to_the_trainer(quick, capsys):
    cfg = ported(quick())
    default_setup(cfg, arguments())
    shown = capsys.readouterr().out
    assert "Left to the trainer's build_optimizer, or to the script: SOLVER.OPTIMIZER.NAME: unknown optimizer" in shown
    trainer = Ported(cfg)
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.AdamW


def test_unknown_names_stop_a_trainer_that_has_no_part_of_its_own(quick, tmp_path):
    cfg = ported(quick())
    default_setup(cfg, arguments())
    with pytest.raises(UnknownKeyError, match="unknown dataset 'coco_2017_train'"):
        DefaultTrainer(cfg)
    assert contents(tmp_path) == {}


def test_names_with_arguments_and_names_of_modules_are_checked_at_once(quick):
    for key, value, word in (
        ("MODEL.NAME", "no_such_module:Net", "no_such_module"),
        ("SOLVER.OPTIMIZER.ARGS.betta", 1, "betta"),
    ):
        with pytest.raises(ConfigError, match=word):
            default_setup(quick(key, value), arguments())


def test_a_process_of_torchrun_that_has_not_joined_the_others_is_refused(quick, monkeypatch, tmp_path):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"one of 2 processes that torchrun started.* call launch\(main, 1\)"):
        DefaultTrainer(quick())
    assert list(tmp_path.iterdir()) == []


def test_a_resume_without_setup_uses_the_seed_of_the_run(quick, tmp_path):
    first = train(quick("SEED", -1), setup=False)
    again = DefaultTrainer(quick("SEED", -1, "SOLVER.MAX_ITER", 4))
    assert again.cfg.SEED != first.cfg.SEED
    again.resume_or_load(resume=True)
    assert again.cfg.SEED == first.cfg.SEED
    again.train()
    assert f"SEED: {first.cfg.SEED}\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert "Resuming with SEED" not in (tmp_path / "run" / "log.txt").read_text()


def test_a_start_belongs_to_the_config_that_it_was_prepared_with(make):
    cfg, other = make("SEED", "3"), make("SEED", "4")
    default_setup(cfg, arguments())
    assert take_start(other) is None
    moved = cfg.clone()
    moved.OUTPUT_DIR += "_2"
    assert take_start(moved) is None
    start = take_start(cfg.clone())
    assert start is not None
    assert take_start(cfg) is None
    assert pickle.loads(pickle.dumps(cfg)) == cfg
