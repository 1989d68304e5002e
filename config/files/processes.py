"""Identify processes across restarts and containers."""

import functools
import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["boot_id", "is_running", "machine_id", "start_time"]


@functools.cache
def boot_id() -> str:
    """The boot id of the kernel; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@functools.cache
def machine_id() -> str:
    """Eight hex digits for host, boot and process namespace: within them a pid is one process."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {boot_id()} {namespace}".encode()).hexdigest()[:8]


def start_time(pid: int) -> int:
    """Start time of a process of this machine, in kernel ticks; 0 if it does not run or is unknown."""
    try:
        # The second field is the program's name in parentheses, which may contain anything.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_running(pid: int, started: int) -> bool:
    """Whether the process of this machine with this pid and start time still runs."""
    if os.path.isdir("/proc/self"):
        return pid == os.getpid() or (start_time(pid) == started and _state(pid) not in ("Z", "X", ""))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
