import argparse
import json
import logging
import os
import random
import re

import numpy as np
import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine import (
    DefaultTrainer,
    check_config,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    default_writers,
    seed_all_rng,
    unchanged_if_refused,
)
from hookline.engine.start import set_aside
from hookline.hooks import CommonMetricPrinter, JSONWriter, TensorboardXWriter

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
    default_setup(make("SOLVER.BASE_LR", "0.5", "SEED", "3"), arguments())
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
    default_setup(cfg, arguments())
    again = get_cfg()
    again.merge_from_file(str(tmp_path / "run" / "config.yaml"))
    assert again == cfg
    assert again.diff(cfg) == {}


def test_the_seed_makes_all_draws_repeatable(make):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    default_setup(make("SEED", "5"), arguments())
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
        default_setup(cfg, arguments())
        assert cfg.SEED >= 0
        assert cfg.is_frozen()
        assert f"SEED: {cfg.SEED}\n" in (tmp_path / "run" / "config.yaml").read_text()
        seeds.add(cfg.SEED)
    assert len(seeds) == 2


def test_a_resumed_run_goes_on_with_the_seed_that_was_drawn_for_it(make):
    first, second = make(), make()
    default_setup(first, arguments())
    default_setup(second, arguments(resume=True))
    assert second.SEED == first.SEED


def test_a_seed_that_is_set_wins_over_the_saved_one(make):
    default_setup(make(), arguments())
    cfg = make("SEED", "7")
    default_setup(cfg, arguments(resume=True))
    assert cfg.SEED == 7


@pytest.mark.parametrize("lost", ["config.yaml", "last_checkpoint"])
def test_a_drawn_seed_is_taken_from_the_last_checkpoint_where_the_config_is_lost(make, tmp_path, lost):
    first, second = make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8), make()
    default_setup(first, arguments())
    DefaultTrainer(first).train()
    for name in {"config.yaml", lost}:
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "model_0000009.pth").write_bytes(b"damaged")
    default_setup(second, arguments(resume=True))
    assert second.SEED == first.SEED


def test_an_evaluation_leaves_the_runs_config_alone(make, tmp_path):
    default_setup(make("SEED", "3"), arguments())
    before = (tmp_path / "run" / "config.yaml").read_text()
    default_setup(make("SEED", "4"), arguments(eval_only=True))
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert not (tmp_path / "run" / "previous_001").exists()


def test_arguments_without_resume_or_eval_only_are_fine(make, tmp_path):
    default_setup(make(), argparse.Namespace())
    default_setup(make(), None)
    assert (tmp_path / "run" / "config.yaml").exists()


# ---------------------------------------------------------------------------- an earlier run

LEFT = ["config.yaml", "events.out.tfevents.1", "log.txt", "log.txt.rank1", "metrics.json", "model_final.pth"]


@pytest.fixture
def earlier(tmp_path):
    folder = tmp_path / "run"
    (folder / "inference").mkdir(parents=True)
    for name in (*LEFT, "last_checkpoint", "notes.md"):
        (folder / name).write_text(name)
    return folder


def test_an_earlier_run_is_set_aside_and_nothing_of_it_lost(earlier):
    assert set_aside(str(earlier)) == str(earlier / "previous_001")
    assert sorted(os.listdir(earlier)) == ["notes.md", "previous_001"]
    moved = sorted(os.listdir(earlier / "previous_001"))
    assert moved == sorted([*LEFT, "last_checkpoint", "inference"])
    assert all((earlier / "previous_001" / name).read_text() == name for name in LEFT)


def test_several_earlier_runs_stand_side_by_side(earlier):
    set_aside(str(earlier))
    (earlier / "metrics.json").write_text("second")
    assert set_aside(str(earlier)) == str(earlier / "previous_002")
    assert (earlier / "previous_001" / "metrics.json").read_text() == "metrics.json"
    assert (earlier / "previous_002" / "metrics.json").read_text() == "second"


def test_weights_that_the_new_run_starts_from_stay_where_they_are(earlier, monkeypatch):
    monkeypatch.chdir(earlier.parent)
    set_aside(str(earlier), keep="run/model_final.pth")
    assert sorted(os.listdir(earlier)) == ["model_final.pth", "notes.md", "previous_001"]


def test_a_folder_without_an_earlier_run_is_left_alone(tmp_path):
    (tmp_path / "notes.md").write_text("")
    assert set_aside(str(tmp_path)) == ""
    assert set_aside(str(tmp_path / "not there")) == ""
    assert os.listdir(tmp_path) == ["notes.md"]


def test_a_new_run_sets_the_earlier_one_aside_and_says_where(make, earlier, capsys):
    default_setup(make(), arguments())
    assert "previous_001" in capsys.readouterr().out
    assert sorted(os.listdir(earlier)) == ["config.yaml", "log.txt", "notes.md", "previous_001"]


@pytest.mark.parametrize("how", ["resume", "eval_only"])
def test_resuming_and_evaluating_set_nothing_aside(make, earlier, how):
    (earlier / "config.yaml").write_text("SEED: 3")
    default_setup(make("SEED", "1"), arguments(**{how: True}))
    assert (earlier / "metrics.json").read_text() == "metrics.json"
    assert (earlier / "log.txt").read_text().startswith("log.txt[")


# ---------------------------------------------------------------------------- what is refused


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "log.txt"
    }


def set_up_and_fail(cfg, error=ConfigError, **kwargs):
    with unchanged_if_refused(cfg.OUTPUT_DIR):
        default_setup(cfg, arguments(**kwargs))
        raise error("MODEL.WEIGHTS: do not fit")


@pytest.mark.parametrize("how", ["new", "resume", "eval_only"])
def test_what_is_refused_after_the_setup_leaves_the_earlier_run_in_its_place(make, earlier, how):
    (earlier / "config.yaml").write_text("SEED: 3")
    before = contents(earlier)
    with pytest.raises(ConfigError):
        set_up_and_fail(make("SEED", "5"), **{how: True})
    assert contents(earlier) == before
    log = (earlier / "log.txt").read_text()
    assert log.startswith("log.txt[")
    assert "SEED = 5" in log
    assert log.endswith("Refused, and the folder left as it was: MODEL.WEIGHTS: do not fit\n")


def test_what_is_refused_after_the_setup_leaves_no_new_folder(make, tmp_path):
    with pytest.raises(ConfigError):
        set_up_and_fail(make())
    assert os.listdir(tmp_path) == []


def test_of_a_folder_with_files_of_the_user_these_stay(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.md").write_text("")
    with pytest.raises(ConfigError):
        set_up_and_fail(make())
    assert os.listdir(tmp_path / "run") == ["notes.md"]


def test_the_next_attempt_has_a_log_again(make, earlier):
    with pytest.raises(ConfigError):
        set_up_and_fail(make())
    default_setup(make("SEED", "8"), arguments())
    assert "SEED = 8\n" in (earlier / "log.txt").read_text()
    assert "SEED = 8\n" not in (earlier / "previous_001" / "log.txt").read_text()


def test_what_is_no_mistake_of_the_user_leaves_what_the_run_wrote(make, earlier):
    with pytest.raises(ZeroDivisionError):
        set_up_and_fail(make(), ZeroDivisionError)
    assert (earlier / "previous_001").is_dir()
    assert (earlier / "config.yaml").exists()


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
