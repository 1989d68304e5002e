"""The folder of a run: the names of its files, its lock, and how a new run moves an earlier one away."""

import logging
import os
import re
import socket
from contextlib import suppress

from .atomic import check_no_link, check_regular, mend, sync_directory
from .errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

RECORDS = ".hookline"
"""The folder in OUTPUT_DIR for the lock, and for the files of an earlier run while they are moved."""

# Checkpoints with a ``file_prefix`` of the user are the user's.
_RUN_FILE = re.compile(
    r"(rolling_\d{7,}|model_(\d{7,}|final|exception|best(_\d{7,}(_\w+)?)?))\.pth"
    r"|config\.yaml(\.old\d*)?|log\.txt(\.rank\d+)?|metrics\.(json|csv)(\.old\d*)?|last_checkpoint|curves\.(png|html)"
    r"|events\.out\.tfevents\.\d{10}\..+|(wandb|mlflow|\w+Writer)_run\.json"
    r"|inference|samples|wandb|(profiler-tensorboard|(profiler|autograd)-trace)-iter\d+(-rank\d+)?(\.json)?"
    r"|replay_\d+|memory_iter\d+(_rank\d+)?\.pickle"
)


def is_run_file(name: str) -> bool:
    """Whether a name in OUTPUT_DIR is that of a run's file or folder. Every other name is the user's."""
    return _RUN_FILE.fullmatch(name) is not None


def has_run(path: str) -> bool:
    """Whether a folder has a run: a checkpoint to resume from, or rows of metrics."""
    if os.path.isfile(os.path.join(path, "last_checkpoint")):
        return True
    metrics = os.path.join(path, "metrics.json")
    if os.path.isfile(metrics):
        with suppress(OSError), open(metrics, encoding="utf-8", errors="replace") as file:
            return re.match(r'\{.*"iteration": ', file.readline(10_000)) is not None
    return False


def check_writable(path: str) -> None:
    """Raise a ConfigError if a folder, or the folder that it would be created in, is not writable."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"OUTPUT_DIR: cannot create {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_DIR: {there} is not writable; change its permissions or choose another OUTPUT_DIR")


def move_run(path: str) -> str:
    """Move the files of an earlier run to ``previous_001`` (002, ...): into ``moving``, which is then renamed.

    A folder without a run keeps its log, which is continued.

    Args:
        path: the folder, which is locked.

    Returns:
        The new folder; empty if there was nothing to move.
    """
    names = [name for name in os.listdir(path) if is_run_file(name)]
    if not has_run(path):
        names = [name for name in names if not name.startswith("log.txt")]
    if not names:
        return ""
    number, moving = 1, os.path.join(path, RECORDS, "moving")
    while os.path.lexists(target := os.path.join(path, f"previous_{number:03d}")):
        number += 1
    try:
        os.makedirs(moving, exist_ok=True)
        for name in names:
            os.rename(os.path.join(path, name), os.path.join(moving, name))
        sync_directory(moving)
        os.rename(moving, target)
    except BaseException:
        recover(path)
        raise
    sync_directory(path)
    return target


def recover(path: str) -> None:
    """Undo what a killed process has left: a move of an earlier run, a replacement of a checkpoint, temporary files.

    Args:
        path: the folder. No other process may write there: see :func:`recover_if_idle`.

    Raises:
        ConfigError: a file cannot be moved back, since another one has its name.
    """
    mend(path)
    mend(os.path.join(path, RECORDS))
    moving = os.path.join(path, RECORDS, "moving")
    for name in os.listdir(moving) if os.path.isdir(moving) else ():
        new = os.path.join(path, name)
        if os.path.lexists(new):
            raise ConfigError(
                f"OUTPUT_DIR: a start was killed while it moved {new} to {moving}; it cannot be moved back, since "
                f"{new} exists now; move it away"
            )
        if is_run_file(name):
            os.rename(os.path.join(moving, name), new)
    with suppress(OSError):  # there is none, or it has files of somebody else
        os.rmdir(moving)


def recover_if_idle(path: str) -> None:
    """Call :func:`recover` while no run of another process has locked the folder.

    Raises:
        ConfigError: a run trains there.
    """
    if not os.path.lexists(os.path.join(path, RECORDS)):  # no run has been there
        return
    if path in _held:
        return recover(path)
    lock = FolderLock(path)
    lock.acquire()
    try:
        recover(path)
    finally:
        lock.release()


class FolderLock:
    """The system's lock (``flock``) on a run's folder, which ends with the process. Forked processes do not keep it.

    Args:
        path: the folder.
    """

    def __init__(self, path: str) -> None:
        self._folder = path
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        return self._descriptor >= 0

    def acquire(self) -> None:
        """Lock the folder for this process. Another lock of this process, whose run has not ended it, is released.

        Raises:
            ConfigError: another process holds the lock; or somebody else has put a link or a folder in its place.
            OSError: the file cannot be opened or written.
        """
        if self.is_held:
            return
        if other := _held.get(self._folder):
            other.release()
        records = os.path.join(self._folder, RECORDS)
        path = os.path.join(records, "lock")
        check_no_link(records)
        check_no_link(os.path.join(records, "moving"))
        check_regular(path)
        os.makedirs(records, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"OUTPUT_DIR: {self._folder} is in use by {holder}; wait for it to end, or choose another OUTPUT_DIR"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second run in its folder", path, error.strerror)
        self._descriptor = descriptor
        _held[self._folder] = self
        with suppress(OSError):  # only for messages
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self, forked: bool = False) -> None:
        """Release the lock, if this process has it. In a forked process, the parent keeps it."""
        if self.is_held:
            with suppress(OSError):
                if not forked:
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1
            del _held[self._folder]


_held: dict[str, FolderLock] = {}
"""The locks of this process, by folder."""


def _forget_locks() -> None:
    for lock in list(_held.values()):
        lock.release(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
