"""A lock that keeps a second run out of a folder."""

import errno
import json
import os
import socket
import stat
import time
from typing import Any

from ..errors import ConfigError
from .processes import boot_id, is_running, machine_id, start_time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock"]


class FolderLock:
    """A file that one process holds, and that says which one.

    Two things decide whether a holder still runs: what the file says of it, and the system's lock on the file, which
    ends with the process that has it (its children do not inherit it). A holder on another host is believed: it cannot
    be seen from here, and not every network file system passes locks on.

    Args:
        path: of the file. It stays when the lock is released, and is empty then.
        what: what the lock is for, in messages.
    """

    def __init__(self, path: str, what: str) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1
        self._owner = 0  # a process forked from the owner has the attributes, but not the lock

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._owner == os.getpid()

    def acquire(self) -> None:
        """Take the lock; one that is held already is kept.

        Raises:
            ConfigError: another process has it.
            OSError: the file cannot be opened or written.
        """
        if self.held:
            return
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(self._path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{self._path} is not a plain file; remove it")
            locked = _lock(descriptor)
            holder = _read(descriptor)
            if locked is False or (holder and _may_run(holder, bool(locked))):
                raise ConfigError(self._refusal(holder))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _this_process(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._owner = descriptor, os.getpid()

    def release(self) -> None:
        """Let others have the lock."""
        if not self.held:
            return
        try:
            os.ftruncate(self._descriptor, 0)
        finally:
            self._owner = 0
            os.close(self._descriptor)

    def _refusal(self, holder: dict[str, Any]) -> str:
        if not holder:
            return f"{self._what}: another process has it locked; wait for it to end"
        who = f"process {holder['pid']} on {holder['host']}, since {_age(holder['time'])}"
        if holder["host"] == socket.gethostname():
            return f"{self._what}: in use by {who}; wait for it to end, or choose another OUTPUT_DIR"
        return (
            f"{self._what}: in use by {who}; whether it still runs cannot be seen from here. "
            f"If it does not, delete {self._path}"
        )


def _lock(descriptor: int) -> bool | None:
    """Lock a file. False: another process has it locked; None: this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _this_process() -> bytes:
    pid = os.getpid()
    return json.dumps(
        {
            "host": socket.gethostname(),
            "boot": boot_id(),
            "machine": machine_id(),
            "pid": pid,
            "started": start_time(pid),
            "time": int(time.time()),
        }
    ).encode()


def _read(descriptor: int) -> dict[str, Any]:
    """What the last holder wrote; empty if it released the lock, or was killed before it had written."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return {
            "host": str(holder["host"]),
            "boot": str(holder["boot"]),
            "machine": str(holder["machine"]),
            "pid": int(holder["pid"]),
            "started": int(holder["started"]),
            "time": int(holder["time"]),
        }
    except (ValueError, KeyError, TypeError):
        return {}


def _may_run(holder: dict[str, Any], locked: bool) -> bool:
    """Whether a holder may still run, although the system's lock (if there are any here: ``locked``) was free."""
    same_host = holder["host"] == socket.gethostname()
    if holder["boot"] and holder["boot"] == boot_id():
        if holder["machine"] == machine_id():  # its lock may be lost: closing any descriptor of the file drops it
            return is_running(holder["pid"], holder["started"])
        return not locked  # in another container: one kernel keeps the locks of all
    if same_host:  # it has been booted since, or its system has no boot id
        return not holder["boot"] and not locked and is_running(holder["pid"], holder["started"])
    return True


def _age(since: int) -> str:
    seconds = max(0, int(time.time()) - since)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = seconds // length
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{seconds} seconds"
