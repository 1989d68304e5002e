"""The folder of a run: files of the user and of earlier runs stay (more uses are in tests/promises)."""

import fcntl
import os
import re

import pytest
from starts import arguments, contents, set_up, train

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer, default_setup
from hookline.hooks import CallbackHook

QUIET = ("LOG.WRITERS", ["JSONWriter"], "DATASETS.TEST", [])


@pytest.fixture
def run(quick, tmp_path):
    """Train in the folder ``run``; return the trainer."""
    return lambda *overrides, **kwargs: train(quick(*QUIET, *overrides), **kwargs)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def seed_of(folder):
    return int(re.search(r"^SEED: (\d+)$", (folder / "config.yaml").read_text(), re.MULTILINE)[1])


def test_an_edited_config_is_kept_at_a_resume_and_an_equal_one_is_not_renamed(quick, folder):
    cfg, path = quick(*QUIET), folder / "config.yaml"
    folder.mkdir()
    path.write_text(cfg.dump(sort_keys=False))
    train(cfg)
    assert not (folder / "config.yaml.old").exists()
    path.write_text("# mine\n" + path.read_text())
    edited = path.read_text()
    train(cfg, resume=True)  # nothing to train
    assert path.read_text() == edited
    train(quick(*QUIET, "SOLVER.MAX_ITER", 4), resume=True)
    assert (folder / "config.yaml.old").read_text() == edited
    assert "# mine" not in path.read_text()
    for length in (5, 6, 7):  # nothing of a user's is lost
        train(quick(*QUIET, "SOLVER.MAX_ITER", length), resume=True)
    assert "MAX_ITER: 7" in path.read_text()
    assert len(list(folder.glob("config.yaml.old*"))) == 1


def test_earlier_runs_are_kept_side_by_side_and_can_be_resumed(run, folder):
    for seed in (1, 2, 3):
        run("SEED", seed)
    previous = folder / "previous_001"
    assert [seed_of(one) for one in (previous, folder / "previous_002", folder)] == [1, 2, 3]
    resumed = run("SEED", 1, "OUTPUT_DIR", str(previous), "SOLVER.MAX_ITER", 4, resume=True)
    assert resumed.start_iter == 2
    assert not (previous / "previous_001").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_after_an_error_in_the_first_step_the_earlier_run_is_complete(quick, run, folder, resume):
    run()
    before = contents(folder)
    cfg = quick(*QUIET, "SOLVER.MAX_ITER", 4, "CHECKPOINT.ON_EXCEPTION", True, "SEED", 3)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    step, trainer.run_step = trainer.run_step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError) as info:
        trainer.train()
    there = folder if resume else folder / "previous_001"
    after = contents(there)
    assert all(after[name] == before[name] for name in before if name.startswith(("model", "last", "metrics")))
    assert (f"the earlier run in the folder is now in {there}" in getattr(info.value, "__notes__", ())) != resume
    trainer.run_step = step
    assert trainer.train().iteration == 4
    assert not (folder / "previous_002").exists()


def test_a_save_before_the_first_step_is_of_the_run(quick, run, folder):
    run("SEED", 1)
    trainer = DefaultTrainer(quick(*QUIET, "SEED", 2))
    trainer.register_hooks([CallbackHook(before_train=lambda t: trainer.checkpointer.save("model_start"))])
    trainer.train()
    assert {"model_start.pth", "model_final.pth", "metrics.json"} <= set(os.listdir(folder))
    assert seed_of(folder / "previous_001") == 1


def test_a_folder_is_locked_by_training_and_an_evaluation_appends_to_its_log(quick, run, folder):
    run()
    lock = os.open(folder / ".hookline" / "lock", os.O_RDWR)  # as another process holds it
    fcntl.flock(lock, fcntl.LOCK_EX)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="in use"):
            run(resume=resume)
    before = contents(folder)
    set_up(quick("SEED", 4), arguments(eval_only=True))  # adds only its log
    after = contents(folder)
    assert after.pop("log.txt").startswith(before.pop("log.txt"))
    assert after == before
    os.close(lock)
    run()


@pytest.mark.parametrize("option", [None, "predict", "eval_only"])
def test_a_folder_without_write_permission_is_an_error_or_an_evaluations_warning(
    make, folder, monkeypatch, log, option
):
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only file system
    if option == "eval_only":
        set_up(make(), arguments(eval_only=True))
        assert "is not writable" in log.text
    else:
        with pytest.raises(ConfigError, match=r"OUTPUT_DIR: .* is not writable"):
            default_setup(make(), arguments(**{option: True} if option else {}))
    assert os.listdir(folder) == []


@pytest.mark.parametrize("option", [None, "eval_only"])
def test_a_folder_whose_name_no_file_can_hold_is_an_error(make, tmp_path, option):
    cfg = make("OUTPUT_DIR", os.fsdecode(bytes(tmp_path / "run") + b"\xff"))
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: .* is not UTF-8; choose another name"):
        default_setup(cfg, arguments(**{option: True} if option else {}))
    assert os.listdir(tmp_path) == []
