"""Logging to the console and to a file per rank."""

import copy
import logging
import os
import sys
from logging.handlers import MemoryHandler

from ...hooks.writers.bars import above_bar, is_shown

LOGGERS = ("hookline", "fvcore", "detectron2")  # ported code logs to the last one


class _Console(logging.Handler):
    """Shows time and message on the current ``sys.stdout``, which programs, notebooks and tests replace.

    From WARNING on it shows the level too, in color if the console supports it. A record's attribute ``console`` is
    shown in place of its message and traceback.

    Args:
        color: use colors if the console is a terminal, and the environment variable ``NO_COLOR`` is not set.
        rank: the rank of this process. Only errors of other ranks than 0 are shown.
    """

    def __init__(self, color: bool, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.ERROR)
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        self._rank = f"rank {rank}: " if rank else ""
        self._color = color and not os.environ.get("NO_COLOR")

    def emit(self, record: logging.LogRecord) -> None:
        shown_in = getattr(record, "shown_in", "")
        if getattr(sys.stdout, "closed", sys.stdout is None) or (shown_in and is_shown(shown_in)):
            return
        try:
            line = self.format(record)
            with above_bar():
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        if text := getattr(record, "console", ""):
            record = copy.copy(record)
            record.msg, record.args, record.exc_info, record.exc_text = text, None, None, None
        line = super().format(record)
        if record.levelno >= logging.WARNING:
            time, _, message = line.partition("  ")
            line = f"{time}  {self._rank}{record.levelname}: {message}"
            if self._color and getattr(sys.stdout, "isatty", bool)():  # a script's own may have none
                line = f"\033[{31 if record.levelno >= logging.ERROR else 33}m{line}\033[0m"
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # of the console, which may not have all letters
        return line.encode(encoding, "backslashreplace").decode(encoding)


class _LogFile(logging.FileHandler):
    """A log file of a run."""

    @property
    def folder(self) -> str:
        return os.path.dirname(self.baseFilename)


class _Held(MemoryHandler):
    """Keeps messages in memory until the log file may be opened."""

    def __init__(self, folder: str) -> None:
        super().__init__(capacity=0)
        self.folder = folder

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage(), None  # as its arguments are now
        return False


def setup_logger(
    output: str | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "hookline",
    abbrev_name: str | None = None,
) -> logging.Logger:
    """Send a logger's messages to the console (rank 0 only) and to a file. Can be called again to add a file.

    Errors of all ranks also go to the console and to rank 0's file.

    Args:
        output: a folder (the file is ``log.txt``), or a file ending in .txt or .log. Files of other ranks end in
            ``.rank1`` and so on. None: no file.
        distributed_rank: the rank of this process.
        color: use colors if the console is a terminal, and the environment variable ``NO_COLOR`` is not set.
        name: the logger; its child loggers are included.
        abbrev_name: ignored; for compatibility with detectron2.

    Returns:
        The logger.
    """
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    known = [handler for handler in logger.handlers if isinstance(handler, _Console)]
    if not known or distributed_rank > 0:
        for console in known:  # an earlier call, in a script's imports, did not know the rank
            logger.removeHandler(console)
        logger.addHandler(_Console(color, distributed_rank))
    if output is not None:
        path = os.path.abspath(output if output.endswith((".txt", ".log")) else os.path.join(output, "log.txt"))
        files = {path: logging.ERROR, f"{path}.rank{distributed_rank}": logging.DEBUG}
        for file, level in files.items() if distributed_rank > 0 else [(path, logging.DEBUG)]:
            if any(isinstance(handler, _LogFile) and handler.baseFilename == file for handler in logger.handlers):
                continue
            os.makedirs(os.path.dirname(file), exist_ok=True)
            log = _LogFile(file, encoding="utf-8", errors="backslashreplace")
            log.setLevel(level)
            line = f"[%(asctime)s rank{distributed_rank}] %(name)s %(levelname)s: %(message)s"
            log.setFormatter(logging.Formatter(line))
            logger.addHandler(log)
    return logger


_folder = ""  # of the run that opened its log last


def prepare_logs(rank: int, level: str, folder: str) -> MemoryHandler | None:
    """Send the messages of hookline's loggers to the console, and keep them in memory for :func:`open_logs`.

    Closes the log of the run before.

    Args:
        rank: the rank of this process.
        level: the lowest level that rank 0's console shows, such as "WARNING". Files keep all messages.
        folder: the run's folder. Empty: it gets no log, and nothing is kept.

    Returns:
        What keeps the messages.
    """
    held = _Held(os.path.abspath(folder)) if folder else None
    if held is not None:
        _close(_folder, held.folder)
    for name in LOGGERS:
        logger = setup_logger(distributed_rank=rank, name=name)
        for handler in logger.handlers if rank == 0 else ():
            if isinstance(handler, _Console):
                handler.setLevel(level)
        if held is not None:
            logger.addHandler(held)
    return held


def open_logs(folder: str, rank: int, held: MemoryHandler | None = None) -> None:
    """Open a run's log files, and write the messages kept by :func:`prepare_logs`. Close those of the run before."""
    global _folder
    before, _folder = _folder, os.path.abspath(folder)
    if before != _folder:
        _close(before)
    for name in LOGGERS:
        logger = setup_logger(folder, rank, name=name)
        if held is None:
            continue
        logger.removeHandler(held)
        for record in held.buffer:
            for handler in logger.handlers if record.name.partition(".")[0] == name else ():
                if isinstance(handler, _LogFile) and record.levelno >= handler.level:
                    handler.handle(record)


def _close(*folders: str) -> None:
    """Close the log files in folders, and drop messages that are kept for them."""
    for logger in [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]:
        for handler in logger.handlers[:]:
            if isinstance(handler, _LogFile | _Held) and handler.folder in folders:
                logger.removeHandler(handler)
                handler.close()
