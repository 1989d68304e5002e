"""Reads the tensors in a folder of torch.distributed.checkpoint (DCP), without running code in it.

DCP keeps its metadata in a pickle and unpickles it without restriction. Here the pickle is read once, into records
that do nothing. Torch's classes are then built from checked values, and DCP's reader is given that object. DCP itself
unpickles nothing: tensors are read with ``weights_only=True``, and other entries are never read.
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

__all__ = ["empty_tensor", "load_tensors", "read_metadata", "read_tensors", "tensor_places"]


def read_metadata(path: str) -> Metadata:
    """Read which tensors a folder holds, and where in its files they are.

    Args:
        path: the folder.

    Returns:
        Torch's record, built from checked values. It names only files in the folder that hold as many bytes.

    Raises:
        ConfigError: the metadata is damaged, or holds anything but such a record.
    """
    try:
        _check_is_file(path, ".metadata")
        with open(os.path.join(path, ".metadata"), "rb") as file:
            return _checked(_MetadataUnpickler(file).load(), path)
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path}: its .metadata is damaged ({first_line(error)})") from error


def tensor_places(metadata: Metadata) -> dict[tuple[str, ...], tuple[str, TensorStorageMetadata]]:
    """Return DCP's name and record for each tensor, by the keys under which it was saved."""
    places = metadata.planner_data or {}
    return {
        places.get(name, (name,)): (name, entry)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(path: str, metadata: Metadata, tensors: dict[str, Any]) -> None:
    """Read tensors in place. All ranks call this together.

    Args:
        path: the folder.
        metadata: what :func:`read_metadata` returned for it.
        tensors: tensors of the right shapes, in nested dicts or by DCP's names.

    Raises:
        ConfigError: the folder is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # a single process is fine
            dcp.load(tensors, storage_reader=_Reader(path, metadata), planner=_Planner())
    except CheckpointException as error:  # of some rank, with its traceback
        cause = next(iter(error.failures.values()))[0] if error.failures else error
        raise ConfigError(f"{path} is damaged ({first_line(cause)})") from error
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path} is damaged ({first_line(error)})") from error


def read_tensors(path: str, wanted: Callable[[tuple[str, ...]], bool], like: "Like | None" = None) -> dict[str, Any]:
    """Read tensors that any number of processes wrote. All ranks call this together.

    Args:
        path: the folder.
        wanted: whether to read a tensor, given the keys under which it was saved, such as ``("model", "fc.weight")``.
        like: how tensors are sharded in this run; by default they are read whole, on the CPU.

    Returns:
        Tensors in dicts as they were saved.

    Raises:
        ConfigError: the folder is damaged.
    """
    metadata = read_metadata(path)
    places = {keys: place for keys, place in tensor_places(metadata).items() if wanted(keys)}
    tensors = {name: empty_tensor(keys, entry, like) for keys, (name, entry) in places.items()}
    load_tensors(path, metadata, tensors)
    content: dict[str, Any] = {}
    for (*parents, last), (name, _) in places.items():
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{path} is damaged (it has a tensor and a dict under '{parent}')")
        place[last] = tensors[name]
    return content


def empty_tensor(keys: tuple[str, ...], entry: TensorStorageMetadata, like: "Like | None") -> torch.Tensor:
    """Return memory for a tensor, sharded as in this run."""
    one, dtype = None if like is None else like(keys, entry.size), entry.properties.dtype
    return torch.empty(entry.size, dtype=dtype) if one is None else torch.empty_like(one, dtype=dtype).detach()


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


# ---------------------------------------------------------------------------- from the pickle to records


class _Record:
    """Stands in for a class: keeps the state that the pickle holds, and does nothing.

    The pickle cannot change the stand-in itself: for that it would call ``__setstate__`` without an instance.
    """

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        if not isinstance(self.state, dict):
            raise ValueError(f"a {type(self).__name__} without fields")
        return self.state


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Properties(_Record):
    pass


class _Chunk(_Record):
    pass


class _Index(_Record):
    pass


class _Info(_Record):
    pass


class _Ignored(_Record):
    """Stands in for what is not needed to read tensors, such as the folder's former path."""

    def __init__(self, *args: Any) -> None:
        pass


class _MemoryFormat(_Ignored):
    pass


class _Getattr(_Record):
    """Stands in for ``getattr``, which some versions of Python use to pickle members of enumerations."""

    def __new__(cls, source: Any, name: Any) -> Any:
        if source is not _MemoryFormat:
            raise pickle.UnpicklingError("it holds an object of builtins.getattr")
        return _MemoryFormat()


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _Getattr,
    ("pathlib", "PosixPath"): _Ignored,
    ("pathlib", "WindowsPath"): _Ignored,
    ("pathlib._local", "PosixPath"): _Ignored,
    ("pathlib._local", "WindowsPath"): _Ignored,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's records of tensors into stand-ins, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds an object of {module}.{name}") from None


# ---------------------------------------------------------------------------- from records to torch's classes


def _checked(record: Any, folder: str) -> Metadata:
    fields = _of(record, _Metadata).fields()
    entries = {_text(name): _entry(entry) for name, entry in _of(fields.get("state_dict_metadata"), dict).items()}
    places = {_text(name): _keys(keys) for name, keys in _of(fields.get("planner_data") or {}, dict).items()}
    storage = {_index(key): _info(info) for key, info in _of(fields.get("storage_data") or {}, dict).items()}
    sizes = {name: _check_is_file(folder, name) for name in {info.relative_path for info in storage.values()}}
    for info in storage.values():
        if info.offset + info.length > sizes[info.relative_path]:
            raise ValueError(f"{info.relative_path} is cut short")
    tensors = [entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    if sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors) > sum(sizes.values()):
        raise ValueError("its tensors are larger than all its files")
    return Metadata(state_dict_metadata=entries, planner_data=places, storage_data=storage)


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record) is _Bytes:
        return BytesStorageMetadata()
    fields = _of(record, _Tensor).fields()
    dtype = _of(_of(fields.get("properties"), _Properties).state, tuple)[0]
    chunks = [_of(chunk, _Chunk).fields() for chunk in _of(fields.get("chunks"), list)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_of(dtype, torch.dtype)),
        size=_size(fields.get("size")),
        chunks=[ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    fields = _of(record, _Index).fields()
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _of(index, int),
    )


def _info(record: Any) -> _StorageInfo:
    fields = _of(record, _Info).fields()
    if fields.get("transform_descriptors"):
        raise ValueError("its files are compressed; save it without DCP's extensions")
    offset, length = _of(fields.get("offset"), int), _of(fields.get("length"), int)
    if offset < 0 or length < 0:
        raise ValueError("a part of a file with a negative position")
    return _StorageInfo(_text(fields.get("relative_path")), offset, length)


def _keys(value: Any) -> tuple[str, ...]:
    keys = tuple(_of(value, tuple))
    if not keys or not all(type(key) in (str, int) for key in keys):
        raise ValueError("keys that are neither text nor numbers")
    return tuple(map(str, keys))


def _size(value: Any) -> torch.Size:
    size = _of(value, torch.Size)
    if any(length < 0 for length in size):
        raise ValueError("a negative size")
    return size


def _text(value: Any) -> str:
    return _of(value, str)


def _of(value: Any, kind: Any) -> Any:
    """Return the value if its type is exactly ``kind``; dicts may be ordered."""
    if type(value) is kind or (kind is dict and type(value) is collections.OrderedDict):
        return value
    raise ValueError(f"a {type(value).__name__} in place of a {kind.__name__}")


def _check_is_file(folder: str, name: str) -> int:
    """Check that a name is that of a file directly in the folder, and return its size."""
    path = os.path.join(folder, name)
    if os.path.basename(name) != name or not os.path.isfile(path):
        raise ValueError(f"there is no file {name!r}")
    return os.path.getsize(path)
