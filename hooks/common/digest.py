"""Digests: 64 bits that tell whether two values are equal."""

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from .tensors import local_part

__all__ = ["digest", "read_digests"]

_ROW = 1 << 14  # words that share one sum
_SLAB = 1 << 22  # words at a time: bounds the memory
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@torch.no_grad()
def digest(value: Any) -> torch.Tensor:
    """Return a 64-bit digest of a value: an int64 tensor of one element. It waits for no device.

    Values that differ in one bit have different digests, up to a chance of about 2^-48. The order of elements, shapes
    and dtypes count; devices and strides do not, nor whether a sequence is a list or a tuple.

    Args:
        value: tensors on any device in any nesting, with other values between them. Of a DTensor counts the local part.

    Returns:
        A tensor on the GPU if ``value`` has tensors there, else on the CPU.
    """
    header = hashlib.blake2b(digest_size=8)
    groups: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = {}
    for part in _parts(value, []):
        if isinstance(part, torch.Tensor):
            header.update(f"{part.dtype}{tuple(part.shape)}\0".encode())
            if part.numel() and not part.is_meta:
                groups.setdefault(part.device, {}).setdefault(part.dtype, []).append(part)
        else:
            header.update(part + b"\0")
    total: torch.Tensor | None = None
    for device, by_dtype in sorted(groups.items(), key=lambda item: item[0].type != "cpu"):
        sums = torch.cat([_sums(words) for same in by_dtype.values() for words in _words(same)])
        while len(sums) > 1:
            sums = _sums(sums.view(torch.int16))
        if device.type == "cpu":
            header.update(str(sums.item()).encode())
        elif total is None:
            total = sums
        else:
            total = _sums(torch.cat([total, sums.to(total.device, non_blocking=True)]).view(torch.int16))
    known = int.from_bytes(header.digest(), "little", signed=True)
    return torch.tensor(known, device="cpu") if total is None else (total + known).reshape(())


def read_digests(digests: Sequence[torch.Tensor]) -> list[str]:
    """Wait for digests, with one copy from their device, and return each as 16 hexadecimal digits."""
    there = [one for one in digests if one.device.type != "cpu"]
    values = iter(torch.stack([one.to(there[0].device) for one in there]).tolist() if there else ())
    numbers = [int(one.item()) if one.device.type == "cpu" else next(values) for one in digests]
    return [f"{number & (2**64 - 1):016x}" for number in numbers]


def _parts(value: Any, parents: list[Any]) -> Iterator[torch.Tensor | bytes]:
    """Yield the tensors of a value, and a description of everything else, in order."""
    if isinstance(value, torch.Tensor):
        yield from _plain(value)
        return
    if type(value) is tuple:
        value = list(value)
    if isinstance(value, _PLAIN) or (type(value) is list and all(isinstance(one, _PLAIN) for one in value)):
        yield repr(value).encode()
        return
    if hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            yield from _plain(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))
            return
        yield repr(array.dtype).encode()
        value = array.tolist()
    yield type(value).__qualname__.encode()
    if any(value is parent for parent in parents):
        return
    if isinstance(value, Mapping):
        children: Any = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple):
        children = value
    elif isinstance(value, set | frozenset):
        children = sorted(value, key=repr)
    elif hasattr(value, "__qualname__"):  # a function or a class
        yield f"{getattr(value, '__module__', '')}:{value.__qualname__}".encode()
        return
    else:
        try:
            children = value.__reduce_ex__(4)
        except Exception:  # no content that can be saved
            return
        children = [list(part) if isinstance(part, Iterator) else part for part in children]
    yield str(len(children)).encode()
    for child in children:
        yield from _parts(child, [*parents, value])


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield dense real tensors with the content of one."""
    tensor = local_part(tensor)
    if tensor.is_nested:
        yield from (part for one in tensor.unbind() for part in _plain(one))
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), *_plain(tensor.values()))
    elif tensor.layout is not torch.strided:
        yield from _plain(tensor.to_dense())
    elif tensor.is_complex():
        yield torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    else:
        yield tensor.resolve_neg()


def _words(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bits of tensors of one dtype and device as integers of 16 bits, or of 8. Small tensors are joined."""
    dtype = torch.int16 if tensors[0].element_size() > 1 else torch.int8
    joined: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if joined and size + tensor.numel() > _SLAB:
            yield torch.cat(joined).view(dtype)
            joined, size = [], 0
        joined.append(tensor.reshape(-1))
        size += tensor.numel()
    single = len(joined) == 1 and joined[0].stride(0) == 1  # view() takes no expanded tensor
    yield (joined[0] if single else torch.cat(joined)).view(dtype)


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of each row of words, each word times the odd number of its position."""
    keys = _keys(words.device)
    if words.device.type == "cpu":  # row by row: these products stay in the processor's cache
        return torch.stack([torch.dot(row.to(torch.int64), keys[: len(row)]) for row in words.split(_ROW)])
    whole = len(words) // _ROW * _ROW
    sums = [(slab.view(-1, _ROW) * keys).sum(1) for slab in words[:whole].split(_SLAB) if whole]
    if whole < len(words):
        sums.append((words[whole:] * keys[: len(words) - whole]).sum().reshape(1))
    return torch.cat(sums)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """Return the odd numbers of the positions, the same in every process."""
    content = hashlib.shake_128(b"hookline").digest(8 * _ROW)
    return (torch.frombuffer(bytearray(content), dtype=torch.int64) | 1).to(device)
