"""What a run does with OUTPUT_DIR: check it before anything is built, take it when training begins."""

import logging
import os
import re
from collections.abc import Sequence
from typing import Literal

from ...config import CfgNode, ConfigError, component
from ...config.files.atomic import replace_text
from ...config.files.run_folder import run_folder
from ...hooks.writers.append_file import back_up
from .. import comm
from ..ranks.process import set_log_file
from .logger import close_logs, open_logs

__all__ = ["OutputDir", "RunKind"]

logger = logging.getLogger(__name__)

RunKind = Literal["train", "inference", "dry", "trial"]
"""
"train": a training run. "inference" (``--eval-only``, ``--predict``): adds only its own files and the log, also while
a run trains in the folder. "dry" (``--dry-run``): writes nothing. "trial" (FAST_DEV_RUN): trains, but writes nothing.
"""

# Files of every run, and files of writers that a config may leave out.
_RUN_FILE = re.compile(
    r"config\.yaml|log\.txt(\.rank\d+)?|last_checkpoint"
    r"|(rolling_\d{7,}|model_(\d{7,}|final|exception|best(_\d{7,}(_\w+)?)?))\.pth"
)
_WRITER_FILES = {"JSONWriter": "metrics.json", "CSVWriter": "metrics.csv"}


class OutputDir:
    """OUTPUT_DIR of one run. Only the main process calls its methods.

    Args:
        cfg: the full config.
        kind: see :data:`RunKind`.

    Raises (all methods):
        ConfigError: the folder cannot be used. Nothing in it has changed.
    """

    def __init__(self, cfg: CfgNode, kind: RunKind) -> None:
        self._cfg = cfg
        self._kind = kind
        self._last_checkpoint = b""
        self.folder = run_folder(cfg.OUTPUT_DIR)
        self.path = self.folder.path

    def check(self, resume: bool | None) -> None:
        """Check that the run can use the folder.

        Args:
            resume: whether the run in the folder is resumed; None if that is not known yet.
        """
        if self._kind == "dry":
            if self.folder.needs_recovery:
                raise ConfigError(
                    f"OUTPUT_DIR: a start was killed while it moved files of {self.path}; start once without "
                    "--dry-run, which moves them back"
                )
        else:
            _check_writable(self.path)
            if self._kind == "train" or self.folder.needs_recovery:
                self.folder.recover()
        self.folder.read_claims()
        if self._kind == "inference":
            self._check_log()
        elif resume is not None:
            self._check_names(resume)
        self._last_checkpoint = self._read("last_checkpoint")

    def take(self, resume: bool, config: str) -> None:
        """Lock the folder for training, move an earlier run away unless it is resumed, and write ``config.yaml``.

        Args:
            resume: whether the run in the folder is resumed.
            config: the text of ``config.yaml``; an existing file with another text is kept as ``config.yaml.old``.
                Empty: the file is not written, since nothing will be trained.
        """
        self.folder.read_claims()
        self._check_names(resume)
        moved = self.folder.take(resume=resume, writes=self._writes)
        try:
            if resume and self._read("last_checkpoint") != self._last_checkpoint:
                raise ConfigError(
                    f"OUTPUT_DIR: another run has saved checkpoints in {self.path} since this one started"
                )
            for name in ("config.yaml", *_log_names()):
                self.folder.claim(name)
            open_logs(self._cfg.OUTPUT_DIR, 0)
            set_log_file(os.path.join(self.path, "log.txt"))
            if moved:
                logger.info("The earlier run in %s is now in %s", self._cfg.OUTPUT_DIR, moved)
            if config:
                self._write_config(config)
        except BaseException:
            close_logs(self._cfg.OUTPUT_DIR)
            self.folder.release()
            raise

    def _write_config(self, text: str) -> None:
        path = os.path.join(self.path, "config.yaml")
        earlier = self._read("config.yaml", -1)
        if earlier and earlier != text.encode():
            logger.info("config.yaml has changed; the earlier one is now %s", back_up(path, earlier))
        replace_text(path, text)
        logger.info("Full config: %s", os.path.join(self._cfg.OUTPUT_DIR, "config.yaml"))

    def join(self) -> None:
        """Add to the folder's log, also while another run trains there."""
        self.folder.join()
        for name in _log_names():
            if not os.path.lexists(os.path.join(self.path, name)):
                self.folder.claim(name)
        open_logs(self._cfg.OUTPUT_DIR, 0)

    def _check_names(self, resume: bool) -> None:
        self.folder.check_names(resume=resume, writes=self._writes)
        if not resume:
            _refuse_weights_of_earlier_run(self._cfg.MODEL.WEIGHTS, self.path, self.folder.existing())

    def _writes(self, name: str) -> bool:
        """Whether the run writes a file of this name."""
        writers = {component(entry)[0] for entry in self._cfg.LOG.WRITERS}
        return bool(_RUN_FILE.fullmatch(name)) or any(name == _WRITER_FILES.get(writer) for writer in writers)

    def _check_log(self) -> None:
        """Raise an error if log.txt is not a log of hookline."""
        head = self._read("log.txt", 200)
        if head and "log.txt" not in self.folder and not re.match(rb"\[[-\d]{10} [:,\d]+ rank\d+\] ", head):
            self.folder.check_names(resume=False, writes=lambda name: name == "log.txt")

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


def _refuse_weights_of_earlier_run(weights: str, folder: str, names: Sequence[str]) -> None:
    """Raise an error if MODEL.WEIGHTS is one of the files that the run is about to move away."""
    paths = [folder, *(os.path.join(folder, name) for name in names)]
    if (
        weights
        and names
        and os.path.exists(weights)
        and any(os.path.exists(path) and os.path.samefile(path, weights) for path in paths)
    ):
        raise ConfigError(
            f"MODEL.WEIGHTS: {weights} belongs to the earlier run in OUTPUT_DIR, which a new run moves away. Choose "
            "another OUTPUT_DIR for this run, or --resume the earlier one"
        )
