import json
import os
import subprocess
import sys
import textwrap

import pytest

from hookline.config import ConfigError
from hookline.config.files.run_folder import RunFolder, claim, claim_pattern, is_claimed, run_folder


def writes(name):
    return name in ("config.yaml", "metrics.json")


@pytest.fixture
def path(tmp_path):
    """A folder locked by a run, and released at the end."""
    path = tmp_path / "run"
    folder = run_folder(str(path))
    folder.take(resume=False, writes=writes)
    yield path
    folder.release()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder):
    """The names in the manifest, as another process reads them."""
    other = RunFolder(str(folder))
    other.read_claims()
    return other


def test_a_name_is_recorded_before_the_file_exists(path):
    claim(str(path / "metrics.json"))
    assert "metrics.json" in names(path)
    assert not (path / "metrics.json").exists()


def test_files_in_a_folder_of_the_run_belong_to_the_run(path):
    claim(str(path / "model_final.pth"))
    assert "model_final.pth/state.pth" in names(path)
    assert "model_final.pth.txt" not in names(path)


def test_a_file_of_the_user_is_not_claimed(path):
    (path / "metrics.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"metrics\.json exists and was not written by a run; move it away"):
        claim(str(path / "metrics.json"))
    assert not is_claimed(str(path / "metrics.json"))


def test_a_pattern_claims_names_chosen_by_a_library(path):
    claim_pattern(str(path / "events.*.host.7.*"))
    assert "events.123.host.7.0" in names(path)
    assert "events.123.host.8.0" not in names(path)


def test_outside_a_runs_folder_nothing_is_recorded_or_refused(tmp_path):
    (tmp_path / "file").touch()
    claim(str(tmp_path / "file"))
    assert is_claimed(str(tmp_path / "file"))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("line", ['{"name": "mod', "[1]", '{"name": 3}', '{"name": "../outside"}', '{"name": "/etc"}'])
def test_incomplete_and_foreign_lines_are_ignored(path, line):
    claim(str(path / "a"))
    with open(path / ".hookline" / "manifest", "a") as file:
        file.write(line)
    claim(str(path / "b"))
    found = names(path)
    assert "a" in found
    assert "b" in found
    assert not any(name in found for name in ("../outside", "/etc", "mod"))


def test_a_removed_folder_is_not_created_again(path):
    claim(str(path / "a"))
    (path / ".hookline" / "manifest").unlink()
    for name in ("a", "b"):
        with pytest.raises(FileNotFoundError):
            claim(str(path / name))


def test_a_second_run_is_refused_and_changes_nothing(path):
    claim(str(path / "metrics.json"))
    (path / "metrics.json").write_text("first")
    before = contents(path)
    code = (
        "import sys; from hookline.config.files.run_folder import run_folder\n"
        "run_folder(sys.argv[1]).take(resume=False, writes=lambda name: False)"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert f"in use by process {os.getpid()} on" in result.stderr
    assert contents(path) == before


def test_a_child_process_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    code = (
        "import os, sys, time; from hookline.config.files.run_folder import run_folder\n"
        "run_folder(sys.argv[1]).take(resume=False, writes=lambda name: False)\n"
        "if os.fork(): os._exit(9)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE) as parent:
        assert parent.wait(30) == 9
        folder = run_folder(str(tmp_path))
        folder.take(resume=True, writes=writes)
        folder.release()
        parent.stdin.close()


def test_a_lock_of_another_host_is_respected_and_the_error_names_the_file(tmp_path):
    folder = run_folder(str(tmp_path / "run"))
    folder.take(resume=False, writes=writes)
    lock = tmp_path / "run" / ".hookline" / "lock"
    holder = json.loads(lock.read_text())
    folder.release()
    assert lock.read_text() == ""
    elsewhere = {**holder, "host": "elsewhere", "boot": "another", "machine": "0" * 8, "time": holder["time"] - 7200}
    lock.write_text(json.dumps(elsewhere))
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on elsewhere, since 2 hours; .*delete {lock}"):
        folder.take(resume=True, writes=writes)
    for stale in ({**holder, "boot": "before"}, {**holder, "pid": 1, "machine": "0" * 8}, {"torn": 1}):
        lock.write_text(json.dumps(stale))
        folder.take(resume=True, writes=writes)
        folder.release()


# Kills a start at each of its file operations in turn.
KILLS = """
import itertools, os, shutil, sys
from hookline.config.files.run_folder import RunFolder

folder, whole = sys.argv[1], sys.argv[2]
undo = len(sys.argv) > 3  # kill what undoes a kill


def killed_at(number, do):
    child = os.fork()
    if not child:
        left = itertools.count()

        def counted(function):
            def call(*args, **kwargs):
                if next(left) == number:
                    os._exit(9)
                return function(*args, **kwargs)
            return call

        for name in ("rename", "replace", "remove", "rmdir", "mkdir", "makedirs", "fsync", "open", "write"):
            setattr(os, name, counted(getattr(os, name)))
        do()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def start():
    RunFolder(folder).take(resume=False, writes=lambda name: False)


def files():
    found = {}
    for path, folders, names in os.walk(folder):
        for name in names:
            if name != "lock":
                with open(os.path.join(path, name)) as file:
                    found[os.path.relpath(os.path.join(path, name), folder)] = file.read()
    return found


shutil.copytree(whole, folder)
before = files()
moved = {f"previous_001/{name}": text for name, text in before.items() if name != "notes.txt"}
after = {**moved, "notes.txt": before["notes.txt"], ".hookline/manifest": ""}
for number in itertools.count():
    killed = killed_at(number, start)
    if undo:
        for second in itertools.count():
            if not killed_at(second, lambda: RunFolder(folder).recover()):
                break
    RunFolder(folder).recover()
    assert files() in (before, after), (number, files())
    if not killed:
        break
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
assert files() == after
print(number)
"""


@pytest.mark.parametrize("undo", [False, True])
def test_a_start_killed_anywhere_leaves_the_earlier_run_complete_or_moved(tmp_path, path, undo):
    for name in ("config.yaml", "metrics.json", "inference/set/predictions.jsonl"):
        claim(str(path / name))
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    (path / "notes.txt").write_text("mine")
    run_folder(str(path)).release()
    command = [sys.executable, "-c", textwrap.dedent(KILLS), tmp_path / "copy", path, *(["undo"] if undo else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20
