import errno
import os

import pytest

from hookline.config import ConfigError
from hookline.config.atomic import (
    WriteError,
    check_regular,
    displaced,
    mend,
    replace_file,
    replace_text,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def test_the_content_is_on_disk_before_the_rename(path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    replace_text(str(path), "new")
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def killed(do):
    """Call a function in a process that then exits at once, like a killed one."""
    child = os.fork()
    if not child:
        try:
            do()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_only_leftovers_of_killed_processes_are_removed(path):
    folder = path.parent
    killed(lambda: replace_file(str(folder / "model.pth"), lambda file: os._exit(9)))
    assert [name.startswith(".hookline-tmp-") for name in os.listdir(folder)] == [True]
    mine = ["model.pth.tmp.7", "notes.txt.old.1", ".hookline-tmp-", ".hookline-tmp-mine", "model.pth"]
    for name in mine:
        (folder / name).touch()
    (folder / "photos.old.2019").mkdir()
    mend(str(folder))
    assert sorted(os.listdir(folder)) == sorted([*mine, "photos.old.2019"])
    mend(str(folder / "nowhere"))


def test_links_hard_links_and_special_files_are_not_written_to(tmp_path):
    for name, make in (("link", os.symlink), ("hard", os.link)):
        (tmp_path / f"mine_{name}").touch()
        make(tmp_path / f"mine_{name}", tmp_path / name)
    os.mkfifo(tmp_path / "fifo")
    for name, problem in (("link", "is a link to"), ("hard", "has hard links"), ("fifo", "is a FIFO")):
        with pytest.raises(ConfigError, match=problem):
            check_regular(str(tmp_path / name))
    check_regular(str(tmp_path / "missing"))


def test_a_folder_is_never_replaced_by_a_file(path):
    path.mkdir()
    (path / "thesis").write_text("mine")
    with pytest.raises(ConfigError, match="file is a folder"):
        replace_text(str(path), "new")
    assert [found.name for found in path.parent.rglob("*")] == ["file", "thesis"]


def make_folder(path, text):
    path.mkdir()
    (path / "content").write_text(text)
    (path / "checksums.json").write_text("{}")  # the mark of a sharded checkpoint


@pytest.mark.parametrize("arrived", [False, True])
def test_a_process_killed_while_replacing_a_folder_leaves_the_old_or_the_new_one(tmp_path, arrived):
    def replace():
        with displaced(str(tmp_path / "run")):
            if arrived:
                (tmp_path / "new").rename(tmp_path / "run")
            os._exit(9)

    make_folder(tmp_path / "run", "old")
    make_folder(tmp_path / "new", "new")
    killed(replace)
    mend(str(tmp_path))
    assert (tmp_path / "run/content").read_text() == ("new" if arrived else "old")
    assert not list(tmp_path.glob(".hookline-*"))


def test_a_folder_is_restored_if_its_replacement_fails_and_kept_if_incomplete(tmp_path, log):
    make_folder(tmp_path / "run", "mine")
    with pytest.raises(OSError, match="disk full"), displaced(str(tmp_path / "run")):
        raise OSError("disk full")
    (tmp_path / "run" / "checksums.json").unlink()
    with displaced(str(tmp_path / "run")):
        pass
    assert (tmp_path / "run.old/content").read_text() == "mine"
    assert "run.old" in log.text


@pytest.mark.parametrize(
    ("number", "advice"),
    [("ENOSPC", "make room there"), ("EACCES", "allow writing there"), ("EIO", "error; choose another")],
)
def test_the_advice_of_a_failed_write_is_that_of_its_cause(number, advice):
    code = getattr(errno, number)
    assert advice in (message := str(WriteError.of("x", OSError(code, os.strerror(code)))))
    assert ("make room" in message) == (number == "ENOSPC")
