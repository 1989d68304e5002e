import argparse
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.config.files.folder_lock import FolderLock
from hookline.engine import (
    DefaultTrainer,
    begin_run,
    check_config,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    default_writers,
    seed_all_rng,
)
from hookline.engine.checkpoint import CheckpointError
from hookline.hooks import CommonMetricPrinter, HookBase, JSONWriter, TensorboardXWriter

SOUND = [
    "MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "MODEL.DEVICE", "cpu",
    "MODEL.LOSS.NAME", "CrossEntropyLoss",
    "DATASETS.TRAIN", ["synthetic"], "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def logging_is_put_back():
    loggers = [logging.getLogger(name) for name in ("hookline", "fvcore")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def make(tmp_path):
    def make(*overrides):
        cfg = get_cfg()
        cfg.merge_from_list([*SOUND, "OUTPUT_DIR", str(tmp_path / "run"), *overrides])
        return cfg

    return make


def arguments(**kwargs):
    return argparse.Namespace(**{"resume": False, "eval_only": False, **kwargs})


def set_up(cfg, args=None):
    """What a script does whose loop then begins at once."""
    default_setup(cfg, args)
    begin_run(cfg)


# ---------------------------------------------------------------------------- arguments and errors


def test_the_command_line_has_detectron2s_options():
    args = default_argument_parser().parse_args(
        ["--config-file", "a.yaml", "--resume", "--num-gpus", "2", "SOLVER.BASE_LR", "0.1", "SEED", "3"]
    )
    assert (args.config_file, args.resume, args.eval_only, args.num_gpus) == ("a.yaml", True, False, 2)
    assert (args.num_machines, args.machine_rank, args.dist_url) == (1, 0, "auto")
    assert args.opts == ["SOLVER.BASE_LR", "0.1", "SEED", "3"]


def test_help_ends_with_examples_of_the_script(capsys):
    with pytest.raises(SystemExit):
        default_argument_parser().parse_args(["--help"])
    assert "--eval-only MODEL.WEIGHTS path/to/model.pth" in capsys.readouterr().out


def test_a_config_error_ends_the_program_with_its_message_alone(capsys):
    with pytest.raises(SystemExit) as end, config_errors_exit():
        raise ConfigError("SOLVER.BASE_LR: is wrong")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: SOLVER.BASE_LR: is wrong\n"


def test_other_errors_come_through():
    with pytest.raises(ZeroDivisionError), config_errors_exit():
        raise ZeroDivisionError


# ---------------------------------------------------------------------------- checks


def test_a_sound_config_passes_the_check_and_nothing_is_written(make, tmp_path):
    check_config(make())
    assert os.listdir(tmp_path) == []


def test_the_defaults_pass_the_check():
    check_config(get_cfg())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["MODEL.NAME", "MPL"], "MODEL.NAME.*'MPL'.*did you mean 'MLP'"),
        (["MODEL.ARGS.hiden", [3]], r"MODEL\.ARGS\.hiden.*hidden"),
        (["MODEL.ARGS.in_features", "eight"], r"MODEL\.ARGS\.in_features.*'eight'"),
        (["MODEL.LOSS.NAME", "CrossEntropy"], "MODEL.LOSS.NAME.*CrossEntropyLoss"),
        (["MODEL.DEVICE", "gpu"], "MODEL.DEVICE.*'gpu'"),
        (["DATASETS.TRAIN", ["sinthetic"]], r"DATASETS\.TRAIN\[0\].*synthetic"),
        (["DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"sise": 3}}]], r"DATASETS\.TEST\[0\]\.ARGS\.sise.*size"),
        (["DATALOADER.BATCH_SIZE", "0"], "DATALOADER.BATCH_SIZE"),
        (["DATALOADER.SAMPLER_TRAIN", "EpochSample"], "DATALOADER.SAMPLER_TRAIN.*EpochSampler"),
        (["SOLVER.OPTIMIZER.NAME", "AdmaW"], "SOLVER.OPTIMIZER.NAME.*AdamW"),
        (["SOLVER.OPTIMIZER.ARGS.lr", "0.1"], r"SOLVER\.OPTIMIZER\.ARGS\.lr.*SOLVER\.BASE_LR"),
        (["SOLVER.LR_SCHEDULER_NAME", "WarmupCosinLR"], "SOLVER.LR_SCHEDULER_NAME.*WarmupCosineLR"),
        (["SOLVER.ACCUMULATION_STEPS", "0"], "SOLVER.ACCUMULATION_STEPS: must be at least 1, not 0"),
        (["TEST.METRICS", ["Acuracy"]], r"TEST\.METRICS\[0\].*Accuracy"),
        (["HOOKS", [{"NAME": "IterationTimr"}]], r"HOOKS\[0\].*IterationTimer"),
        (["HOOKS", [{"NAME": "IterationTimer", "ARGS": {"warmup": 1}}]], r"HOOKS\[0\]\.ARGS\.warmup.*warmup_iter"),
        (["LOG.WRITERS", ["JSONWritr"]], r"LOG\.WRITERS\[0\].*JSONWriter"),
        (["MODEL.WEIGHTS", "nowhere.pth"], "MODEL.WEIGHTS: there is no file nowhere.pth"),
        (["CHECKPOINT.BEST.METRIC", "synthetic/acuracy"], "CHECKPOINT.BEST.METRIC.*synthetic/accuracy"),
        (
            ["CHECKPOINT.BEST.METRIC", "synthetic/loss", "DATASETS.TEST", []],
            "CHECKPOINT.BEST.METRIC.*DATASETS.TEST is empty",
        ),
        (["OUTPUT_DIR", ""], "OUTPUT_DIR: is empty"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_an_unsound_config_is_an_error_that_names_key_and_remedy(make, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        default_setup(make(*overrides), arguments())
    assert os.listdir(tmp_path) == []


def test_missing_weights_propose_the_nearest_file(make, tmp_path):
    (tmp_path / "model_final.pth").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"did you mean '.*model_final\.pth'"):
        check_config(make("MODEL.WEIGHTS", str(tmp_path / "model_finl.pth")))


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_an_output_folder_that_cannot_be_is_an_error(make, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR.*file"):
        default_setup(make("OUTPUT_DIR", str(tmp_path / name)), arguments())


# ---------------------------------------------------------------------------- setup


def test_the_log_shows_the_environment_and_what_differs_from_the_defaults(make, tmp_path, capsys):
    set_up(make("SOLVER.BASE_LR", "0.5", "SEED", "3"), arguments())
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert "  SOLVER.BASE_LR = 0.5\n" in shown
    assert "SOLVER.GAMMA" not in shown
    assert len(shown.splitlines()) < 30
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "  SOLVER.BASE_LR = 0.5\n" in log
    assert "Command line: " in log
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rank0\] hookline\.engine\.start INFO: hookline ", log)


def test_the_saved_config_fed_back_is_the_same_config(make, tmp_path):
    hooks = [{"NAME": "EvalHook", "ARGS": {"eval_period": 3}}]
    cfg = make("SOLVER.MAX_ITER", "3ep", "HOOKS", hooks, "SEED", "-1")
    set_up(cfg, arguments())
    again = get_cfg()
    again.merge_from_file(str(tmp_path / "run" / "config.yaml"))
    assert again == cfg
    assert again.diff(cfg) == {}


def test_the_seed_makes_all_draws_repeatable(make):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_up(make("SEED", "5"), arguments())
    first = draw()
    seed_all_rng(5)
    assert draw() == first
    seed_all_rng(6)
    assert draw() != first


def test_a_seed_is_drawn_and_saved_where_none_is_set(make, tmp_path):
    seeds = set()
    for _ in range(2):
        cfg = make()
        cfg.freeze()
        set_up(cfg, arguments())
        assert cfg.SEED >= 0
        assert cfg.is_frozen()
        assert f"SEED: {cfg.SEED}\n" in (tmp_path / "run" / "config.yaml").read_text()
        seeds.add(cfg.SEED)
    assert len(seeds) == 2


def test_a_resumed_run_goes_on_with_the_seed_that_was_drawn_for_it(make):
    first, second = make(), make()
    set_up(first, arguments())
    set_up(second, arguments(resume=True))
    assert second.SEED == first.SEED


def test_a_seed_that_is_set_wins_over_the_saved_one(make):
    set_up(make(), arguments())
    cfg = make("SEED", "7")
    set_up(cfg, arguments(resume=True))
    assert cfg.SEED == 7


@pytest.mark.parametrize("lost", ["config.yaml", "last_checkpoint"])
def test_a_drawn_seed_is_taken_from_the_last_checkpoint_where_the_config_is_lost(make, tmp_path, lost):
    first, second = make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8, "SOLVER.CHECKPOINT_PERIOD", 1), make()
    set_up(first, arguments())
    DefaultTrainer(first).train()
    for name in {"config.yaml", lost}:
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "model_0000000.pth").write_bytes(b"damaged")
    set_up(second, arguments(resume=True))
    assert second.SEED == first.SEED


def test_an_evaluation_leaves_the_runs_config_alone(make, tmp_path):
    set_up(make("SEED", "3"), arguments())
    before = (tmp_path / "run" / "config.yaml").read_text()
    set_up(make("SEED", "4"), arguments(eval_only=True))
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert not (tmp_path / "run" / "previous_001").exists()


def test_arguments_without_resume_or_eval_only_are_fine(make, tmp_path):
    set_up(make(), argparse.Namespace())
    set_up(make(), None)
    assert (tmp_path / "run" / "config.yaml").exists()


# ---------------------------------------------------------------------------- the folder


def train(cfg, resume=False, setup=False):
    """Train as a script in Python does."""
    if setup:
        default_setup(cfg, arguments(resume=resume))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


@pytest.fixture
def quick(make):
    def quick(*overrides):
        return make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8, "SEED", 3, *overrides)

    return quick


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


MINE = ["inference.py", "pretrained.pth", "notes.txt.old.1", "thesis.old.3", "events.out.tfevents.1.mine", "log.txt.1"]


@pytest.fixture
def mine(tmp_path):
    """Files of the user in the run's folder, with names much like a run's."""
    folder = tmp_path / "run"
    for name in (*MINE, "inference/other/predictions.jsonl", "inference_server/run.py", "photos.old.2019/a.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return contents(folder)


def test_a_run_that_is_resumed_or_moved_away_leaves_files_of_the_user_alone(quick, tmp_path, mine):
    train(quick())
    train(quick("SOLVER.MAX_ITER", 4), resume=True)
    own = contents(tmp_path / "run").keys() - mine.keys()
    train(quick())
    after = contents(tmp_path / "run")
    assert {name: after.get(name) for name in mine} == mine
    own -= {".hookline/lock"}
    assert {name.removeprefix("previous_001/") for name in after if name.startswith("previous_001/")} == own
    assert any(name.startswith("events.out.tfevents") for name in own)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.json", "log.txt", "last_checkpoint", "model_0000009.pth"])
@pytest.mark.parametrize("setup", [True, False])
def test_a_file_of_the_user_that_a_run_would_overwrite_is_refused(quick, tmp_path, name, setup):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(ConfigError, match=rf"OUTPUT_DIR: .*{re.escape(name)}.* choose another OUTPUT_DIR"):
        train(quick(), setup=setup)
    assert contents(tmp_path / "run") == {name: b"mine"}


def test_several_earlier_runs_stand_side_by_side(quick, tmp_path):
    for seed in (1, 2, 3):
        train(quick("SEED", seed))
    for folder, seed in (("run/previous_001", 1), ("run/previous_002", 2), ("run", 3)):
        assert f"SEED: {seed}\n" in (tmp_path / folder / "config.yaml").read_text()
        assert "model_final.pth" in os.listdir(tmp_path / folder)


def test_a_run_that_was_moved_away_can_be_resumed_where_it_is(quick, tmp_path):
    train(quick())
    train(quick())
    previous = str(tmp_path / "run" / "previous_001")
    trainer = train(quick("OUTPUT_DIR", previous, "SOLVER.MAX_ITER", 4), resume=True)
    assert trainer.start_iter == 2
    assert not os.path.exists(os.path.join(previous, "previous_001"))


def without_records(folder):
    """Make a run look like one of version 0.1."""
    shutil.rmtree(folder / ".hookline")


def test_a_run_of_an_older_version_is_resumed_and_then_has_its_files_recorded(quick, tmp_path):
    train(quick())
    without_records(tmp_path / "run")
    (tmp_path / "run" / "notes.md").write_text("mine")
    assert train(quick("SOLVER.MAX_ITER", 4), resume=True).start_iter == 2
    train(quick())
    assert {"config.yaml", "metrics.json", "model_final.pth"} <= set(os.listdir(tmp_path / "run" / "previous_001"))
    assert (tmp_path / "run" / "notes.md").exists()


def test_a_new_run_in_the_folder_of_an_older_version_is_refused(quick, tmp_path):
    train(quick())
    without_records(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"a run of an older version of hookline.*--resume it"):
        train(quick())
    assert contents(tmp_path / "run") == before


class Failing(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        raise ZeroDivisionError("of a data set")


@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_start_that_fails_changes_nothing_on_the_disk(quick, tmp_path, there, setup):
    if there:
        train(quick())
    before = contents(tmp_path)
    cfg = quick("SEED", 5)
    if setup:
        default_setup(cfg, arguments())
    with pytest.raises(ZeroDivisionError):
        Failing(cfg)
    assert contents(tmp_path) == before
    assert there or os.listdir(tmp_path) == []


def test_a_start_that_was_refused_leaves_no_trace_in_the_next_ones_log(quick, tmp_path):
    default_setup(quick("SEED", 5), arguments())
    train(quick("SEED", 8))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "SEED = 8\n" in log
    assert "SEED = 5\n" not in log


def test_the_first_file_that_is_written_begins_the_run_that_was_prepared(quick, tmp_path):
    train(quick("SEED", 1))
    default_setup(quick("SEED", 2), arguments())
    assert not (tmp_path / "run" / "previous_001").exists()
    writer = JSONWriter(str(tmp_path / "run" / "metrics.json"))
    writer.resume(0)
    assert "SEED: 2\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert "SEED: 1\n" in (tmp_path / "run" / "previous_001" / "config.yaml").read_text()


def test_a_trainer_alone_checks_seeds_and_writes_config_and_log_as_after_a_setup(quick, tmp_path):
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


def test_a_trainer_alone_draws_a_seed_for_itself_and_leaves_the_config_as_it_was(quick):
    cfg = quick("SEED", -1)
    seeds = {DefaultTrainer(cfg).cfg.SEED for _ in range(2)}
    assert len(seeds) == 2
    assert min(seeds) >= 0
    assert cfg.SEED == -1


def test_a_run_is_refused_where_another_trains_and_may_begin_when_that_has_ended(quick, tmp_path):
    lock = FolderLock(str(tmp_path / "run" / ".hookline" / "lock"), "")
    code = (
        "import sys; from hookline.config.files.run_folder import run_folder\n"
        "run_folder(sys.argv[1]).take(resume=False, writes=lambda name: False)\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"taken\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on .*wait for it to end"):
                train(quick(), resume=resume)
        default_setup(quick(), arguments(eval_only=True))  # adds nothing but its log
        other.kill()
    train(quick())
    assert not lock.held


def test_an_output_folder_that_is_a_uri_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: s3://bucket/run is a URI"):
        default_setup(make("OUTPUT_DIR", "s3://bucket/run"), arguments())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["new", "eval_only"])
@pytest.mark.parametrize("there", [True, False])
def test_an_output_folder_that_cannot_be_written_is_refused(make, tmp_path, monkeypatch, how, there):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only file system
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: .* cannot be written; allow writing there"):
        default_setup(make(), arguments(**{how: True}))
    assert os.listdir(tmp_path) == (["run"] if there else [])


def test_a_folder_that_is_removed_before_the_first_save_is_not_created_again(quick, tmp_path):
    class Remove(HookBase):
        def after_step(self):
            shutil.rmtree(tmp_path / "run")

    trainer = DefaultTrainer(quick("SOLVER.MAX_ITER", 1, "LOG.WRITERS", []))
    trainer.register_hooks([Remove()])
    with pytest.raises(CheckpointError, match="its folder is gone"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_an_evaluation_adds_to_the_log_and_moves_nothing(quick, tmp_path):
    train(quick())
    before = contents(tmp_path / "run")
    set_up(quick(), arguments(eval_only=True))
    after = contents(tmp_path / "run")
    assert after.pop("log.txt").startswith(before.pop("log.txt"))
    assert after == before


def test_an_evaluation_does_not_add_to_a_log_of_the_user(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"log\.txt exists and was not written by a run"):
        default_setup(make(), arguments(eval_only=True))


# ---------------------------------------------------------------------------- writers


def test_the_default_writers_are_console_json_and_tensorboard(tmp_path):
    from hookline.hooks import EventStorage

    writers = default_writers(str(tmp_path), 10)
    assert [type(writer) for writer in writers] == [CommonMetricPrinter, JSONWriter, TensorboardXWriter]
    with EventStorage() as storage:
        storage.put_scalar("loss", 1)
        for writer in writers:
            writer.write()
            writer.close()
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"iteration": 0, "loss": 1.0}
    assert any(name.startswith("events.out") for name in os.listdir(tmp_path))
