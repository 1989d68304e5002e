import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest

from hookline.config import ConfigError
from hookline.config.files.run_folder import RunFolder, claim, is_claimed, run_folder


@pytest.fixture
def path(tmp_path):
    """A folder locked by a run, and released at the end."""
    path = tmp_path / "run"
    folder = run_folder(str(path))
    folder.take(resume=False)
    yield path
    folder.release()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder):
    """The names in the list, as another process reads them."""
    other = RunFolder(str(folder))
    other.read()
    return other


def test_a_file_of_the_user_is_renamed(path, log):
    for text, renamed in (("first", "metrics.json.old"), ("second", "metrics.json.old2")):
        (path / "metrics.json").write_text(text)
        assert not is_claimed(str(path / "metrics.json"))
        claim(str(path / "metrics.json"))
        assert (path / renamed).read_text() == text
        assert f"It is now {path}/{renamed}" in log.text
        assert not is_claimed(str(path / renamed))
        (path / ".hookline" / "files").write_text("")
        run_folder(str(path)).read()


def test_incomplete_and_foreign_lines_are_ignored(path):
    lines = ['"mod', "[1]", "3", '"../outside"', '"/etc"', '".hookline/lock"']
    for number, line in enumerate(lines):
        claim(str(path / f"mine{number}"))
        with open(path / ".hookline" / "files", "a") as file:
            file.write(line)
    found = names(path)
    assert all(f"mine{number}" in found for number in range(len(lines)))
    assert not any(name in found for name in ("../outside", "/etc", "mod", ".hookline/lock"))


def test_without_a_list_the_names_of_a_run_are_the_runs(tmp_path):
    (tmp_path / "model_final.pth").touch()
    assert "model_final.pth" not in names(tmp_path)  # no run was here
    (tmp_path / "metrics.json").write_text('{"iteration": 0, "loss": 1.0}\n')
    for name in ("events.out.tfevents.1700000000.host.7.0", "model_best_0000019.pth", "log.txt.rank1", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "events.out.tfevents.1.mine").touch()
    assert names(tmp_path).existing() == [
        *("events.out.tfevents.1700000000.host.7.0", "log.txt.rank1", "metrics.json"),
        *("model_best_0000019.pth", "model_final.pth"),
    ]


def test_nothing_is_moved_or_written_through_links_in_a_folder_that_one_was_given(tmp_path):
    mine, given = tmp_path / "mine", tmp_path / "given"
    (mine / "in").mkdir(parents=True)
    (mine / "a.txt").write_text("a")
    records = given / ".hookline"

    def refused(make, link):
        folder = RunFolder(str(given))
        shutil.rmtree(given, ignore_errors=True)
        records.mkdir(parents=True)
        (given / "sub").mkdir()
        if link == records:
            records.rmdir()
        link.parent.mkdir(exist_ok=True)
        make(mine if make is os.symlink else mine / "a.txt", link)
        only_add = [] if link == records / "moving/sub" else [folder.join]  # which does not look there
        for use in (partial(folder.take, False), partial(folder.take, True), folder.recover, *only_add):
            with pytest.raises(ConfigError, match=r"is a link|has hard links|cannot be moved back"):
                use()
        assert contents(mine) == {"a.txt": "a"}

    for link in (records, records / "moving", records / "moving/sub", records / "lock", records / "files"):
        refused(os.symlink, link)
    for link in (records / "lock", records / "files"):
        refused(os.link, link)
    shutil.rmtree(given)
    records.mkdir(parents=True)
    (given / "sub").symlink_to(mine)
    (given / "in").symlink_to(mine / "in")
    (given / "log.txt").write_text("of the run")
    listed = ["sub/a.txt", "in/../a.txt", "x/../sub/a.txt", "log.txt"]
    (records / "files").write_text("".join(f"{json.dumps(name)}\n" for name in listed) + "[" * 100_000)
    folder = run_folder(str(given))
    folder.take(resume=False)
    assert contents(mine) == {"a.txt": "a"}
    assert contents(given / "previous_001").keys() == {"log.txt", ".hookline/files"}
    with pytest.raises(ConfigError, match="sub is a link"):
        claim(str(given / "sub/predictions.csv"))
    folder.release()


def test_a_list_that_is_too_long_is_refused(path):
    (path / ".hookline/files").write_text('"x"\n' * 5_000_000)
    with pytest.raises(ConfigError, match="too long"):
        names(path)


TAKE = (
    "import sys; from hookline.config.files.run_folder import run_folder\nrun_folder(sys.argv[1]).take(resume=True)\n"
)


def test_a_second_run_is_refused_and_changes_nothing(path):
    claim(str(path / "metrics.json"))
    (path / "metrics.json").write_text("first")
    before = contents(path)
    result = subprocess.run([sys.executable, "-c", TAKE, path], capture_output=True, text=True, check=False)
    assert f"is in use by process {os.getpid()} on" in result.stderr
    assert contents(path) == before


def test_the_lock_of_a_killed_run_does_not_matter_wherever_it_ran_and_if_its_child_lives_on(tmp_path):
    code = f"{TAKE}import os\nread, write = os.pipe()\n"
    code += "if os.fork(): os.read(read, 1); os._exit(9)\nos.write(write, b'!'); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE) as parent:
        assert parent.wait(30) == 9
        (tmp_path / ".hookline" / "lock").write_text("process 1 on another-machine")
        folder = run_folder(str(tmp_path))
        folder.take(resume=True)
        folder.release()
        parent.stdin.close()
    assert (tmp_path / ".hookline" / "lock").read_text() == ""


# Kills a start at each of its file operations in turn.
KILLS = """
import itertools, os, shutil, sys
from hookline.config.files.run_folder import RunFolder

folder, whole = sys.argv[1], sys.argv[2]


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
    RunFolder(folder).take(resume=False)


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
after = {**moved, "notes.txt": before["notes.txt"]}
for number in itertools.count():
    killed = killed_at(number, start)
    for second in itertools.count():  # kills what undoes the kill, too
        if not killed_at(second, lambda: RunFolder(folder).recover()):
            break
    RunFolder(folder).recover()
    there = files()
    if there != before:
        assert there.pop(".hookline/files", "") == "", number
        assert there == after, (number, there)
    if not killed:
        break
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
assert {**after, ".hookline/files": ""} == files()
print(number)
"""


def test_a_start_killed_anywhere_leaves_the_earlier_run_complete_or_moved(tmp_path, path):
    for name in ("config.yaml", "metrics.json", "inference/set/predictions.jsonl"):
        claim(str(path / name))
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    (path / "notes.txt").write_text("mine")
    run_folder(str(path)).release()
    command = [sys.executable, "-c", KILLS, tmp_path / "copy", path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20
