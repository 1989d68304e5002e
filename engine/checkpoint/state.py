"""Turns state into tensors and plain data, which load without pickle."""

from collections.abc import Collection, Hashable, Mapping, Set
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from ...hooks.common import is_sharded

_KEYS = {str, int}
_PLAIN = {int, float, bool, str, type(None)}
# A view is copied if it is smaller than this part of the memory that torch.save would write for it.
_USED = 0.9


def to_plain(value: Any, where: str = "checkpoint") -> Any:
    """Turn common types of NumPy, torch and Python into tensors and plain data, which load without pickle.

    Containers are copied; tensors only if they are small views of large ones, which would be saved too. Parameters,
    subclasses of tensors and NumPy's arrays become tensors, numbers and texts Python's own, mappings dicts, other
    collections lists.

    Args:
        value: the value.
        where: its name in error messages.

    Raises:
        TypeError: something cannot be converted; the message says where it is.
    """
    if value is None or isinstance(value, bool | torch.Size | torch.dtype | torch.device | torch.layout):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, where)
    if isinstance(value, np.generic):
        item = value.item()  # item() of a longdouble is a longdouble
        return _refuse(value, where) if isinstance(item, np.generic) else to_plain(item, where)
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum too
    for kind in (int, float, complex, bytes):
        if isinstance(value, kind):
            return kind(value)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray):
        return _plain_array(value, where)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            plain[key if type(key) in _KEYS else _plain_key(key, where)] = to_plain(item, f"{where}[{key!r}]")
        return plain
    if type(value) in (tuple, list) and _PLAIN.issuperset(map(type, value)):
        return type(value)(value)
    if isinstance(value, Set):
        return {_plain_key(item, where) for item in value}
    # Not iterators, which reading would use up; not modules or data loaders.
    if isinstance(value, Collection) and not isinstance(value, torch.nn.Module):
        items = [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return _refuse(value, where)


def _plain_key(key: object, where: str) -> Hashable:
    """Convert a key of a dict or an item of a set."""
    plain = to_plain(key, where)
    return plain if isinstance(plain, Hashable) and not isinstance(plain, torch.Tensor) else _refuse(key, where)


def _plain_array(array: np.ndarray, where: str) -> object:
    if array.dtype.kind in "US":
        return to_plain(array.tolist(), where)
    if array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8):
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    return _refuse(array, where, f"an array of {array.dtype}")


def _plain_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if is_lazy(tensor) or tensor.is_meta:
        return _refuse(tensor, where, "a tensor without values")
    if is_traceable_wrapper_subclass(tensor):
        return _refuse(tensor, where, f"a {type(tensor).__name__}, a tensor made of others")
    if type(tensor) is not torch.Tensor or tensor.requires_grad or vars(tensor):  # attributes would be saved with it
        tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    # Expanded tensors are larger than their memory.
    if strided and 0 not in tensor.stride() and tensor.nbytes < _USED * tensor.untyped_storage().nbytes():
        tensor = tensor.to("cpu", copy=True)
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _refuse(value: object, where: str, what: str = "") -> NoReturn:
    raise TypeError(
        f"{where} is {what or 'a ' + type(value).__name__}, which cannot be saved: checkpoints hold tensors and plain "
        "data (numbers, strings, lists, dicts), so that loading one never runs code. Save its state or its text instead"
    )


def copy_to_host(data: object) -> tuple[object, list[torch.cuda.Event]]:
    """Copy plain data to host memory, while training continues.

    Tensors on a GPU are copied into pinned memory on the current stream. The host does not wait, and later steps on the
    stream change no weight before it is copied. A tensor that occurs twice is copied once.

    Returns:
        The copy, and events; it is complete once they have happened.
    """
    copies: dict[Any, torch.Tensor] = {}

    def copy(tensor: Any) -> torch.Tensor:
        if is_sharded(tensor):
            return type(tensor)(copy(tensor.to_local()), tensor._spec, requires_grad=False)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.to("cpu", copy=True)
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
        if key not in copies:
            room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # torch keeps pinned memory
            copies[key] = room.copy_(tensor, non_blocking=tensor.is_cuda)
        return copies[key]

    data = tree_map_only(torch.Tensor, copy, data)
    gpus = {device for device, *_ in copies if device.type == "cuda"}
    return data, [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]
