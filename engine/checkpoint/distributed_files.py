"""Reads the tensors in a folder of torch.distributed.checkpoint (DCP), without running code in it.

DCP keeps its metadata in a pickle and unpickles it without restriction. Here the pickle is read once, by an unpickler
that knows only torch's records, and DCP's reader is given the checked result. DCP itself unpickles nothing: tensors are
read with ``weights_only=True``, and other entries are never read.
"""

import collections
import math
import os
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException  # not an Exception
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...config.errors import ConfigError, first_line

if TYPE_CHECKING:
    from .shards import Like

__all__ = ["read_metadata", "read_tensors"]


def read_metadata(path: str) -> Metadata:
    """Read which tensors a folder holds, and where in its files they are.

    Args:
        path: the folder.

    Returns:
        Torch's record. It names only files in the folder that hold as many bytes.

    Raises:
        ConfigError: the metadata is damaged, or holds anything but such a record.
    """
    try:
        file_name = os.path.join(path, ".metadata")
        if not os.path.isfile(file_name):  # reading a pipe would wait
            raise ValueError("there is no such file")
        with open(file_name, "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        _check(metadata, path)
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path}: its .metadata is damaged ({first_line(error)})") from error
    return metadata


def read_tensors(
    path: str, wanted: Callable[[tuple[str, ...]], bool], like: "Like | None" = None
) -> dict[tuple[str, ...], torch.Tensor]:
    """Read tensors that any number of processes wrote. All ranks call this together.

    Args:
        path: the folder.
        wanted: whether to read a tensor, given the keys under which it was saved, such as ``("model", "fc.weight")``.
        like: how tensors are sharded in this run; by default they are read whole, on the CPU.

    Returns:
        Tensors by their keys.

    Raises:
        ConfigError: the folder is damaged.
    """
    metadata = read_metadata(path)
    places = metadata.planner_data or {}
    tensors: dict[str, Any] = {}
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        keys = tuple(map(str, places.get(name, (name,))))
        if isinstance(entry, TensorStorageMetadata) and wanted(keys):
            one, dtype = like(keys, entry.size) if like is not None else None, entry.properties.dtype
            empty = torch.empty(entry.size, dtype=dtype) if one is None else torch.empty_like(one, dtype=dtype)
            tensors[name] = found[keys] = empty.detach()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # a single process is fine
            dcp.load(tensors, storage_reader=_Reader(path, metadata), planner=_Planner())
    except CheckpointException as error:  # of some rank, with its traceback
        cause = next(iter(error.failures.values()))[0] if error.failures else error
        raise ConfigError(f"{path} is damaged ({first_line(cause)})") from error
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path} is damaged ({first_line(error)})") from error
    return found


class _Reader(dcp.FileSystemReader):
    """Gives DCP the checked metadata. Torch's class would unpickle the file again."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Reads only tensors. Torch's class would unpickle other entries."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"'{read_item.dest_index.fqn}' is not a tensor")


# ---------------------------------------------------------------------------- the metadata


class _Ignored:
    """Stands in for what is not needed to read tensors, such as the folder's former path."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _MemoryFormat(_Ignored):
    pass


class _Getattr(_Ignored):
    """Stands in for ``getattr``, which some versions of Python use to pickle members of enumerations."""

    def __new__(cls, source: Any, name: Any) -> Any:
        if source is not _MemoryFormat:
            raise pickle.UnpicklingError("it holds an object of builtins.getattr")
        return _MemoryFormat()


class _Properties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__init__(dtype=state[0])  # type: ignore[misc]


def _sealed(cls: type) -> type:
    """Return a subclass whose instances become those of the class when they get their fields.

    The pickle cannot change the class itself: for that it would call ``__setstate__`` without an instance.
    """

    def set_fields(self: Any, state: Any) -> None:
        object.__setattr__(self, "__class__", cls)
        vars(self).update(state)  # frozen ones too

    return type(cls.__name__, (cls,), {"__setstate__": set_fields})


_RECORDS = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, _StorageInfo)
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): _sealed(cls) for cls in _RECORDS},
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "StorageMeta"): _Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _Getattr,
    **{(module, f"{kind}Path"): _Ignored for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's records of tensors, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds an object of {module}.{name}") from None


def _check(metadata: Any, folder: str) -> None:
    """Check that a record names only bytes of files in the folder, and tensors that fit into them."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it is a {type(metadata).__name__}, not a record of tensors")
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        path = os.path.join(folder, name)
        if os.path.basename(name) != name or not os.path.isfile(path):
            raise ValueError(f"there is no file {name!r}")
        sizes[name] = os.path.getsize(path)
        if min(info.offset, info.length) < 0 or info.offset + info.length > sizes[name]:
            raise ValueError(f"{name} is cut short")
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    for entry in tensors:
        if type(entry.size) is not torch.Size or min(entry.size, default=0) < 0 or type(entry.chunks) is not list:
            raise ValueError("a size or a list of chunks of another kind")
    if sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors) > sum(sizes.values()):
        raise ValueError("its tensors are larger than all its files")
    if any(sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size) for entry in tensors):
        raise ValueError("chunks that do not cover a tensor")
