"""Functions of ``detectron2.utils.logger``."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..setup.logger import setup_logger as _setup_logger

__all__ = ["create_small_table", "log_every_n", "log_every_n_seconds", "log_first_n", "setup_logger"]

_calls: Counter[tuple[Any, ...]] = Counter()
_times: dict[tuple[Any, ...], float] = {}


def setup_logger(
    output: str | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "detectron2",
    abbrev_name: str | None = None,
) -> logging.Logger:
    """Set up a logger as :func:`hookline.engine.setup_logger` does. The default also sets up hookline's own.

    Args:
        output: a folder or a file; None: console only.
        distributed_rank: the rank of this process.
        color: use colors if the console is a terminal.
        name: the logger. The default is for code that logs with ``logging.getLogger("detectron2")``.
        abbrev_name: ignored.

    Returns:
        The logger ``name``.
    """
    if name == "detectron2":
        _setup_logger(output, distributed_rank, color=color)
    return _setup_logger(output, distributed_rank, color=color, name=name, abbrev_name=abbrev_name)


def log_first_n(
    lvl: int, msg: str, n: int = 1, *, name: str | None = None, key: str | tuple[str, ...] = "caller"
) -> None:
    """Log only the first ``n`` times.

    Args:
        lvl: the logging level.
        msg: the message.
        n: how often.
        name: the logger. Default: that of the caller's module.
        key: what counts as the same message: "caller" (the line of code), "message" (the text), or both in a tuple.
    """
    module, line = _caller()
    keys = (key,) if isinstance(key, str) else key
    if unknown := set(keys) - {"caller", "message"} or not keys:
        raise ValueError(f'key is "caller", "message" or a tuple of them, not {unknown or keys}')
    same = ("first", *(line if "caller" in keys else ()), *((msg,) if "message" in keys else ()))
    _calls[same] += 1
    if _calls[same] <= n:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log the first of every ``n`` calls from the same line of code.

    Args:
        lvl: the logging level.
        msg: the message.
        n: number of calls.
        name: the logger. Default: that of the caller's module.
    """
    module, line = _caller()
    _calls[("every", *line)] += 1
    if (_calls[("every", *line)] - 1) % n == 0:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
    """Log unless the same line of code logged less than ``n`` seconds ago.

    Args:
        lvl: the logging level.
        msg: the message.
        n: seconds.
        name: the logger. Default: that of the caller's module.
    """
    module, line = _caller()
    now = time.monotonic()
    if now - _times.get(line, -float("inf")) >= n:
        _times[line] = now
        logging.getLogger(name or module).log(lvl, msg)


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """Return a Markdown table of one row, with the keys as its header. Floats have three decimals."""
    values = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in small_dict.values()]
    widths = [max(len(str(key)), len(value), 3) for key, value in zip(small_dict, values, strict=True)]
    header = "|".join(f" {key!s:^{width}} " for key, width in zip(small_dict, widths, strict=True))
    line = "|".join(f":{'-' * width}:" for width in widths)
    row = "|".join(f" {value:^{width}} " for value, width in zip(values, widths, strict=True))
    return f"|{header}|\n|{line}|\n|{row}|"


def _caller() -> tuple[str, tuple[Any, ...]]:
    """Return the module that called a function here, and the line of its code."""
    frame = sys._getframe(2)
    module = frame.f_globals["__name__"]
    # A script's messages go to a logger that is set up.
    return "hookline" if module == "__main__" else module, (frame.f_code.co_filename, frame.f_lineno)
