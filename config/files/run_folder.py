"""The folder of a run: which files belong to the run, and which process may write.

A run keeps records in ``OUTPUT_DIR/.hookline/``:

``files``
    the names of the run's files, one JSON string a line. A run never replaces, moves or removes other files; if it
    needs the name of one, the other file is renamed (:func:`claim`).
``lock``
    locked by the system (``flock``) for the run's main process. The content is only for messages.
``moving/``
    holds the files of an earlier run while it is being moved away. The last step renames it to ``previous_001``; a
    start that was killed before that is undone by the next one.

Call :func:`claim` before writing a file of a run. In a folder that no run of this process has opened, it does nothing,
so that writers and checkpointers also work without a run.
"""

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from .atomic import (
    check_no_link,
    check_regular,
    free_name,
    put_back,
    remove_leftovers,
    replace_text,
    sync_directory,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["RECORDS", "RunFolder", "claim", "is_claimed", "is_in_run_folder", "run_folder"]

logger = logging.getLogger(__name__)

RECORDS = ".hookline"
"""The folder in OUTPUT_DIR for the records of a run."""

# The files of a run in a folder without a list.
_RUN_FILE = re.compile(
    r"config\.yaml|log\.txt(\.rank\d+)?|metrics\.(json|csv)|last_checkpoint|curves\.(png|html)"
    r"|events\.out\.tfevents\.\d{10}\..+|(rolling_\d{7,}|model_(\d{7,}|final|exception|best(_\d{7,}(_\w+)?)?))\.pth"
)

_LONGEST_LIST = 1 << 24  # characters

_folders: dict[str, "RunFolder"] = {}


def run_folder(path: str) -> "RunFolder":
    """Return the object of this process for a folder."""
    path = os.path.abspath(path)
    return _folders.setdefault(path, RunFolder(path))


def claim(path: str, keep: bool = False) -> None:
    """Make a name the run's, before its file or folder is created.

    An existing one that no run wrote is renamed to ``<path>.old`` (``.old2``, ...), with a warning.

    Args:
        path: a file in the folder of a run; other paths are ignored.
        keep: an existing file becomes the run's as it is.

    Raises:
        ConfigError: another run has the folder.
        OSError: the name cannot be recorded: the disk is full, or the run's folder is gone.
    """
    folder, name = _find(path)
    if folder is not None:
        folder.claim(name, keep)


def is_claimed(path: str) -> bool:
    """Whether a run may remove or replace a file: the file is the run's, or in no run's folder."""
    folder, name = _find(path)
    return folder is None or name in folder


def is_in_run_folder(path: str) -> bool:
    """Whether a path is in the folder of a run of this process."""
    return _find(path)[0] is not None


def _find(path: str) -> tuple["RunFolder | None", str]:
    """The innermost open folder that a path is in, and its name there."""
    absolute = "" if "://" in path else os.path.abspath(path)
    around = [one for one in _folders.values() if one.is_open and absolute.startswith(one.prefix)]
    folder = max(around, key=lambda one: len(one.path), default=None)
    return folder, absolute[len(folder.prefix) :] if folder else ""


class RunFolder:
    """The folder of a run; get it by :func:`run_folder`.

    Args:
        path: absolute; it need not exist.

    Attributes:
        before_first_claim: called before the first name is claimed. It must :meth:`take` the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.prefix = os.path.join(path, "")
        self.before_first_claim: Callable[[], Any] | None = None
        self._names: set[str] = set()
        self._opened = False
        self._lock = _Lock(self._own("lock"), path)
        self._mutex = threading.RLock()  # writers claim on threads of their own
        self._listed_in = 0  # the inode of the list, when the folder was released

    def _own(self, name: str) -> str:
        return os.path.join(self.path, RECORDS, name)

    @property
    def is_open(self) -> bool:
        """Whether claims are recorded: a run has the folder, or is about to take it."""
        return self._opened or self.before_first_claim is not None

    def __contains__(self, name: str) -> bool:
        """Whether a name is a file of the run, or in a folder of the run."""
        parts = os.path.normpath(name).split(os.sep)
        return any(os.sep.join(parts[:end]) in self._names for end in range(1, len(parts) + 1))

    # ------------------------------------------------------------------ the list

    def claim(self, name: str, keep: bool = False) -> None:
        """See :func:`claim`. ``name`` is relative to the folder."""
        with self._mutex:
            if self.before_first_claim is not None:
                self.before_first_claim()
            name = os.path.normpath(name)
            *parents, _ = name.split(os.sep)
            for end in range(len(parents)):
                check_no_link(os.path.join(self.path, *parents[: end + 1]))
            if name in self:
                os.stat(self._own("files"))  # a FileNotFoundError if the folder was removed
                return
            path = os.path.join(self.path, name)
            if not keep and os.path.lexists(path):
                os.rename(path, other := free_name(path))
                logger.warning("%s was not written by a run in this folder. It is now %s", path, other)
            # No O_CREAT: a removed folder is not created again. A single write, so that lines of two processes do not
            # mix. It starts with a newline, since the last line may be incomplete.
            descriptor = os.open(self._own("files"), os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"\n{json.dumps(name)}\n".encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._names.add(name)

    def read(self) -> None:
        """Read the list. In a run's folder without one, the files with the names of a run are the run's."""
        try:
            with open(self._own("files"), encoding="utf-8", errors="replace") as file:
                text = file.read(_LONGEST_LIST + 1)
        except (FileNotFoundError, NotADirectoryError):
            there = os.listdir(self.path) if os.path.isdir(self.path) else []
            is_run = "last_checkpoint" in there or ("metrics.json" in there and self._has_rows())
            self._names = set(filter(_RUN_FILE.fullmatch, there)) if is_run else set()
            return
        if len(text) > _LONGEST_LIST:
            raise ConfigError(f"{self._own('files')} is too long for the list of a run's files: remove it")
        names = set[str]()
        for line in filter(None, text.splitlines()):
            with suppress(ValueError, RecursionError):  # an incomplete line of a killed process
                name = json.loads(line)
                if isinstance(name, str) and _is_inside(name):
                    names.add(os.path.normpath(name))
        # A name through a link may lead out of the folder.
        real = os.path.realpath(self.path)
        folders = {os.path.dirname(name): os.path.join(real, os.path.dirname(name)) for name in names}
        inside = {one for one, path in folders.items() if os.path.realpath(path) == os.path.normpath(path)}
        self._names = {name for name in names if os.path.dirname(name) in inside}

    def _has_rows(self) -> bool:
        """Whether ``metrics.json`` begins with a row of a run, so that it is no file of the user's."""
        path = os.path.join(self.path, "metrics.json")
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            return re.match(r'\{.*"iteration": ', file.readline(10_000)) is not None
        return False

    def _ensure_list(self) -> None:
        if not os.path.isfile(self._own("files")):
            replace_text(self._own("files"), "".join(f"{json.dumps(name)}\n" for name in sorted(self._names)))

    def existing(self) -> list[str]:
        """Return the names of the run's existing files and folders; not those inside of a folder of the run."""
        names = (name for name in self._names if os.path.dirname(name) not in self)
        return sorted(name for name in names if os.path.lexists(os.path.join(self.path, name)))

    # ------------------------------------------------------------------ taking the folder

    def check_records(self) -> None:
        """Check that the records can be used: somebody else may have made the folder.

        Raises:
            ConfigError: one of them is a link, or not a file.
        """
        for path in (os.path.join(self.path, RECORDS), self._own("moving")):
            check_no_link(path)
        for name in ("files", "lock"):
            check_regular(self._own(name))

    def take(self, resume: bool) -> str:
        """Lock the folder for this process, before a run writes.

        Args:
            resume: the run continues the run in the folder. Otherwise that run is moved to ``previous_001`` (002, ...).

        Returns:
            The folder that an earlier run was moved to; empty if there was none.

        Raises:
            ConfigError: another run has the folder. Nothing is changed.
            OSError: the folder cannot be written.
        """
        with self._mutex:
            self.check_records()
            os.makedirs(self._own(""), exist_ok=True)
            self._lock.acquire()
            try:
                self._recover()
                self.read()
                moved = "" if resume else self._move_earlier_run()
                self._ensure_list()
            except BaseException:
                self.release()
                raise
            self._opened, self.before_first_claim, self._listed_in = True, None, 0
            return moved

    def join(self) -> None:
        """Open the folder for a program that only adds files, such as predictions: no lock is taken, nothing moves."""
        with self._mutex:
            self.check_records()
            os.makedirs(self._own(""), exist_ok=True)
            self.read()
            self._ensure_list()
            self._opened, self.before_first_claim = True, None

    def continue_here(self) -> None:
        """Take the folder again after :meth:`release`, without moving anything."""
        with self._mutex:
            if self._listed_in not in (0, os.stat(self._own("files")).st_ino):  # a new run begins a new list
                raise ConfigError(
                    f"OUTPUT_DIR: another run has begun in {self.path} since this one stopped; resume this one from "
                    "its previous_NNN, or train in another folder"
                )
            self.check_records()
            self._lock.acquire()
            self.read()

    def release(self) -> None:
        """Release the folder, if this process has it."""
        with suppress(OSError):
            self._listed_in = os.stat(self._own("files")).st_ino
        self._lock.release()

    # ------------------------------------------------------------------ an earlier run

    def _move_earlier_run(self) -> str:
        """Move the run in the folder to ``previous_001`` (002, ...): into ``moving``, which is then renamed."""
        names = self.existing()
        if not names:
            return ""
        self._ensure_list()
        number = 1
        while os.path.lexists(target := os.path.join(self.path, f"previous_{number:03d}")):
            number += 1
        try:
            for name in [*names, os.path.join(RECORDS, "files")]:
                os.renames(os.path.join(self.path, name), os.path.join(self._own("moving"), name))
            sync_directory(self._own("moving"))
            os.rename(self._own("moving"), target)
        except BaseException:
            self._recover()
            raise
        sync_directory(self.path)
        self._names = set()
        return target

    @property
    def needs_recovery(self) -> bool:
        """Whether a start was killed while it moved an earlier run away."""
        return os.path.lexists(self._own("moving"))

    def recover(self) -> list[str]:
        """Undo an interrupted start or replacement of a checkpoint, and remove temporary files of killed processes.

        Returns:
            The names of the restored files and folders.

        Raises:
            ConfigError: another run has the folder.
        """
        self.check_records()
        if not os.path.isdir(self._own("")):
            return put_back(self.path)
        with self._mutex:
            acquired = self._lock.acquire()
            try:
                return self._recover()
            finally:
                if acquired:
                    self.release()

    def _recover(self) -> list[str]:
        back = put_back(self.path)
        for folder in (self.path, self._own("")):
            remove_leftovers(folder)
        if self.needs_recovery:
            back += sorted(os.listdir(self._own("moving")))
            _move_back(self._own("moving"), self.path)
        return back


def _is_inside(name: str) -> bool:
    """Whether a name is inside of a run's folder, and not one of its records."""
    parts = os.path.normpath(name).split(os.sep)
    return bool(name) and not os.path.isabs(name) and parts[0] not in (os.pardir, os.curdir, RECORDS)


def _move_back(source: str, target: str) -> None:
    """Move everything in a folder to another one, and remove the folder."""
    for name in os.listdir(source):
        old, new = os.path.join(source, name), os.path.join(target, name)
        if not os.path.lexists(new):
            os.rename(old, new)
        elif all(os.path.isdir(one) and not os.path.islink(one) for one in (old, new)):
            _move_back(old, new)
        else:
            raise ConfigError(
                f"OUTPUT_DIR: a start was killed while it moved {new} to {old}; it cannot be moved back, since {new} "
                "exists now; move it away"
            )
    os.rmdir(source)


class _Lock:
    """The system's lock on a file, which ends with the process. Forked processes do not keep it."""

    def __init__(self, path: str, folder: str) -> None:
        self._path = path
        self._folder = folder
        self._warned = False
        self._descriptor = -1

    def acquire(self) -> bool:
        """Acquire the lock. Returns False if this process holds it already.

        Raises:
            ConfigError: another process holds it.
            OSError: the file cannot be opened or written.
        """
        if self._descriptor >= 0:
            return False
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"OUTPUT_DIR: {self._folder} is in use by {holder}; wait for it to end, or choose another OUTPUT_DIR"
            ) from None
        except OSError as error:
            if not self._warned:
                why = error.strerror
                logger.warning("%s cannot be locked (%s): start no second run in its folder", self._path, why)
            self._warned = True
        self._descriptor = descriptor
        with suppress(OSError):  # only for messages
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    def release(self, forked: bool = False) -> None:
        """Release the lock, if this process has it. In a forked process, the parent keeps it."""
        if self._descriptor >= 0:
            with suppress(OSError):
                if not forked:
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def _forget_locks() -> None:
    for folder in _folders.values():
        folder._lock.release(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
