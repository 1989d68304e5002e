"""Reading the tensors in a folder of torch.distributed.checkpoint, without running code in it."""

import collections
import enum
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...config import ConfigError
from .torch_files import first_line

__all__ = ["read_metadata", "read_tensors"]


def read_metadata(path: str) -> Metadata:
    """What the folder holds. It is a pickle, of which only the classes that belong there are made.

    Raises:
        ConfigError: it is damaged, or holds something else.
    """
    try:
        with open(os.path.join(path, ".metadata"), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # of any kind, as the bytes happen to be
        raise ConfigError(f"{path}: its .metadata is damaged ({first_line(error)})") from error
    if not isinstance(metadata, Metadata):
        raise ConfigError(f"{path}: its .metadata is a {type(metadata).__name__}, not that of a checkpoint")
    return metadata


def read_tensors(path: str, wanted: Callable[[tuple[Any, ...]], bool]) -> dict[str, Any]:
    """Read tensors whole, whatever number of processes wrote them. Where several ranks run, all call this together.

    Args:
        path: the folder.
        wanted: whether a tensor is to be read, by the keys it was saved under, such as ``("model", "fc.weight")``.
            What is no tensor would have to be unpickled, and is never read.

    Returns:
        Tensors on the CPU, in dicts as they were saved.

    Raises:
        ConfigError: the folder is damaged.
    """
    metadata = read_metadata(path)
    places = {}
    for name, entry in metadata.state_dict_metadata.items():
        keys = (metadata.planner_data or {}).get(name, (name,))
        if isinstance(entry, TensorStorageMetadata) and wanted(keys):
            places[name] = keys
    entries: Any = metadata.state_dict_metadata
    tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in places}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # a single process is fine
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    except dcp.api.CheckpointException as error:  # of some rank, with its traceback; it is no Exception
        cause = next(iter(error.failures.values()))[0]
        raise ConfigError(f"{path} is damaged ({first_line(cause)})") from error
    content: dict[str, Any] = {}
    for name, (*parents, last) in places.items():
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tensors[name]
    return content


class _MetadataUnpickler(pickle.Unpickler):
    """Makes torch's records of tensors, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        source = {part.__name__: part for part in (dcp_metadata, filesystem)}.get(module)
        found = vars(source).get(name) if source else None
        known = source is dcp_metadata or name == "_StorageInfo"
        if known and isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"it holds an object that {module}.{name} makes")


def _member(source: Any, name: str) -> Any:
    """``getattr`` for what some versions of Python pickle by it: members of enumerations."""
    if isinstance(source, enum.EnumMeta) and source.__module__ == dcp_metadata.__name__:
        return source[name]
    raise pickle.UnpicklingError("it holds an object that builtins.getattr makes")


_OTHERS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    # A path is data, and PurePosixPath one of any system.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
}
