"""A lock against two runs in one folder."""

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
    """A lock file that names its holder.

    Whether the holder still runs is decided from the content of the file and from the system's lock on it, which ends
    with the process (children do not inherit it). A holder on another host is assumed to run: it cannot be checked, and
    not every network file system supports locks.

    Args:
        path: the lock file. After a release it exists and is empty.
        what: what the lock protects, for messages.
    """

    def __init__(self, path: str, what: str) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1
        self._owner = 0  # a forked process has these attributes, but not the lock

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._owner == os.getpid()

    def acquire(self) -> None:
        """Acquire the lock, if this process does not hold it already.

        Raises:
            ConfigError: another process holds it.
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
        """Release the lock."""
        if not self.held:
            return
        try:
            os.ftruncate(self._descriptor, 0)
        finally:
            self._owner = 0
            os.close(self._descriptor)

    def _refusal(self, holder: dict[str, Any]) -> str:
        if not holder:
            return f"{self._what}: locked by another process; wait for it to end"
        who = f"process {holder['pid']} on {holder['host']}, since {_age(holder['time'])}"
        if holder["host"] == socket.gethostname():
            return f"{self._what}: in use by {who}; wait for it to end, or choose another OUTPUT_DIR"
        return (
            f"{self._what}: in use by {who}; it cannot be checked from here whether it still runs. "
            f"If it does not, delete {self._path}"
        )


def _lock(descriptor: int) -> bool | None:
    """Lock a file. False: another process holds the lock; None: the file system has no locks."""
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
    """Read the holder; empty if it released the lock, or was killed before writing."""
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
    """Whether a holder may still run although the system's lock was free (``locked``) or does not exist."""
    same_host = holder["host"] == socket.gethostname()
    if holder["boot"] and holder["boot"] == boot_id():
        if holder["machine"] == machine_id():  # its lock may be lost: closing any descriptor of the file releases it
            return is_running(holder["pid"], holder["started"])
        return not locked  # another container: the kernel shares the locks
    if same_host:  # rebooted since, or the system has no boot id
        return not holder["boot"] and not locked and is_running(holder["pid"], holder["started"])
    return True


def _age(since: int) -> str:
    seconds = max(0, int(time.time()) - since)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = seconds // length
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{seconds} seconds"
