"""Logging to the console and to a file per rank."""

import copy
import functools
import logging
import os
import sys
from typing import IO, Any

from ...hooks.writers.bars import bar_is_shown

__all__ = [
    "LOGGERS",
    "close_logs",
    "hold_logs",
    "open_logs",
    "release_logs",
    "set_console_level",
    "setup_logger",
]

LOGGERS = ("hookline", "fvcore", "detectron2")  # ported code logs to the last one

_LEVEL_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


class _ConsoleFormatter(logging.Formatter):
    """Shows time and message; from WARNING on also the level, in color if the console supports it."""

    def __init__(self, color: bool, rank: int = 0) -> None:
        super().__init__("%(asctime)s  %(message)s", "%H:%M:%S")
        self._color = color
        self._rank = f"rank {rank}: " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if record.levelno < logging.WARNING:
            return line
        line = f"{record.asctime}  {self._rank}{record.levelname}: {record.message}"
        return f"{_LEVEL_COLORS[record.levelno]}{line}\033[0m" if self._color else line


class _ConsoleHandler(logging.StreamHandler):
    """Writes to the current ``sys.stdout``, which programs, notebooks and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not (getattr(record, "is_on_bar", False) and bar_is_shown()):
            super().emit(record)

    @property
    def stream(self) -> Any:
        return sys.stdout


class _FileHandler(logging.StreamHandler):
    """Writes to a log file that several loggers may share."""

    log_path: str


class _HeldHandler(logging.Handler):
    """Keeps messages in memory until the log file may be opened."""

    def __init__(self, log_path: str) -> None:
        super().__init__(logging.DEBUG)
        self.log_path = log_path
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < 10_000:
            record = copy.copy(record)
            record.msg, record.args = record.getMessage(), None  # arguments may change before the message is written
            self.records.append(record)


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
        color: use colors if the console is a terminal.
        name: the logger; its child loggers are included.
        abbrev_name: ignored; for compatibility with detectron2.

    Returns:
        The logger.
    """
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    known = next((handler for handler in logger.handlers if isinstance(handler, _ConsoleHandler)), None)
    if known is None or distributed_rank > 0:  # an earlier call, in a script's imports, did not know the rank
        console = known or _ConsoleHandler()
        console.setLevel(logging.INFO if distributed_rank == 0 else logging.ERROR)
        console.setFormatter(_ConsoleFormatter(color and sys.stdout.isatty(), distributed_rank))
        logger.addHandler(console)
    if output is not None:
        for path, level in _files(output, distributed_rank):
            _add_file(logger, path, level, distributed_rank)
    return logger


def set_console_level(level: str) -> None:
    """Set the lowest level of hookline's messages on the console, such as "WARNING". Files keep all messages."""
    for name in LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, _ConsoleHandler):
                handler.setLevel(level)


def _files(output: str, rank: int) -> list[tuple[str, int]]:
    """Return the log files of a rank, each with its lowest level."""
    path = os.path.abspath(output if output.endswith((".txt", ".log")) else os.path.join(output, "log.txt"))
    return [(f"{path}.rank{rank}", logging.DEBUG), (path, logging.ERROR)] if rank > 0 else [(path, logging.DEBUG)]


def hold_logs(folder: str) -> None:
    """Keep the messages of hookline's loggers in memory until :func:`open_logs` writes them.

    Closes the log files of runs that have ended: the messages that follow are those of another run.
    """
    close_logs(folder)
    _close_ended()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(_HeldHandler(os.path.join(os.path.abspath(folder), "log.txt")))


def open_logs(folder: str, rank: int) -> None:
    """Open a run's log files, and write the messages kept by :func:`hold_logs`."""
    held = _close(folder)
    _ended.discard(os.path.abspath(folder))
    _close_ended()
    for name in LOGGERS:
        setup_logger(folder, rank, name=name)
    for record in sorted(held, key=lambda record: record.created):
        for handler in logging.getLogger(record.name.partition(".")[0]).handlers:
            if isinstance(handler, _FileHandler) and record.levelno >= handler.level:
                handler.handle(record)


_ended: set[str] = set()
"""The folders of runs that have ended. Their log files stay open for what the program does with the trained model."""


def release_logs(folder: str) -> None:
    """Let the next run of this process close a folder's log files."""
    _ended.add(os.path.abspath(folder))


def _close_ended() -> None:
    while _ended:
        _close(_ended.pop())


def _add_file(logger: logging.Logger, path: str, level: int, rank: int) -> None:
    if any(getattr(handler, "log_path", None) == path for handler in logger.handlers):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handler = _FileHandler(_open_log(path))
    handler.log_path = path
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s rank{rank}] %(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)


def close_logs(folder: str) -> None:
    """Close the log files in a folder, and discard messages kept for them. The console is not changed."""
    _close(folder)


def _close(folder: str) -> list[logging.LogRecord]:
    """Remove the handlers of a folder's log files. Return the messages that were kept."""
    folder, held = os.path.abspath(folder), list[logging.LogRecord]()
    for logger in [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]:
        for handler in logger.handlers[:]:
            if isinstance(handler, _FileHandler | _HeldHandler) and os.path.dirname(handler.log_path) == folder:
                logger.removeHandler(handler)
                if isinstance(handler, _HeldHandler):
                    held += handler.records
                else:
                    handler.stream.close()
    _open_log.cache_clear()
    return held


@functools.cache
def _open_log(path: str) -> IO[str]:
    """Open one stream per file, so that several loggers do not overwrite each other's lines."""
    return open(path, "a", encoding="utf-8", buffering=1)
