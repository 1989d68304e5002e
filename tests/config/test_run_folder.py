import itertools
import os
import shutil
import subprocess
import sys

import pytest

from hookline.config import ConfigError
from hookline.config.run_folder import FolderLock, has_run, is_run_file, move_run, recover, recover_if_idle

RUN = ("config.yaml", "metrics.json", "last_checkpoint", "log.txt", "model_0000099.pth", "model_best_0000099.pth")
MINE = (
    "notes.txt",
    "pretrained.pth",
    "events.out.tfevents.1.mine",
    "model.pth",
    "unet_best.pth",
    "unet_final.pth",
    "swin_20220123.pth",
)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with files of a person."""
    for name in (*RUN, *MINE):
        (tmp_path / name).write_text(name)
    (tmp_path / "inference/set").mkdir(parents=True)
    (tmp_path / "inference/set/predictions.jsonl").write_text("predictions")
    return tmp_path


def test_the_names_of_a_runs_files_are_known_and_all_others_are_the_persons():
    names = ("rolling_0000199.pth", "model_final.pth", "log.txt.rank1", "events.out.tfevents.1700000000.host.7.0")
    assert all(map(is_run_file, (*RUN, *names, "wandb_run.json", "samples", "replay_12")))
    assert not any(map(is_run_file, (*MINE, "previous_001", ".hookline", "../model_final.pth/x", "src")))


def test_an_earlier_run_moves_and_a_folder_without_one_keeps_its_log(run):
    assert move_run(str(run)) == str(run / "previous_001")
    assert contents(run / "previous_001") == {name: name for name in RUN} | {
        "inference/set/predictions.jsonl": "predictions"
    }
    assert {name for name in contents(run) if not name.startswith("previous_")} == set(MINE)
    assert move_run(str(run)) == ""
    (run / "log.txt").write_text("of an evaluation")
    assert not has_run(str(run))
    assert move_run(str(run)) == ""
    (run / "metrics.json").write_text('{"iteration": 0, "loss": 1.0}\n')
    assert move_run(str(run)) == str(run / "previous_002")
    assert contents(run / "previous_002").keys() == {"log.txt", "metrics.json"}


def test_nothing_is_moved_or_written_through_links_in_a_folder_that_one_was_given(tmp_path):
    mine, given = tmp_path / "mine", tmp_path / "given"
    mine.mkdir()
    (mine / "model_final.pth").write_text("a")
    records = given / ".hookline"
    for link, make in (
        *((records / name, os.symlink) for name in ("", "moving", "lock")),
        (records / "lock", os.link),
    ):
        shutil.rmtree(given, ignore_errors=True)
        records.mkdir(parents=True)
        if link == records:
            records.rmdir()
        make(mine if make is os.symlink else mine / "model_final.pth", link)
        for use in (FolderLock(str(given)).acquire, lambda: recover_if_idle(str(given))):
            with pytest.raises(ConfigError, match=r"is a link|has hard links"):
                use()
    shutil.rmtree(given)
    given.mkdir()
    (given / "last_checkpoint").write_text("model_final.pth")
    (given / "inference").symlink_to(mine)
    (given / "model_final.pth").symlink_to(mine / "model_final.pth")
    move_run(str(given))
    assert contents(mine) == {"model_final.pth": "a"}
    assert (given / "previous_001/inference").is_symlink()


TAKE = "import sys; from hookline.config.run_folder import FolderLock\nFolderLock(sys.argv[1]).acquire()\n"


def test_a_second_process_is_refused_and_changes_nothing(run):
    lock = FolderLock(str(run))
    lock.acquire()
    before = contents(run)
    result = subprocess.run([sys.executable, "-c", TAKE, run], capture_output=True, text=True, check=False)
    assert f"is in use by process {os.getpid()} on" in result.stderr
    assert contents(run) == before
    lock.release()


def test_the_lock_of_a_killed_run_does_not_matter_even_if_its_child_lives_on(tmp_path):
    code = f"{TAKE}import os\nread, write = os.pipe()\n"
    code += "if os.fork(): os.read(read, 1); os._exit(9)\nos.write(write, b'!'); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE) as parent:
        assert parent.wait(30) == 9
        (tmp_path / ".hookline" / "lock").write_text("process 1 on another-machine")
        lock = FolderLock(str(tmp_path))
        lock.acquire()
        lock.release()
        parent.stdin.close()
    assert (tmp_path / ".hookline" / "lock").read_text() == ""


def killed_at(number, do):
    """Call a function in a process that is killed before its file operation of this number; return whether it was."""
    child = os.fork()
    if not child:
        left = itertools.count()

        def counted(function):
            def call(*args, **kwargs):
                if next(left) == number:
                    os._exit(9)
                return function(*args, **kwargs)

            return call

        try:
            for name in ("rename", "replace", "remove", "rmdir", "mkdir", "makedirs", "fsync", "open", "write"):
                setattr(os, name, counted(getattr(os, name)))
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_move_killed_anywhere_leaves_the_earlier_run_complete_or_moved(run, tmp_path_factory):
    """Also if what undoes it is killed."""
    before, after = contents(run), {}
    for number in itertools.count():
        folder = tmp_path_factory.mktemp("killed") / "run"
        shutil.copytree(run, folder)
        was_killed = killed_at(number, lambda folder=folder: move_run(str(folder)))
        for second in itertools.count():
            if not killed_at(second, lambda folder=folder: recover(str(folder))):
                break
        there = contents(folder)
        if there != before:
            after = after or there
            assert there == after, number
            assert sorted(there.values()) == sorted(before.values())
        if not was_killed:
            break
    assert number > 10
    assert any(name.startswith("previous_001") for name in after)


def test_a_file_in_the_way_of_an_undone_move_is_named(run):
    (run / ".hookline/moving").mkdir(parents=True)
    (run / ".hookline/moving/log.txt").write_text("earlier")
    with pytest.raises(ConfigError, match=r"log\.txt exists now; move it away"):
        recover(str(run))
