import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from starts import arguments, contents, set_up, train

from hookline.config import ConfigError
from hookline.config.files.run_folder import RunFolder
from hookline.engine import (
    DefaultTrainer,
    default_setup,
    setup_logger,
)
from hookline.engine.checkpoint import CheckpointError
from hookline.hooks import HookBase

MINE = ["inference.py", "pretrained.pth", "notes.txt.old.1", "thesis.old.3", "events.out.tfevents.1.mine", "log.txt.1"]


@pytest.fixture
def mine(tmp_path):
    """Files of the user in the run's folder, with names similar to those of a run."""
    folder = tmp_path / "run"
    for name in (*MINE, "inference/other/predictions.jsonl", "inference_server/run.py", "photos.old.2019/a.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return contents(folder)


def test_resuming_or_moving_a_run_does_not_touch_files_of_the_user(quick, tmp_path, mine):
    train(quick())
    train(quick("SOLVER.MAX_ITER", 4), resume=True)
    own = contents(tmp_path / "run").keys() - mine.keys()
    train(quick())
    after = contents(tmp_path / "run")
    assert {name: after.get(name) for name in mine} == mine
    own -= {".hookline/lock"}
    assert {name.removeprefix("previous_001/") for name in after if name.startswith("previous_001/")} == own
    assert any(name.startswith("events.out.tfevents") for name in own)


@pytest.mark.parametrize("setup", [True, False])
def test_files_of_the_user_with_names_of_a_run_stay_or_are_renamed(quick, tmp_path, log, setup):
    folder = tmp_path / "run"
    mine = {"config.yaml": "A: 1\n", "log.txt": "mine\n", "model_final.pth": "mine", "model_best.pth": "mine"}
    folder.mkdir()
    for name, text in mine.items():
        (folder / name).write_text(text)
    train(quick(), setup=setup)
    assert (folder / "log.txt").read_text().startswith("mine\n[")
    assert (folder / "model_best.pth").read_text() == "mine"
    for name in ("config.yaml", "model_final.pth"):
        assert (folder / f"{name}.old").read_text() == mine[name]
        assert (folder / name).read_bytes() != mine[name].encode()
    text = "\n".join(log.messages)
    assert text.count("model_best.pth, model_final.pth in ") == 1
    assert f"{folder}/model_final.pth was not written by a run in this folder. It is now " in text
    before = contents(folder)
    train(quick())
    assert contents(folder / "previous_001").keys() <= before.keys() - {"model_best.pth", "model_final.pth.old"}
    assert (folder / "model_best.pth").read_text() == "mine"


def test_a_config_with_the_same_content_is_not_renamed(quick, tmp_path):
    cfg = quick()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(cfg.dump(sort_keys=False))
    train(cfg)
    assert not (tmp_path / "run" / "config.yaml.old").exists()


def test_a_folder_of_the_user_in_place_of_a_checkpoint_is_renamed(quick, tmp_path):
    (tmp_path / "run" / "model_final.pth").mkdir(parents=True)
    (tmp_path / "run" / "model_final.pth" / "thesis").write_text("mine")
    train(quick())
    assert (tmp_path / "run" / "model_final.pth.old" / "thesis").read_text() == "mine"
    assert (tmp_path / "run" / "model_final.pth").is_file()


@pytest.mark.parametrize("name", ["log.txt", ".hookline/files", ".hookline/lock"])
def test_a_fifo_in_place_of_a_file_of_the_run_is_an_error(quick, tmp_path, name):
    (tmp_path / "run" / ".hookline").mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} is a FIFO"):
        default_setup(quick(), arguments())


def test_a_log_that_is_open_before_the_trainer_is_continued(quick, tmp_path):
    setup_logger(str(tmp_path / "run")).info("before the trainer")
    train(quick())
    text = (tmp_path / "run" / "log.txt").read_text()
    assert text.index("before the trainer") < text.index("Starting training") < text.index("Training ended")


@pytest.mark.parametrize("setup", [True, False])
def test_the_folder_exists_when_the_trainer_is_built(quick, tmp_path, setup):
    cfg = quick()
    if setup:
        default_setup(cfg, arguments())
    else:
        DefaultTrainer(cfg)
    assert os.listdir(tmp_path / "run") == []


def test_a_run_stays_in_its_folder_when_the_program_changes_its_own(quick, tmp_path, monkeypatch):
    class ChangeFolder(HookBase):
        def before_step(self):
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    cfg = quick("OUTPUT_DIR", "relative", "SOLVER.CHECKPOINT_PERIOD", 1)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([ChangeFolder()])
    trainer.train()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert {"config.yaml", "metrics.json", "model_final.pth", "model_0000000.pth"} <= set(
        os.listdir(tmp_path / "relative")
    )
    assert cfg.OUTPUT_DIR == "relative"
    assert "OUTPUT_DIR: relative\n" in (tmp_path / "relative" / "config.yaml").read_text()


def test_weights_of_the_earlier_run_are_read_before_it_is_moved(quick, tmp_path):
    first = train(quick()).model.state_dict()
    cfg = quick("MODEL.WEIGHTS", str(tmp_path / "run" / "model_final.pth"), "SOLVER.BASE_LR", 0.0)
    second = train(cfg).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "run" / "previous_001" / "model_final.pth").exists()


class Fails(DefaultTrainer):
    """Fails in one place of the first step."""

    where = "run_step"

    def run_step(self):
        if self.where == "model":
            return super().run_step()
        raise ZeroDivisionError("of the first step")

    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        if cls.where == "model":
            model.forward = lambda x: "a string"
        return model


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("where", ["run_step", "model"])
def test_an_error_in_the_first_step_changes_nothing(quick, tmp_path, monkeypatch, where, resume):
    train(quick())
    before = contents(tmp_path)
    monkeypatch.setattr(Fails, "where", where)
    failing = Fails(quick("SOLVER.MAX_ITER", 4, "CHECKPOINT.ON_EXCEPTION", True, "TEST.SANITY_CHECK_BATCHES", 0))
    failing.resume_or_load(resume=resume)
    with pytest.raises((ZeroDivisionError, TypeError, ConfigError)):
        failing.train()
    assert contents(tmp_path) == before
    assert train(quick("SOLVER.MAX_ITER", 4), resume=True).start_iter == 2


def test_a_trainer_that_failed_in_its_first_step_can_train_again(quick, tmp_path):
    failing = Fails(quick())
    with pytest.raises(ZeroDivisionError):
        failing.train()
    assert not (tmp_path / "run" / "metrics.json").exists()
    failing.run_step = lambda: DefaultTrainer.run_step(failing)
    failing.train()
    assert {"config.yaml", "metrics.json", "model_final.pth"} <= set(os.listdir(tmp_path / "run"))


def test_a_save_before_the_first_step_begins_the_run(quick, tmp_path):
    class Save(HookBase):
        def before_train(self):
            self.trainer.checkpointer.save("model_start")

    train(quick("SEED", 1))
    trainer = DefaultTrainer(quick("SEED", 2))
    trainer.register_hooks([Save()])
    trainer.train()
    names = set(os.listdir(tmp_path / "run"))
    assert {"model_start.pth", "model_final.pth", "metrics.json", "previous_001"} <= names
    assert "SEED: 1\n" in (tmp_path / "run" / "previous_001" / "config.yaml").read_text()


def test_earlier_runs_are_kept_side_by_side(quick, tmp_path):
    for seed in (1, 2, 3):
        train(quick("SEED", seed))
    for folder, seed in (("run/previous_001", 1), ("run/previous_002", 2), ("run", 3)):
        assert f"SEED: {seed}\n" in (tmp_path / folder / "config.yaml").read_text()
        assert "model_final.pth" in os.listdir(tmp_path / folder)


def test_a_moved_run_can_be_resumed_in_its_new_folder(quick, tmp_path):
    train(quick())
    train(quick())
    previous = str(tmp_path / "run" / "previous_001")
    trainer = train(quick("OUTPUT_DIR", previous, "SOLVER.MAX_ITER", 4), resume=True)
    assert trainer.start_iter == 2
    assert not os.path.exists(os.path.join(previous, "previous_001"))


def test_a_run_without_records_is_known_by_the_names_of_its_files(quick, tmp_path):
    for resume in (True, False):
        train(quick())
        shutil.rmtree(tmp_path / "run" / ".hookline")
        (tmp_path / "run" / "notes.md").write_text("mine")
        trainer = train(quick("SOLVER.MAX_ITER", 4), resume=resume)
        assert trainer.start_iter == (2 if resume else 0)
        train(quick())
        previous = sorted((tmp_path / "run").glob("previous_*"))[-1]
        assert {"config.yaml", "metrics.json", "model_final.pth"} <= set(os.listdir(previous))
        assert (tmp_path / "run" / "notes.md").exists()
        shutil.rmtree(tmp_path / "run")


def test_a_folder_is_locked_while_a_run_trains_there(quick, tmp_path):
    train(quick())
    code = (
        "import sys; from hookline.config.files.run_folder import run_folder\n"
        "run_folder(sys.argv[1]).take(resume=True)\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"taken\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on .*wait for it to end"):
                train(quick(), resume=resume)
        set_up(quick(), arguments(eval_only=True))  # adds only its log
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert train(quick("OUTPUT_DIR", str(tmp_path / "copy"), "SOLVER.MAX_ITER", 3), resume=True).start_iter == 2
        other.kill()
    train(quick())


def test_a_run_that_begins_during_the_first_step_of_another_one_refuses_it(quick, tmp_path):
    class Begin(HookBase):
        def before_step(self):
            self.other = RunFolder(str(tmp_path / "run"))
            self.other.take(resume=False)

    trainer, hook = DefaultTrainer(quick()), Begin()
    trainer.register_hooks([hook])
    with pytest.raises(ConfigError, match="is in use by process"):
        trainer.train()
    hook.other.release()
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["file", "file/run", "x" * 300])
def test_a_folder_that_cannot_be_created_is_an_error(make, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"OUTPUT_DIR.*{name[:5]}"):
        default_setup(make("OUTPUT_DIR", str(tmp_path / name)), arguments())


def test_a_path_object_is_a_folder_too(quick, tmp_path):
    cfg = quick("OUTPUT_DIR", tmp_path / "a")
    assert str(tmp_path / "a") == cfg.OUTPUT_DIR
    cfg.OUTPUT_DIR = tmp_path / "b"
    train(cfg)
    assert (tmp_path / "b" / "model_final.pth").exists()


def test_a_uri_as_output_folder_is_an_error(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: s3://bucket/run is a URI"):
        default_setup(make("OUTPUT_DIR", "s3://bucket/run"), arguments())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["new", "eval_only"])
@pytest.mark.parametrize("there", [True, False])
def test_an_output_folder_without_write_permission_is_an_error(make, tmp_path, monkeypatch, how, there):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only file system
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: .* is not writable; change its permissions"):
        default_setup(make(), arguments(**{how: True}))
    assert not (tmp_path / "run" / ".hookline").exists()


def test_a_removed_folder_is_not_recreated_by_a_save(quick, tmp_path):
    class Remove(HookBase):
        def after_step(self):
            shutil.rmtree(tmp_path / "run")

    trainer = DefaultTrainer(quick("SOLVER.MAX_ITER", 1, "LOG.WRITERS", []))
    trainer.register_hooks([Remove()])
    with pytest.raises(CheckpointError, match="its folder was removed"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_an_evaluation_only_appends_to_the_log(quick, tmp_path):
    train(quick())
    before = contents(tmp_path / "run")
    set_up(quick(), arguments(eval_only=True))
    after = contents(tmp_path / "run")
    assert after.pop("log.txt").startswith(before.pop("log.txt"))
    assert after == before


def test_a_config_that_was_edited_is_kept_at_a_resume(quick, tmp_path):
    path = tmp_path / "run" / "config.yaml"
    train(quick())
    path.write_text("# mine\n" + path.read_text())
    edited = path.read_text()
    train(quick(), resume=True)  # nothing to train
    assert path.read_text() == edited
    train(quick("SOLVER.MAX_ITER", 4), resume=True)
    assert (tmp_path / "run" / "config.yaml.old").read_text() == edited
    assert "# mine" not in path.read_text()
