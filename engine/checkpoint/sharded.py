"""Sharded checkpoints: folders of torch.distributed.checkpoint (DCP), into which each rank writes its shards.

    model_0000999/
      __0_0.distcp, __1_0.distcp, ...    each rank's shards
      .metadata                          DCP's index of the shards
      state.pth                          all other state, as in a checkpoint of one file
      checksums.json                     of all these files, since DCP does not detect damage

A folder is written under a temporary name, flushed to disk and renamed. Tensors are identified by their place in the
state, so a folder can be read on any number of ranks.
"""

import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from ...config.errors import ConfigError, first_line
from ...config.files.atomic import displaced, replace_file, replace_text, sync_directory, temporary_path
from ...config.files.run_folder import claim
from .. import comm
from .distributed_files import read_metadata, read_tensors
from .files import STATE_FILE, disk_errors, verify_checkpoint, write_checkpoint
from .shards import SHARD, Keys, Like, is_mark, nested, walk
from .torch_files import load_torch_file

__all__ = [
    "checksums",
    "complete_folder",
    "fail_together",
    "is_sharded_folder",
    "read_folder",
    "verify_folder",
    "write_folder",
    "write_parts",
]

_CHECKSUMS = "checksums.json"
_BLOCK = 1 << 22


def is_sharded_folder(path: str) -> bool:
    """Return whether a path is a folder that :func:`write_folder` wrote."""
    return os.path.isfile(os.path.join(path, STATE_FILE)) and os.path.isfile(os.path.join(path, _CHECKSUMS))


# ---------------------------------------------------------------------------- writing


def write_folder(path: str, state: Any, shards: Mapping[Keys, "DTensor"], group: "dist.ProcessGroup") -> None:
    """Write a sharded checkpoint. All ranks call this together, and return when it is complete.

    Args:
        path: the folder; an existing one is replaced.
        state: on rank 0, everything but the sharded tensors. Ignored on other ranks.
        shards: the sharded tensors.
        group: a gloo group that nothing else uses at the same time.

    Raises:
        OSError: a rank could not write. An earlier folder of that name is unchanged.
    """
    main = dist.get_rank(group) == 0
    of_main = [temporary_path(path) if main else ""]
    dist.broadcast_object_list(of_main, src=dist.get_global_rank(group, 0), group=group)
    temporary = of_main[0]
    try:
        with fail_together(group):
            if main:
                claim(path)
                os.makedirs(temporary)
        with fail_together(group):
            sums = write_parts(temporary, state if main else None, shards, group)
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, sums, group=group)
        with fail_together(group):
            if main:
                complete_folder(temporary, path, every)
    finally:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)


def write_parts(
    folder: str, state: Any, shards: Mapping[Keys, "DTensor"], group: "dist.ProcessGroup"
) -> dict[str, int]:
    """Write this rank's files, and return their checksums by name."""
    rank = dist.get_rank(group)
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    writer.fs = _FileSystem()
    dcp.save(nested(shards), storage_writer=writer, process_group=group, no_dist=False)
    names = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_")]
    if rank == 0:
        names += [".metadata", STATE_FILE]
        replace_file(os.path.join(folder, STATE_FILE), lambda file: write_checkpoint(file, state))
    return checksums(folder, names)


class _FileSystem(FileSystem):
    """Raises the disk's error, which torch's archive writer replaces by one about a position in the file."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open(path, mode, buffering=0) as file, disk_errors(file) as writer:
            yield writer


def complete_folder(temporary: str, path: str, sums: list[dict[str, int]]) -> None:
    """Check that all files exist, write the checksums, and rename the folder."""
    for rank, names in enumerate(sums):
        for name in names:
            if not os.path.isfile(os.path.join(temporary, name)):
                folder = os.path.dirname(path)
                raise OSError(f"{name} of rank {rank} is missing: {folder} must be a folder that all machines share")
    together = {name: crc for names in sums for name, crc in names.items()}
    replace_text(os.path.join(temporary, _CHECKSUMS), json.dumps(together, indent=1))
    with displaced(path):
        os.rename(temporary, path)
        sync_directory(os.path.dirname(os.path.abspath(path)))


@contextmanager
def fail_together(group: "dist.ProcessGroup") -> Iterator[None]:
    """Raise an OSError on all ranks if the body fails on any. All ranks must reach the end of the body.

    Args:
        group: a gloo group.
    """
    error: BaseException | None = None
    try:
        yield
    except CheckpointException as failure:  # DCP raises it on all ranks, with the errors of those that failed
        error = failure.failures.get(dist.get_rank(group), (None,))[0] if failure.failures else failure
    except Exception as failure:
        error = failure
    errors: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, None if error is None else _summary(error), group=group)
    if isinstance(error, OSError):
        raise error
    for rank, found in enumerate(errors):
        if found is not None:
            number, text = found
            text = f"on rank {rank}: {text}"
            raise (OSError(number, text) if number else OSError(text)) from error


def _summary(error: BaseException) -> tuple[int | None, str]:
    """Return an error's errno, if it has one, and one line of text."""
    if isinstance(error, OSError) and error.errno:
        return error.errno, f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return None, f"{type(error).__name__}: {first_line(error)}"


# ---------------------------------------------------------------------------- reading


def verify_folder(path: str) -> None:
    """Check that every file of a sharded checkpoint is unchanged.

    Raises:
        ConfigError: one is damaged; the message names it.
    """
    verify_checkpoint(os.path.join(path, STATE_FILE))
    try:
        with open(os.path.join(path, _CHECKSUMS), encoding="utf-8") as file:
            sums = dict(json.load(file))
        for name in sums:
            if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
                raise ConfigError(f"{path} is damaged: there is no file {name!r}")
        for name, crc in checksums(path, sums).items():
            if crc != sums[name]:
                raise ConfigError(f"{path} is damaged: the checksum of {name} is wrong")
    except ConfigError:
        raise
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path} is damaged: its {_CHECKSUMS} cannot be read ({first_line(error)})") from error
    used = {info.relative_path for info in read_metadata(path).storage_data.values()}
    if unknown := {STATE_FILE, ".metadata", *used} - sums.keys():
        raise ConfigError(f"{path} is damaged: {_CHECKSUMS} has no checksum of {min(unknown)}")


def read_folder(path: str, like: Like | None = None, wanted: Callable[[Keys], bool] | None = None) -> Any:
    """Verify and read a sharded checkpoint. All ranks call this together; the main process verifies.

    Args:
        path: the folder.
        like: how tensors are sharded in this run; by default they are read whole, on the CPU.
        wanted: which sharded tensors to read, by their place; others become None. By default all.

    Returns:
        The state, as it was before :func:`split_shards`.

    Raises:
        ConfigError: it is damaged.
    """
    comm.on_main_process(lambda: verify_folder(path))
    state = load_torch_file(os.path.join(path, STATE_FILE))
    tensors = read_tensors(path, wanted or (lambda keys: True), like)

    def restored(keys: Keys, value: Any) -> Any:
        if not is_mark(value):
            return value
        if keys not in tensors and wanted is not None and not wanted(keys):
            return None
        if keys not in tensors or list(tensors[keys].shape) != value[SHARD]:
            raise ConfigError(f"{path} is damaged: its files do not hold {'.'.join(keys)} as {STATE_FILE} says")
        return tensors[keys]

    return walk(state, restored)


# ---------------------------------------------------------------------------- helpers


def checksums(folder: str, names: Iterable[str]) -> dict[str, int]:
    """Return the CRC32 of files, computed on several threads."""
    names = list(names)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _crc32(os.path.join(folder, name)), names), strict=True))


def _crc32(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
