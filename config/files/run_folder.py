"""The folder of a run: which files belong to the run, and which process may write.

A run keeps records in ``OUTPUT_DIR/.hookline/``:

``manifest``
    the names of the run's files, see :class:`~hookline.config.files.manifest.Manifest`. Other files of OUTPUT_DIR are
    never replaced, moved or removed.
``lock``
    held by the run's main process, see :class:`~hookline.config.files.folder_lock.FolderLock`.
``moving``
    present while an earlier run is being moved away; the next start then moves it back (:meth:`RunFolder.recover`).

Call :func:`claim` before writing a file of a run. In a folder that no run of this process has opened, it does nothing,
so that writers and checkpointers also work without a run.
"""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from .atomic import put_back, remove_leftovers, replace_text, sync_directory
from .folder_lock import FolderLock
from .manifest import RECORDS, Manifest, is_inside

__all__ = ["RunFolder", "claim", "claim_pattern", "is_claimed", "is_in_run_folder", "run_folder"]

_folders: dict[str, "RunFolder"] = {}


def run_folder(path: str) -> "RunFolder":
    """Return the object of this process for a folder."""
    path = os.path.abspath(path)
    return _folders.setdefault(path, RunFolder(path))


def claim(path: str) -> None:
    """Record a file or folder as the run's, before it is created.

    Args:
        path: a file in the folder of a run; other paths are ignored.

    Raises:
        ConfigError: it exists and was not written by a run.
        OSError: it cannot be recorded: the disk is full, or the run's folder is gone.
    """
    folder, name = _find(path)
    if folder is not None:
        folder.claim(name)


def claim_pattern(path: str) -> None:
    """:func:`claim` for files whose names a library chooses.

    Args:
        path: its last part is an :mod:`fnmatch` pattern that no other files match.
    """
    folder, name = _find(path)
    if folder is not None:
        folder.claim(name, pattern=True)


def is_claimed(path: str) -> bool:
    """Whether a run may remove or replace a file: the file is the run's, or in no run's folder."""
    folder, name = _find(path)
    return folder is None or name in folder


def is_in_run_folder(path: str) -> bool:
    """Whether a path is in the folder of a run of this process."""
    return _find(path)[0] is not None


def _find(path: str) -> tuple["RunFolder | None", str]:
    """The open folder that a path is in, and its name there."""
    if "://" in path:
        return None, ""
    path = os.path.abspath(path)
    parent = os.path.dirname(path)
    while True:
        folder = _folders.get(parent)
        if folder is not None and folder.is_open:
            return folder, os.path.relpath(path, parent)
        if parent == os.path.dirname(parent):
            return None, ""
        parent = os.path.dirname(parent)


class RunFolder:
    """The folder of a run; get it by :func:`run_folder`.

    Args:
        path: absolute; it need not exist.

    Attributes:
        before_first_claim: called before the first name is claimed. It must :meth:`take` the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.before_first_claim: Callable[[], Any] | None = None
        self._manifest = Manifest(path, self._own("manifest"))
        self._taken = False
        self._lock = FolderLock(self._own("lock"), f"OUTPUT_DIR: {path}")
        self._mutex = threading.RLock()  # writers claim on threads of their own

    def _own(self, name: str) -> str:
        return os.path.join(self.path, RECORDS, name)

    @property
    def is_open(self) -> bool:
        """Whether claims are recorded: a run has the folder, or is about to take it."""
        return self._taken or self.before_first_claim is not None

    def __contains__(self, name: str) -> bool:
        """Whether a name is a file of the run, or in a folder of the run."""
        return name in self._manifest

    # ------------------------------------------------------------------ claims

    def claim(self, name: str, pattern: bool = False) -> None:
        """See :func:`claim`.

        Args:
            name: relative to the folder.
            pattern: ``name`` is an fnmatch pattern, for files whose names a library chooses.
        """
        with self._mutex:
            if self.before_first_claim is not None:
                self.before_first_claim()
            name = os.path.normpath(name)
            if name in self or (pattern and name in self._manifest.patterns):
                self._manifest.check_exists()
                return
            if not pattern and os.path.lexists(os.path.join(self.path, name)):
                raise ConfigError(f"OUTPUT_DIR: {self._foreign(name)}")
            self._manifest.add(name, pattern)

    def check_names(self, *, resume: bool, writes: Callable[[str], bool]) -> None:
        """Check that no file of the user has the name of a file of the run.

        Args:
            resume: the run continues the run in the folder, which may be of a version without a manifest.
            writes: whether the run may write a file of this name at the top of the folder.

        Raises:
            ConfigError: there is such a file; the message says what to do.
        """
        if not os.path.isdir(self.path) or (resume and self._is_unrecorded()):
            return
        names = [name for name in sorted(os.listdir(self.path)) if writes(name) and name not in self]
        if names:
            raise ConfigError(f"OUTPUT_DIR: {self._foreign(*names)}")

    def _foreign(self, name: str, *more: str) -> str:
        path = os.path.join(self.path, name)
        if self._is_unrecorded():
            return (
                f"{self.path} holds a run of an older version of hookline, which did not record its files ({name} for "
                "example); --resume it, choose another OUTPUT_DIR, or move its files away"
            )
        if more:
            names = ", ".join([name, *more[:8], *["..."] * (len(more) > 8)])
            return f"{names} in {self.path} were not written by a run; move them away, or choose another OUTPUT_DIR"
        return f"{path} exists and was not written by a run; move it away, or choose another OUTPUT_DIR"

    def _is_unrecorded(self) -> bool:
        """Whether a run of a version without a manifest is here."""
        return "last_checkpoint" not in self and os.path.isfile(os.path.join(self.path, "last_checkpoint"))

    # ------------------------------------------------------------------ taking the folder

    def take(self, *, resume: bool, writes: Callable[[str], bool]) -> str:
        """Lock the folder for this process, before a run writes.

        Args:
            resume: the run continues the run in the folder. Otherwise that run is moved to ``previous_001`` (002, ...).
            writes: see :meth:`check_names`.

        Returns:
            The folder that an earlier run was moved to; empty if there was none.

        Raises:
            ConfigError: another run has the folder, or files of the user are in the way. Nothing is changed.
            OSError: the folder cannot be written.
        """
        with self._mutex:
            os.makedirs(self._own(""), exist_ok=True)
            self._lock.acquire()
            try:
                self._recover()
                self._manifest.read()
                if resume and self._is_unrecorded():
                    self._adopt(writes)
                self.check_names(resume=resume, writes=writes)
                moved = "" if resume else self._move_earlier_run()
                self._manifest.ensure()
            except BaseException:
                self.release()
                raise
            self._taken, self.before_first_claim = True, None
            return moved

    def join(self) -> None:
        """Open the folder for a program that only adds files, such as predictions: no lock is taken, nothing moves."""
        with self._mutex:
            os.makedirs(self._own(""), exist_ok=True)
            self._manifest.read()
            self._manifest.ensure()
            self._taken, self.before_first_claim = True, None

    def continue_here(self) -> None:
        """Take the folder again after :meth:`release`, without moving anything."""
        with self._mutex:
            self._manifest.check_exists()
            self._lock.acquire()
            self._manifest.read()

    def release(self) -> None:
        """Release the folder, if this process has it."""
        with suppress(OSError):  # the folder may be gone
            self._lock.release()

    def recover(self) -> list[str]:
        """Undo an interrupted start, and remove temporary files of killed processes.

        Returns:
            The names of the restored files and folders.

        Raises:
            ConfigError: another run has the folder.
        """
        if not os.path.isdir(self._own("")):
            return []
        with self._mutex:
            held = self._lock.held
            self._lock.acquire()
            try:
                return self._recover()
            finally:
                if not held:
                    self.release()

    @property
    def needs_recovery(self) -> bool:
        """Whether a start was killed while it moved an earlier run away."""
        return os.path.lexists(self._own("moving"))

    def existing(self) -> list[str]:
        """Return the names of the run's existing files and folders."""
        return self._manifest.existing()

    def read_claims(self) -> None:
        """Read the manifest, without taking the folder."""
        with self._mutex:
            self._manifest.read()

    def _adopt(self, writes: Callable[[str], bool]) -> None:
        """Claim the files of a resumed run of a version without a manifest."""
        self._manifest.ensure()
        for name in sorted(os.listdir(self.path)):
            if (writes(name) or name.startswith("events.out.tfevents.")) and name not in self:
                self._manifest.add(name)

    # ------------------------------------------------------------------ an earlier run

    def _move_earlier_run(self) -> str:
        """Move the run in the folder to ``previous_001`` (002, ...).

        ``moving`` exists from before the first move until after the last. If the process is killed in between, the next
        start moves everything back.
        """
        names = self._manifest.existing()
        if not names:
            self._manifest.start()
            return ""
        number = 1
        while os.path.lexists(target := os.path.join(self.path, f"previous_{number:03d}")):
            number += 1
        replace_text(self._own("moving"), json.dumps({"to": os.path.basename(target), "names": names}))
        try:
            for name in names:
                _move(self.path, target, name)
            _move(self.path, target, os.path.join(RECORDS, "manifest"))
            self._manifest.start()
        except BaseException:
            self._recover()
            self._manifest.read()
            raise
        sync_directory(target)
        os.remove(self._own("moving"))
        sync_directory(self._own(""))
        return target

    def _recover(self) -> list[str]:
        back = put_back(self.path, alone=True)
        for folder in (self.path, self._own("")):
            remove_leftovers(folder, alone=True)
        try:
            with open(self._own("moving"), encoding="utf-8") as file:
                moving = json.load(file)
            source, names = os.path.join(self.path, moving["to"]), [str(name) for name in moving["names"]]
            if not is_inside(moving["to"]) or not all(map(is_inside, names)):
                raise ValueError(f"names outside of {self.path}")
        except FileNotFoundError:
            return back
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._own('moving')} is damaged ({error}); check the files in {self.path}") from error
        there = [name for name in names if os.path.lexists(os.path.join(source, name))]
        for name in there:
            if os.path.lexists(os.path.join(self.path, name)):
                raise ConfigError(
                    f"OUTPUT_DIR: a start was killed while it moved {name} to {source}; it cannot be moved back, since "
                    f"{os.path.join(self.path, name)} exists now; move it away"
                )
        for name in there:
            _move(source, self.path, name)
        if os.path.lexists(os.path.join(source, RECORDS, "manifest")):
            _move(source, self.path, os.path.join(RECORDS, "manifest"))
        back += there
        _remove_empty(source)
        os.remove(self._own("moving"))
        return back


def _move(source: str, target: str, name: str) -> None:
    """Move a file or folder to another folder, and remove parents that are empty afterwards."""
    old, new = os.path.join(source, name), os.path.join(target, name)
    os.makedirs(os.path.dirname(new), exist_ok=True)
    os.rename(old, new)
    parent = os.path.dirname(name)
    while parent and parent != RECORDS:
        with suppress(OSError):
            os.rmdir(os.path.join(source, parent))
        parent = os.path.dirname(parent)


def _remove_empty(folder: str) -> None:
    """Remove a folder that contains only empty folders."""
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)
