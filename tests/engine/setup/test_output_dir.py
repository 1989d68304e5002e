import os
import re
import shutil
import subprocess
import sys

import pytest
from starts import arguments, contents, set_up, train

from hookline.config import ConfigError
from hookline.config.files.folder_lock import FolderLock
from hookline.engine import (
    DefaultTrainer,
    default_setup,
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


@pytest.mark.parametrize("name", ["config.yaml", "metrics.json", "log.txt", "last_checkpoint", "model_0000009.pth"])
@pytest.mark.parametrize("setup", [True, False])
def test_a_run_does_not_overwrite_files_of_the_user(quick, tmp_path, name, setup):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(ConfigError, match=rf"OUTPUT_DIR: .*{re.escape(name)}.* choose another OUTPUT_DIR"):
        train(quick(), setup=setup)
    assert contents(tmp_path / "run") == {name: b"mine"}


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


def without_records(folder):
    """Make a run look like one of version 0.1."""
    shutil.rmtree(folder / ".hookline")


def test_resuming_a_run_of_version_0_1_records_its_files(quick, tmp_path):
    train(quick())
    without_records(tmp_path / "run")
    (tmp_path / "run" / "notes.md").write_text("mine")
    assert train(quick("SOLVER.MAX_ITER", 4), resume=True).start_iter == 2
    train(quick())
    assert {"config.yaml", "metrics.json", "model_final.pth"} <= set(os.listdir(tmp_path / "run" / "previous_001"))
    assert (tmp_path / "run" / "notes.md").exists()


def test_a_new_run_in_the_folder_of_version_0_1_is_an_error(quick, tmp_path):
    train(quick())
    without_records(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"a run of an older version of hookline.*--resume it"):
        train(quick())
    assert contents(tmp_path / "run") == before


def test_a_folder_is_locked_while_a_run_trains_there(quick, tmp_path):
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
        set_up(quick(), arguments(eval_only=True))  # adds only its log
        other.kill()
    train(quick())
    assert not lock.held


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_in_place_of_the_output_folder_is_an_error(make, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR.*file"):
        default_setup(make("OUTPUT_DIR", str(tmp_path / name)), arguments())


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
    assert os.listdir(tmp_path) == (["run"] if there else [])


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


def test_an_evaluation_does_not_append_to_a_log_of_the_user(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"log\.txt exists and was not written by a run"):
        default_setup(make(), arguments(eval_only=True))


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
