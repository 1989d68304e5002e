"""Names of ``detectron2.utils``: of its modules collect_env, env, file_io, logger, memory and serialize."""

import functools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch
from iopath.common.file_io import PathHandler as PathHandler
from iopath.common.file_io import g_pathmgr
from torch.utils.collect_env import get_pretty_env_info

import hookline

from .logger import setup_logger as _setup_logger
from .seeds import seed_all_rng as seed_all_rng

__all__ = [  # of "from detectron2.utils.logger import *"
    "TORCH_VERSION",
    "PathHandler",
    "PathManager",
    "PicklableWrapper",
    "collect_env_info",
    "create_small_table",
    "fixup_module_metadata",
    "log_every_n",
    "log_every_n_seconds",
    "log_first_n",
    "retry_if_cuda_oom",
    "seed_all_rng",
    "setup_logger",
]

#: torch's version as two ints, to compare with: ``TORCH_VERSION >= (2, 6)``.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

#: The path manager that opens configs. Checkpointers that are created later use the handlers registered here too.
PathManager = g_pathmgr

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


def collect_env_info() -> str:
    """Return a text about the environment: versions, devices, how torch was built."""
    return f"hookline: {hookline.__version__}\n{get_pretty_env_info()}\n{torch.__config__.show()}"


def retry_if_cuda_oom(func: _F) -> _F:
    """Make a function that is called again if a GPU is out of memory: after emptying the cache, then on the CPU.

    Args:
        func: a function without side effects. For the last call, its tensor arguments are copied to the CPU; then it
            returns tensors on the CPU.
    """

    @functools.wraps(func)
    def wrapped(*args: object, **kwargs: object) -> object:
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            logger.warning("%s: the GPU is out of memory; it runs on the CPU", getattr(func, "__name__", func))
        return func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})

    return wrapped  # type: ignore[return-value]


class PicklableWrapper:
    """A function or other object that can be sent to another process though pickle cannot, such as a lambda.

    It is called as the object, and has its attributes. Needs the package cloudpickle when it is pickled.
    """

    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __reduce__(self) -> tuple[object, ...]:
        import cloudpickle

        return cloudpickle.loads, (cloudpickle.dumps(self._obj),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_obj"], name)


def fixup_module_metadata(module_name: str, namespace: dict[str, object], keys: Iterable[str] | None = None) -> None:
    """Have the classes and functions of a package's submodules name the package as their module.

    Args:
        module_name: the package.
        namespace: its ``globals()``.
        keys: the names that are its own. Default: those without an underscore in front.
    """
    for name in [name for name in namespace if name[0] != "_"] if keys is None else keys:
        target = namespace[name]
        if isinstance(target, type | FunctionType) and f"{target.__module__}.".startswith(f"{module_name}."):
            target.__module__ = module_name


def _log_api_usage(identifier: str) -> None:
    """Tell torch's usage log, which is off by default, that a part of the library is used."""
    torch._C._log_api_usage_once(f"hookline.{identifier}")


def _to_cpu(value: Any) -> Any:
    return value.to("cpu") if getattr(getattr(value, "device", None), "type", "") == "cuda" else value


_calls: Counter[tuple[object, ...]] = Counter()
_times: dict[tuple[object, ...], float] = {}


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
    same = (*(line if "caller" in keys else ()), *((msg,) if "message" in keys else ()))
    _calls[same] += 1
    if _calls[same] <= n:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log the first of every ``n`` calls from the same line of code, to ``name`` or the caller's module."""
    module, line = _caller()
    _calls[line] += 1
    if (_calls[line] - 1) % n == 0:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
    """Log unless the same line of code logged less than ``n`` seconds ago, to ``name`` or the caller's module."""
    module, line = _caller()
    now = time.monotonic()
    if now - _times.get(line, -math.inf) >= n:
        _times[line] = now
        logging.getLogger(name or module).log(lvl, msg)


def create_small_table(small_dict: Mapping[str, object]) -> str:
    """Return a Markdown table of one row, with the keys as its header. Floats have three decimals."""
    values = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in small_dict.values()]
    widths = [max(len(str(key)), len(value), 3) for key, value in zip(small_dict, values, strict=True)]
    header = "|".join(f" {key!s:^{width}} " for key, width in zip(small_dict, widths, strict=True))
    line = "|".join(f":{'-' * width}:" for width in widths)
    row = "|".join(f" {value:^{width}} " for value, width in zip(values, widths, strict=True))
    return f"|{header}|\n|{line}|\n|{row}|"


def _caller() -> tuple[str, tuple[object, ...]]:
    """Return the module that called a function here, and the line of its code."""
    frame = sys._getframe(2)
    module = frame.f_globals["__name__"]
    # A script's messages go to a logger that is set up.
    return "hookline" if module == "__main__" else module, (frame.f_code.co_filename, frame.f_lineno)
