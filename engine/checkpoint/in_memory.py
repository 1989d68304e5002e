"""Copies of a run's state in the memory of its machines, from which a resume writes a checkpoint.

    /dev/shm/hookline-0-5f3c9a17/      of one run
      1999-8d1e.../                    the state after one iteration
        state.pth, __0_0.distcp, ...   files of a checkpoint: of this machine's ranks, and of the machine before it
        index.json                     written last, on all machines: the run, the iteration, all files' checksums

A rank writes the files that it would write to the disk, and sends them to a rank of the next machine. So the state
survives all processes, and one machine of several. A copy is removed when the next one is complete on all machines.
"""

import contextlib
import json
import logging
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...config import ConfigError
from ...config.files.atomic import displaced, replace_file, replace_text, temporary_path
from ...config.files.run_folder import claim
from .. import comm
from .candidates import iteration_of, newest_first
from .checkpoint_file import write_checkpoint
from .saver import Saver
from .sharded import STATE_FILE, checksums, complete_folder, fail_together, write_parts
from .shards import local_parts, with_parts
from .staging import compact

__all__ = ["InMemory"]

logger = logging.getLogger(__name__)

FILE_NAME = "model_in_memory.pth"
"""The checkpoint that a resume writes from the copies."""

# In OUTPUT_DIR: identifies the run that copies are of. It moves away with the run.
_RUN_FILE = "in_memory_run"
_INDEX = "index.json"
_CHUNK = 1 << 30


class _Copy(NamedTuple):
    """What a machine has of a copy: folder, iteration, checksums of all files, and the files that are there."""

    folder: str
    iteration: int
    files: dict[str, int]
    here: list[str]


class InMemory:
    """Copies of the state that a checkpointer saves. All ranks must call the same methods in the same order.

    Args:
        checkpointer: of the run.
        folder: a folder in the memory of each machine. Environment variables in it (``$TMPDIR``) are replaced.

    Raises:
        ConfigError: the folder does not exist.
    """

    def __init__(self, checkpointer: Any, folder: str) -> None:
        parent = os.path.expandvars(os.path.expanduser(folder))
        if not os.path.isdir(parent):
            raise ConfigError(f"InMemoryCheckpointer.folder: {parent} is not a folder on rank {comm.get_rank()}")
        self._checkpointer = checkpointer
        self._run_file = os.path.join(checkpointer.save_dir, _RUN_FILE)
        number = zlib.crc32(os.path.abspath(checkpointer.save_dir).encode())
        self._folder = os.path.join(parent, f"hookline-{os.getuid()}-{number:08x}")
        self._saver = Saver(asynchronous=True, on_error="continue")
        several = comm.get_world_size() > 1 or checkpointer.needs_all_ranks
        # A separate group: the background thread uses it while training uses the others.
        self._group = comm.new_group(backend="gloo") if several else None
        self._start = comm.broadcast_object(uuid.uuid4().hex)
        self._next = _next_machine(comm.all_gather(comm.get_rank() - comm.get_local_rank()))
        self._run = ""

    # ------------------------------------------------------------------ writing

    def begin(self) -> None:
        """Begin a run. Copies of another one in the same folder are removed with the first save.

        Raises:
            ConfigError: another user has the folder.
        """
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        if not _is_own(self._folder):
            raise ConfigError(f"InMemoryCheckpointer.folder: {self._folder} belongs to another user")
        if self._main:
            if not os.path.exists(self._run_file):
                claim(self._run_file)
                replace_text(self._run_file, uuid.uuid4().hex)
            self._run = _read(self._run_file)
        self._run = comm.broadcast_object(self._run)

    def path(self, iteration: int) -> str:
        """Return this machine's folder of the copy after an iteration."""
        return os.path.join(self._folder, f"{iteration}-{self._start}")

    def save(self, iteration: int) -> None:
        """Take the state as it is now, and write and send it in the background.

        Args:
            iteration: the last finished one.
        """
        self._saver.wait()
        write_part = self._take(iteration)
        folder = self.path(iteration)

        def write() -> None:
            with self._together():
                os.makedirs(folder, mode=0o700, exist_ok=True)
                sums = write_part(folder)
            sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in sums}
            every = self._gather((sums, sizes))
            received = self._received([sizes for _, sizes in every])
            with self._together():
                for name, size, _ in received:
                    _allocate(os.path.join(folder, name), size)
            with self._together():
                self._exchange(folder, sizes, received)
            with self._together():
                if comm.get_local_rank() == 0:
                    together = {name: crc for sums, _ in every for name, crc in sums.items()}
                    index = {"run": self._run, "iteration": iteration, "files": together}
                    replace_text(os.path.join(folder, _INDEX), json.dumps(index))
            if comm.get_local_rank() == 0:
                for name in os.listdir(self._folder):
                    if name != os.path.basename(folder):
                        shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)
            logger.debug("The state after iteration %d is in memory", iteration)

        self._saver.write(folder, write)

    def _take(self, iteration: int) -> Callable[[str], dict[str, int]]:
        """Copy the state; return a function that writes this rank's files into a folder and returns checksums."""
        further, checkpointer, saver, group = {"iteration": iteration}, self._checkpointer, self._saver, self._group
        if checkpointer.needs_all_ranks:
            assert group is not None
            rest, shards = checkpointer.split(further)
            rest, parts = saver.keep([rest, list(local_parts(shards).values())])
            shards = with_parts(shards, dict(zip(shards, parts, strict=True)))
            return lambda folder: write_parts(folder, rest, shards, group)
        if not self._main:
            return lambda folder: {}
        state = saver.keep(compact(checkpointer.state(further)))

        def write(folder: str) -> dict[str, int]:
            replace_file(os.path.join(folder, STATE_FILE), lambda file: write_checkpoint(file, state))
            return checksums(folder, [STATE_FILE])

        return write

    def _received(self, sizes: list[dict[str, int]]) -> list[tuple[str, int, int]]:
        """Return name, size and source of each file that is sent to this rank."""
        sources = [source for source, target in self._next.items() if target == comm.get_rank()]
        return [(name, size, source) for source in sources for name, size in sizes[source].items()]

    def _exchange(self, folder: str, sizes: dict[str, int], received: list[tuple[str, int, int]]) -> None:
        """Send this rank's files to a rank of the next machine, and receive others into files that exist."""
        target, sent = self._next.get(comm.get_rank()), []
        for name, size in sizes.items() if target is not None else ():
            for part in _mapped(os.path.join(folder, name), size):
                work = dist.isend(part, target, group=self._group)
                assert work is not None  # this rank is in the group
                sent.append((work, part))
        for name, size, source in received:
            for part in _mapped(os.path.join(folder, name), size):
                dist.recv(part, source, group=self._group)
        for work, _ in sent:
            work.wait()

    def poll(self) -> None:
        """Report a failed save: an error of the disk is logged."""
        self._saver.poll()

    def close(self, remove: bool) -> None:
        """Wait for the last save. ``remove``: the copies are not needed any more; else the run has failed."""
        try:
            self._saver.close()
        except Exception as error:
            if remove:
                raise
            logger.debug("The last copy in memory is not complete: %s", error)
        if remove and comm.get_local_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ restoring

    def restore(self) -> None:
        """If the newest complete copy is newer than all checkpoints on the disk, write it there as a checkpoint.

        All ranks call it before they resume. If it fails, a warning is logged.
        """
        every: list[list[_Copy]] = comm.all_gather(self._copies() if comm.get_local_rank() == 0 else [])
        newest = comm.broadcast_object(self._newest_saved() if self._main else None)
        complete: dict[str, _Copy] = {}
        copies = [one for copies in every for one in copies]
        for one in copies:
            there = {name for other in copies if other.folder == one.folder for name in other.here}
            if there >= one.files.keys() and one.iteration > newest:
                complete[one.folder] = one
        if not complete:
            return
        chosen = max(complete.values(), key=lambda one: one.iteration)
        path = os.path.join(self._checkpointer.save_dir, FILE_NAME)
        try:
            self._write_checkpoint(path, chosen, every)
        except OSError as error:
            logger.warning("The state after iteration %d in memory cannot be restored: %s", chosen.iteration, error)
            return
        logger.info("Restored the state after iteration %d from memory, as %s", chosen.iteration, path)

    def _copies(self) -> list[_Copy]:
        """Return the copies of this run on this machine. Damaged files are left out."""
        run, found = _read(self._run_file), []
        for name in os.listdir(self._folder) if run and _is_own(self._folder) else ():
            folder = os.path.join(self._folder, name)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # incomplete or damaged
                index = json.loads(_read(os.path.join(folder, _INDEX)))
                files = dict(index["files"])
                there = [one for one in files if os.path.isfile(os.path.join(folder, one))]
                sums = checksums(folder, there)
                here = [one for one in there if sums[one] == files[one]]
                if index["run"] == run:
                    found.append(_Copy(name, index["iteration"], files, here))
        return found

    def _newest_saved(self) -> int:
        """Return the iteration of the newest checkpoint on the disk."""
        with contextlib.suppress(OSError):
            paths = newest_first(self._checkpointer.get_all_checkpoint_files())
            return max(map(iteration_of, paths), default=-1)
        return -1

    def _write_checkpoint(self, path: str, chosen: _Copy, every: list[list[_Copy]]) -> None:
        """Have the machines write the files that they have, each once."""
        temporary = comm.broadcast_object(temporary_path(path))
        rank = comm.get_rank()
        holder = {
            name: number
            for number, copies in enumerate(every)
            for one in copies
            if one.folder == chosen.folder
            for name in one.here
        }
        mine = [name for name in chosen.files if holder[name] == rank]
        with self._together():
            if self._main:
                claim(path)
                os.makedirs(temporary)
        try:
            with self._together():
                for name in mine:
                    _copy(os.path.join(self._folder, chosen.folder, name), os.path.join(temporary, name))
            with self._together():
                if self._main and self._checkpointer.needs_all_ranks:
                    complete_folder(temporary, path, [chosen.files])
                elif self._main:
                    with displaced(path):
                        os.rename(os.path.join(temporary, STATE_FILE), path)
                if self._main:
                    self._checkpointer.tag_last_checkpoint(FILE_NAME)
        finally:
            if self._main:
                shutil.rmtree(temporary, ignore_errors=True)

    # ------------------------------------------------------------------ helpers

    @property
    def _main(self) -> bool:
        return comm.is_main_process()

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return fail_together(self._group) if self._group is not None else contextlib.nullcontext()

    def _gather(self, value: Any) -> list[Any]:
        return comm.all_gather(value, group=self._group)


def _next_machine(first_ranks: list[int]) -> dict[int, int]:
    """Return for each rank the rank of the next machine to which it sends; empty if there is one machine.

    Args:
        first_ranks: of each rank, the first rank of its machine.
    """
    machines = [[rank for rank, own in enumerate(first_ranks) if own == first] for first in sorted(set(first_ranks))]
    if len(machines) == 1:
        return {}
    following = zip(machines, [*machines[1:], machines[0]], strict=True)
    return {rank: there[place % len(there)] for here, there in following for place, rank in enumerate(here)}


def _is_own(folder: str) -> bool:
    """Return whether a folder exists and is this user's."""
    with contextlib.suppress(OSError):
        status = os.lstat(folder)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _allocate(path: str, size: int) -> None:
    """Create a file. Writing to a mapped file without space would kill the process."""
    with open(path, "wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)


def _mapped(path: str, size: int) -> Iterator[torch.Tensor]:
    """Yield the content of a file as tensors of at most 1 GiB that share its memory."""
    if size:
        content = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        yield from content.split(_CHUNK)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        replace_file(target, lambda out: shutil.copyfileobj(file, out))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
