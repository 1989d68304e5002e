"""What a run does with OUTPUT_DIR: check it before anything is built, take it when the first step is done."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from ...config import ConfigError
from ...config.files.atomic import check_regular, replace_text, shown_path
from ...config.files.run_folder import RECORDS, claim, run_folder
from ...hooks.writers.files import back_up
from .. import comm
from .logger import close_logs, open_logs

__all__ = ["OutputDir", "RunKind", "removed_if_empty"]

logger = logging.getLogger(__name__)

RunKind = Literal["train", "inference", "dry", "trial"]
"""
"train": a training run. "inference" (``--eval-only``, ``--predict``): adds only its own files and the log, also while
a run trains in the folder. "dry" (``--dry-run``): writes nothing. "trial" (FAST_DEV_RUN): trains, but writes nothing.
"""


class OutputDir:
    """OUTPUT_DIR of one run. Only the main process calls its methods.

    Args:
        path: the folder.
        kind: see :data:`RunKind`.
        optional: whether the run also works if the folder is not writable: an evaluation.

    Raises (all methods):
        ConfigError: the folder cannot be used. Nothing in it has changed.
    """

    def __init__(self, path: str, kind: RunKind, optional: bool = False) -> None:
        self._kind = kind
        self._optional = optional
        self._last_checkpoint = b""
        self.folder = run_folder(path)
        self.path = self.folder.path

    def check(self) -> bool:
        """Check that the run can use the folder, and undo a start that was killed.

        Returns:
            Whether the run may write to the folder.
        """
        if self._kind != "dry":
            try:
                _check_writable(self.path)
            except ConfigError as error:
                if not self._optional:
                    raise
                logger.warning("%s. The evaluation writes no log", error)
                return False
        self.folder.check_records()
        if self._kind == "train" or self.folder.needs_recovery:
            try:
                self.folder.recover()
            except OSError as error:
                raise ConfigError(f"OUTPUT_DIR: cannot write to {self.path}: {error.strerror or error}") from error
        for name in _log_names():
            check_regular(os.path.join(self.path, name))
        self._last_checkpoint = self._read("last_checkpoint")
        return True

    def create(self) -> None:
        """Create the folder if it is missing: programs open files in it before they train."""
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR: cannot create {self.path}: {error.strerror}") from error

    def take(self, resume: bool, config: str, last: str = "") -> None:
        """Lock the folder for training, move an earlier run away unless it is resumed, and write ``config.yaml``.

        Args:
            resume: whether the run in the folder is resumed.
            config: the text of ``config.yaml``; an existing file that no run wrote is kept as ``config.yaml.old``.
                Empty: the file is not written, since nothing will be trained.
            last: the checkpoint in the folder that is resumed, if that is not the one in ``last_checkpoint``.
        """
        moved = self.folder.take(resume)
        try:
            if resume and self._read("last_checkpoint") != self._last_checkpoint:
                raise ConfigError(
                    f"OUTPUT_DIR: another run has saved checkpoints in {self.path} since this one started"
                )
            self._open_logs()
            if moved:
                logger.info("The earlier run in %s is now in %s", self.path, moved)
            if config:
                self._write_config(config)
            if last:  # from here on the later ones are of a run that was given up
                claim(path := os.path.join(self.path, "last_checkpoint"), keep=True)
                replace_text(path, last)
        except BaseException:
            close_logs(self.path)
            self.folder.release()
            raise

    def join(self) -> None:
        """Add to the folder's log, also while another run trains there."""
        self.folder.join()
        self._open_logs()

    def _open_logs(self) -> None:
        for name in _log_names():
            claim(os.path.join(self.path, name), keep=True)
        open_logs(self.path, 0)

    def _write_config(self, text: str) -> None:
        path, record = os.path.join(self.path, "config.yaml"), os.path.join(RECORDS, "config.yaml")
        earlier, known = self._read("config.yaml", -1), (text.encode(), self._read(record, -1))
        claim(path, keep=earlier in known)
        if os.path.lexists(path) and earlier not in known:
            logger.info("config.yaml was edited; the earlier one is now %s", back_up(path, earlier))
        replace_text(path, text)
        replace_text(os.path.join(self.path, record), text)
        logger.info("Full config: %s", shown_path(path))

    def _read(self, name: str, size: int = 10_000) -> bytes:
        """Return the first bytes of a file; empty if there is no such file."""
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            return file.read(size)


def _log_names() -> list[str]:
    return ["log.txt", *(f"log.txt.rank{rank}" for rank in range(1, comm.get_world_size()))]


def _check_writable(path: str) -> None:
    """Raise an error if a folder, or the folder that it would be created in, is not writable."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"OUTPUT_DIR: cannot create {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_DIR: {there} is not writable; change its permissions or choose another OUTPUT_DIR")


@contextmanager
def removed_if_empty(path: str) -> Iterator[None]:
    """If the block fails and has written nothing, remove the folder that it created, with its new parents."""
    path, new = os.path.abspath(path), []
    while not os.path.lexists(path):
        new.append(path)
        path = os.path.dirname(path)
    try:
        yield
    except BaseException:
        if comm.is_main_process():
            with suppress(OSError):  # it has files
                for folder in new:
                    os.rmdir(folder)
        raise
