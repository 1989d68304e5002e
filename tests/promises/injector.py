"""Makes one file operation of this process fail, or kills the process at it.

Every operation that changes a folder's content is counted: creating or truncating a file, each write that reaches the
system, fsync, renaming, linking, removing, creating and removing folders. An operation is named by its kind, its file
and a count: ``("write", "run/metrics.json", 3)``. Names do not depend on process numbers or times, so each run of a
program has the same ones.
"""

import builtins
import errno
import io
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Operation = tuple[str, str, int]
"""An operation: its kind, its file, and its count among operations of that kind on that file."""

# Operations that work on a full disk.
_NEED_NO_SPACE = ("remove", "rmdir", "sync")
# Parts of names that differ between runs.
_VARIABLE = [
    (re.compile(r"\.hookline-(tmp|old)-[0-9a-f]+-[0-9a-f]+-"), r".\1-"),
    (re.compile(r"(events\.out\.tfevents)\.[^/]*"), r"\1"),
]


@dataclass(frozen=True)
class Plan:
    """The faults of a process.

    Attributes:
        root: the folder whose operations count.
        record: a file that gets the name of each operation; empty: they are not recorded.
        operation: where the fault is; None: there is none.
        fault: "kill before" or "kill after" the operation; "torn": half of a write, then a kill; "EIO": an input/output
            error, once; "ENOSPC": the disk is full from this operation on.
        clock: seconds by which the process's clock is ahead, so that runs started within a second have different times.
    """

    root: str
    record: str = ""
    operation: Operation | None = None
    fault: str = ""
    clock: float = 0.0


class Injector:
    """Replaces the functions with which Python changes files."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._root = os.path.realpath(plan.root) + os.sep
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._full = False
        self._record = os.open(plan.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if plan.record else -1

    def operation(self, kind: str, path: str, act: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        """Do an operation with ``act``, or the fault that the plan has for it; ``torn`` does half of a write."""
        if not path.startswith(self._root):
            return act()
        name = path.removeprefix(self._root)
        for pattern, replacement in _VARIABLE:
            name = pattern.sub(replacement, name)
        with self._lock:
            self._counts[kind, name] += 1
            operation = kind, name, self._counts[kind, name]
            if self._record >= 0:
                _write(self._record, json.dumps(operation).encode() + b"\n")
        if operation != self._plan.operation:
            if self._full and kind not in _NEED_NO_SPACE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return act()
        fault = self._plan.fault
        if fault == "kill before":
            _die()
        if fault == "torn":
            (torn or act)()
            _die()
        if fault == "kill after":
            act()
            _die()
        self._full = fault == "ENOSPC"
        if self._full and torn is not None:
            return torn()  # writes what fits; the next write fails
        number = errno.ENOSPC if self._full else errno.EIO
        raise OSError(number, os.strerror(number), path)

    def install(self) -> None:
        """Install the replacements."""
        self._replace_open()
        for name, kind in {"remove": "remove", "unlink": "remove", "rmdir": "rmdir", "mkdir": "mkdir"}.items():
            self._replace(name, lambda path, *_, dir_fd=None, **__: _resolved(path, dir_fd), kind)
        for name in ("rename", "replace"):
            self._replace(name, lambda source, target, **_: _resolved(target), "rename")
        for name in ("link", "symlink"):
            self._replace(name, lambda source, target, *_, **__: _resolved(target), "link")
        # A kill loses nothing that the system has. fsync would take most of the time.
        os.fsync = os.fdatasync = lambda file: self.operation("sync", _named(file), lambda: None)
        for name in ("truncate", "ftruncate"):
            self._replace(name, lambda file, size: _named(file), "truncate")
        self._replace("sendfile", lambda out, *_, **__: _named(out), "write")
        self._replace_os_open()
        self._replace_os_write()
        ahead, now, sleep = self._plan.clock, time.time, time.sleep
        time.time = lambda: now() + ahead
        time.sleep = lambda seconds: sleep(min(seconds, 0.01))

    def _replace(self, name: str, path_of: Callable[..., str], kind: str) -> None:
        function = getattr(os, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self.operation(kind, path_of(*args, **kwargs), lambda: function(*args, **kwargs))

        setattr(os, name, replacement)

    def _replace_os_open(self) -> None:
        function = os.open

        def replacement(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            def act() -> int:
                return function(path, flags, mode, dir_fd=dir_fd)

            name = _resolved(path, dir_fd)
            creates = flags & os.O_TRUNC or (flags & os.O_CREAT and not os.path.exists(name))
            return self.operation("open", name, act) if creates else act()

        os.open = replacement

    def _replace_os_write(self) -> None:
        def replacement(file: int, content: Any) -> int:
            half = memoryview(content)[: len(content) // 2]
            torn = (lambda: _write(file, half)) if len(content) > 1 else None
            return self.operation("write", _named(file), lambda: _write(file, content), torn)

        os.write = replacement

    def _replace_open(self) -> None:
        function, injector = io.open, self

        class File(io.FileIO):
            """A file whose writes count as operations."""

            def write(self, content: Any) -> int:
                half = memoryview(content).cast("B")[: len(content) // 2]
                torn = (lambda: super(File, self).write(half)) if len(content) > 1 else None
                return injector.operation(
                    "write", _named(self.fileno()), lambda: super(File, self).write(content), torn
                )

            def truncate(self, size: int | None = None) -> int:
                return injector.operation("truncate", _named(self.fileno()), lambda: super(File, self).truncate(size))

        def replacement(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            path = _named(file)
            if not set(mode) & set("wax+") or not path.startswith(injector._root):
                return function(file, mode, buffering, encoding, errors, newline, closefd, opener)

            def act() -> File:
                return File(file, mode.replace("b", "").replace("t", ""), closefd, opener)

            # A file that an opener creates was counted when that called os.open().
            creates = opener is None and not isinstance(file, int) and ("w" in mode or not os.path.exists(path))
            raw = injector.operation("open", path, act) if creates else act()
            if buffering == 0:
                return raw
            buffered: Any = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            if "b" in mode:
                return buffered
            text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
            text.mode = mode
            return text

        builtins.open = io.open = replacement


_write = os.write


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the process may end a moment later


def _resolved(path: Any, folder: int | None = None) -> str:
    """Return the path of a name relative to an open folder or the current one."""
    name = os.fsdecode(path)
    if folder is not None:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    parent, base = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(parent), base)


def _named(file: Any) -> str:
    """Return the path of an open file or a name."""
    if isinstance(file, int):
        try:
            return os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            return ""
    return _resolved(file)


def recorded(path: Path) -> list[Operation]:
    """Return the operations in a plan's ``record`` file, in order."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]
