"""Sharded checkpoints: folders of torch.distributed.checkpoint (DCP), into which each rank writes its shards.

    model_0000999/
      __0_0.distcp, __1_0.distcp, ...    each rank's shards
      .metadata                          DCP's index of the shards
      state.pth                          all other state, as in a checkpoint of one file
      checksums.json                     of all these files, since DCP does not detect corruption

A folder is written under a temporary name, flushed to disk and renamed. Tensors are identified by their place in the
state, so a folder can be read on any number of ranks.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor
from torch.utils._pytree import MappingKey, tree_map_with_path

from ...config.atomic import displaced, replace_file, replace_text, sync_directory, temporary_path
from ...config.errors import ConfigError, first_line
from .. import comm
from .dcp_reader import Keys, Like, nested, read_metadata, read_tensors
from .files import STATE_FILE, disk_errors, load_torch_file, verify_checkpoint, write_checkpoint

_CHECKSUMS = "checksums.json"
# Stands for a sharded tensor in the rest of the state.
_MARK = "__sharded_tensor__"
_BLOCK = 1 << 22


def is_sharded_folder(path: str) -> bool:
    """Return whether a path is a folder that :func:`write_folder` wrote."""
    return os.path.isfile(os.path.join(path, STATE_FILE)) and os.path.isfile(os.path.join(path, _CHECKSUMS))


def split_shards(state: object) -> tuple[Any, dict[Keys, "DTensor"]]:
    """Separate the sharded tensors of a state from the rest.

    Args:
        state: plain data and tensors, in nested dicts, lists and tuples.

    Returns:
        The state with marks in place of the sharded tensors, and the tensors by their place.
    """
    shards: dict[Keys, DTensor] = {}

    def visit(keys: Keys, value: object) -> object:
        if isinstance(value, DTensor):
            shards[keys] = cast(DTensor, value.detach())
            return {_MARK: list(value.shape)}
        return value

    return walk(state, visit), shards


def _is_mark(value: object) -> bool:
    """Return whether a value stands for a sharded tensor."""
    return isinstance(value, dict) and value.keys() == {_MARK}


def walk(state: object, visit: Callable[[Keys, Any], object]) -> Any:
    """Copy nested dicts, lists and tuples, with ``visit(place, value)`` in place of each value."""

    def visit_path(path: tuple[Any, ...], value: object) -> object:
        return visit(tuple(str(key.key if isinstance(key, MappingKey) else key.idx) for key in path), value)

    def is_leaf(value: object) -> bool:
        return _is_mark(value) or (isinstance(value, tuple) and type(value) is not tuple)  # a namedtuple stays one

    return tree_map_with_path(visit_path, state, is_leaf=is_leaf)


# ---------------------------------------------------------------------------- writing


def write_folder(path: str, state: object, shards: Mapping[Keys, "DTensor"], group: "dist.ProcessGroup") -> None:
    """Write a sharded checkpoint. All ranks call this together, and return when it is complete.

    Args:
        path: the folder; an existing one is replaced.
        state: on rank 0, everything but the sharded tensors. Ignored on other ranks.
        shards: the sharded tensors.
        group: a gloo group that nothing else uses at the same time.

    Raises:
        OSError: a rank could not write. An earlier folder of that name is unchanged.
    """
    main = comm.is_main_process()
    temporary = comm.broadcast_object(temporary_path(path), group=group)
    try:
        with fail_together(group):
            if main:
                os.makedirs(temporary)
        with fail_together(group):
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            writer.fs = _FileSystem()
            dcp.save(nested(shards), storage_writer=writer, process_group=group)
            names = [name for name in os.listdir(temporary) if name.startswith(f"__{comm.get_rank()}_")]
            if main:
                names += [".metadata", STATE_FILE]
                replace_file(os.path.join(temporary, STATE_FILE), lambda file: write_checkpoint(file, state))
            sums = checksums(temporary, names)
        together = {name: crc for one in comm.all_gather(sums, group) for name, crc in one.items()}
        with fail_together(group):
            if main:
                if missing := together.keys() - set(os.listdir(temporary)):
                    folder = os.path.dirname(path)
                    raise OSError(f"{min(missing)} is missing: {folder} must be a folder that all machines share")
                replace_text(os.path.join(temporary, _CHECKSUMS), json.dumps(together, indent=1))
                with displaced(path):
                    os.rename(temporary, path)
                    sync_directory(os.path.dirname(os.path.abspath(path)))
    finally:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)


class _FileSystem(FileSystem):
    """Raises the disk's error, which torch's archive writer replaces by one about a position in the file."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with disk_errors(os.fspath(path)), open(path, mode) as file:
            yield file


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
    mine = error if isinstance(error, OSError) else None
    if error is not None and mine is None:
        mine = OSError(f"{type(error).__name__}: {first_line(error)}")
    every = comm.all_gather(mine, group)
    if isinstance(error, OSError):
        raise error
    for rank, one in enumerate(every):
        if one is not None:
            text = f"{one.strerror}: {one.filename}" if one.errno else one
            raise OSError(one.errno, f"on rank {rank}: {text}") from error


# ---------------------------------------------------------------------------- reading


def verify_folder(path: str) -> None:
    """Check that every file of a sharded checkpoint is unchanged. All ranks call it, and each reads some of the files.

    Args:
        path: the folder.

    Raises:
        ConfigError: one is corrupt; the message names it.
    """
    mine = None
    try:
        _verify(path, comm.get_rank(), comm.get_world_size())
    except ConfigError as error:
        mine = error
    for problem in filter(None, comm.all_gather(mine)):
        raise problem


def _verify(path: str, rank: int, ranks: int) -> None:
    """Check this rank's part of the files: every ``ranks``-th one, and on rank 0 what they are."""
    if rank == 0:
        verify_checkpoint(os.path.join(path, STATE_FILE))
    try:
        with open(os.path.join(path, _CHECKSUMS), encoding="utf-8") as file:
            sums = dict(json.load(file))
        for name in sums:
            if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
                raise ValueError(f"there is no file {name!r}")
        mine = sorted(sums)[rank::ranks]
        wrong = [name for name, crc in checksums(path, mine).items() if crc != sums[name]]
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{path} is corrupt: {first_line(error)}, in {_CHECKSUMS}") from error
    used = {info.relative_path for info in read_metadata(path).storage_data.values()} if not wrong else set()
    for name in [*wrong, *({STATE_FILE, ".metadata", *used} - sums.keys())]:
        raise ConfigError(f"{path} is corrupt: the checksum of {name} is wrong")


def read_folder(
    path: str, like: Like | None = None, wanted: Callable[[Keys], bool] | None = None, verified: bool = False
) -> Any:
    """Verify and read a sharded checkpoint. All ranks call this together.

    Args:
        path: the folder.
        like: how tensors are sharded in this run; by default they are read whole, on the CPU.
        wanted: which sharded tensors to read, by their place; others become None. By default all.
        verified: whether :func:`verify_folder` was called already.

    Returns:
        The state, as it was before :func:`split_shards`.

    Raises:
        ConfigError: it is corrupt.
    """
    if not verified:
        verify_folder(path)
    state = load_torch_file(os.path.join(path, STATE_FILE))
    tensors = read_tensors(path, wanted or (lambda keys: True), like)

    def restored(keys: Keys, value: Any) -> object:
        if not _is_mark(value):
            return value
        if keys not in tensors and wanted is not None and not wanted(keys):
            return None
        if keys not in tensors or list(tensors[keys].shape) != value[_MARK]:
            raise ConfigError(f"{path} is corrupt: its files do not hold {'.'.join(keys)} as {STATE_FILE} says")
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
