"""Reads folders of torch.distributed.checkpoint (DCP) without running code in them.

DCP keeps its metadata in a pickle and unpickles it without restriction. Here the pickle is read once, by an unpickler
that knows only torch's records, and DCP's reader is given the checked result. DCP itself unpickles nothing: tensors
are read with ``weights_only=True``, and other entries are never read.
"""

import collections
import math
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...config.errors import ConfigError, first_line

Keys = tuple[str, ...]
"""A place in nested dicts and lists."""

Like = Callable[[Keys, torch.Size], torch.Tensor | None]
"""Returns a tensor that is sharded like the one at a place; None if that one is not sharded. On the device meta: the
tensor at this place is not read."""


def read_metadata(path: str) -> Metadata:
    """Read which tensors a folder holds, and where in its files they are.

    Args:
        path: the folder.

    Returns:
        Torch's record. It names only files in the folder, and tensors that are not larger than them.

    Raises:
        ConfigError: the metadata is corrupt, or holds anything but such a record.
    """
    try:
        file_name = os.path.join(path, ".metadata")
        if not os.path.isfile(file_name):  # reading a pipe would wait
            raise ValueError("there is no such file")
        with open(file_name, "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        _check(metadata, path)
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{path}: its .metadata is corrupt ({first_line(error)})") from error
    return metadata


def read_tensors(path: str, wanted: Callable[[Keys], bool], like: Like | None = None) -> dict[Keys, torch.Tensor]:
    """Read tensors that any number of processes wrote. All ranks call this together.

    Args:
        path: the folder.
        wanted: whether to read a tensor, given the keys under which it was saved, such as ``("model", "fc.weight")``.
        like: how tensors are sharded in this run; by default they are read whole, on the CPU.

    Returns:
        Tensors by their keys.

    Raises:
        ConfigError: the folder is corrupt.
    """
    metadata = read_metadata(path)
    places = metadata.planner_data or {}
    tensors: dict[str, torch.Tensor] = {}
    found: dict[Keys, torch.Tensor] = {}
    try:
        for name, entry in metadata.state_dict_metadata.items():
            keys = tuple(map(str, places.get(name, (name,))))
            if isinstance(entry, TensorStorageMetadata) and wanted(keys):
                one, dtype = like(keys, entry.size) if like is not None else None, entry.properties.dtype
                empty = torch.empty(entry.size, dtype=dtype) if one is None else torch.empty_like(one, dtype=dtype)
                found[keys] = empty.detach()
                if not empty.is_meta:
                    tensors[name] = found[keys]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # a single process is fine
            dcp.load(tensors, storage_reader=_Reader(path, metadata), planner=_Planner())
    except (Exception, CheckpointException) as error:  # corrupt bytes can cause any error
        failures = error.failures if isinstance(error, CheckpointException) else {}  # by rank, with tracebacks
        cause = next((failure[0] for failure in failures.values()), error)
        raise ConfigError(f"{path} is corrupt ({first_line(cause)})") from error
    return found


def nested(flat: Mapping[Keys, object]) -> dict[str, Any]:
    """Build nested dicts, which DCP flattens to places."""
    tree: dict[str, Any] = {}
    for (*parents, last), value in flat.items():
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


class _Reader(dcp.FileSystemReader):
    """Gives DCP the checked metadata. Torch's class would unpickle the file again."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Reads only tensors. Torch's class would unpickle other entries."""

    def load_bytes(self, read_item: Any, value: object) -> None:
        raise ValueError(f"'{read_item.dest_index.fqn}' is not a tensor")


# ---------------------------------------------------------------------------- the metadata


class _Place:
    """Stands in for torch's record of where a tensor is in a file, a private class."""

    transform_descriptors = None

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)


class _Ignored:
    """Stands in for what is not needed to read tensors, such as the folder's former path."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Properties(TensorProperties):
    def __setstate__(self, state: tuple[torch.dtype, ...]) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__init__(dtype=state[0])  # type: ignore[misc]


def _sealed(cls: type) -> type:
    """Return a subclass whose instances become those of the class when they get their fields.

    The pickle cannot change the class itself: for that it would call ``__setstate__`` without an instance.
    """

    def set_fields(self: object, state: dict[str, object]) -> None:
        object.__setattr__(self, "__class__", cls)
        vars(self).update(state)  # frozen ones too

    return type(cls.__name__, (cls,), {"__setstate__": set_fields})


_RECORDS = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex)
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], object] = {
    **{(cls.__module__, cls.__name__): _sealed(cls) for cls in _RECORDS},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "StorageMeta"): _Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Ignored,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{(module, f"{kind}Path"): _Ignored for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's records of tensors, and refuses everything else."""

    def find_class(self, module: str, name: str) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds an object of {module}.{name}") from None


def _check(metadata: object, folder: str) -> None:
    """Check that a record names only files in the folder, and tensors that fit into them."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it is a {type(metadata).__name__}, not a record of tensors")
    names = {info.relative_path for info in (metadata.storage_data or {}).values()}
    for name in names:
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"there is no file {name!r}")
    size = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    if sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors) > size:
        raise ValueError("its tensors are larger than all its files")
    if any(sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size) for entry in tensors):
        raise ValueError("chunks that do not cover a tensor")
