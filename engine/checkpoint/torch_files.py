"""Reads files of ``torch.save``, with NumPy arrays, without running code in them."""

import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...config.errors import ConfigError, first_line

__all__ = ["load_torch_file"]

# Start of torch.save's files before they were zip archives: a pickled number.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def load_torch_file(path: str, *, mmap: bool = False) -> Any:
    """Like ``torch.load(path, weights_only=True)`` on the CPU, but also reads NumPy arrays.

    Args:
        path: a local file.
        mmap: map the file into memory if the format allows it, so that only what is used is read.

    Returns:
        The content, with NumPy's numbers as Python's and its arrays as tensors.

    Raises:
        ConfigError: the file is damaged, not by ``torch.save``, holds objects that could run code, or holds far more
            than its size allows.
    """
    if not os.path.isfile(path):  # reading a pipe would wait
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    mmap = mmap and zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STAND_INS):
            warnings.filterwarnings("ignore", "Detected pickle protocol|'torch.load' received a zip file")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(_explain(path, error)) from error
    try:
        return _Contents().plain(content)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is damaged, or is not a checkpoint: {problem}") from error


def _explain(path: str, error: Exception) -> str:
    if _is_plain_pickle(path):
        return (
            f"{path} is a pickle. Reading one can run any code, so it is refused. If you trust its source, "
            "convert it once: load it with the pickle module, and torch.save() the dict"
        )
    if unknown := re.search(r"GLOBAL ([\w.]+) was not an allowed global|unsupported GLOBAL ([\w.]+)", str(error)):
        name = unknown[1] or unknown[2]
        return (
            f"{path} is damaged, or is not a checkpoint that can be read without running code: it holds an object "
            f"of {name}. Save only tensors and plain data, such as model.state_dict()"
        )
    if "TorchScript" in str(error):
        return f"{path} is a TorchScript program, not a checkpoint; save the state_dict() of torch.jit.load(...)"
    return f"{path} is damaged, or is not a checkpoint{_from_its_ends(path) or f' ({first_line(error)})'}"


def _from_its_ends(path: str) -> str:
    """Return what a file's start and end say is wrong with it; empty if nothing."""
    with open(path, "rb") as file:
        start = file.read(2 + len(_LEGACY))
        whole = zipfile.is_zipfile(file)
    if not start:
        return ": it is empty"
    if start[:4] == b"PK\x03\x04" and not whole:
        return ": it is cut short"
    if not whole and start[2:] != _LEGACY and start[: len(_LEGACY)] != _LEGACY:
        return ": it does not start like files of torch.save()"
    return ""


def _is_plain_pickle(path: str) -> bool:
    """Return whether the file is a pickle that ``torch.save`` did not write."""
    if zipfile.is_zipfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(2 + len(_LEGACY))
    return path.endswith((".pkl", ".pickle")) or (
        start[:1] == b"\x80" and start[1:2] <= b"\x05" and start[2:] != _LEGACY
    )


# ---------------------------------------------------------------------------- numpy
#
# NumPy's own functions for unpickling trust what the file says about an array's memory. These classes replace them.
# They build only arrays of numbers, with exactly the bytes in the file.


class _Dtype:
    """Replaces ``numpy.dtype``."""

    def __init__(self, name: str, *_: Any) -> None:
        self.dtype = np.dtype(name) if isinstance(name, str) and re.fullmatch(r"[biufc]\d{1,2}|\?", name) else None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.dtype is not None and state[1] in ("<", ">", "|", "="):
            self.dtype = self.dtype.newbyteorder(state[1])

    def decode(self, data: Any, shape: tuple[int, ...]) -> np.ndarray:
        if self.dtype is None or not isinstance(data, bytes) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("an array that does not hold numbers")
        if len(data) != math.prod(shape) * self.dtype.itemsize:
            raise ValueError("an array whose length does not match its shape")
        # A copy in native byte order, which torch requires.
        return np.frombuffer(data, self.dtype).astype(self.dtype.newbyteorder("="))


class _Array:
    """Replaces ``numpy.ndarray``."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, column_major, data = state
        flat = torch.from_numpy(dtype.decode(data, shape))
        self.value = flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1]) if column_major else flat.view(shape)


class _Scalar:
    """Replaces a NumPy number."""

    def __init__(self, dtype: _Dtype, data: Any) -> None:
        self.value = dtype.decode(data, ()).item()


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _no_bytes() -> bytes:
    return b""


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    (_no_bytes, "builtins.bytes"),  # content of an empty array
    *((_reconstruct, f"{module}._reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((_Scalar, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
]


# ---------------------------------------------------------------------------- checks of the content

# A few bytes of a pickle can refer to the same data so often that walking through it never ends.
_MAX_REPEATED = 100
_MAX_VALUES = 1_000_000
_MAX_TENSOR = 1 << 30  # bytes beyond those in the file


class _Contents:
    """Replaces stand-ins by their values, and counts values."""

    def __init__(self) -> None:
        # By id of a container: the container, kept alive; its plain form; its number of values, nested ones included.
        self._done: dict[int, tuple[Any, Any, int] | None] = {}
        self._distinct = 0

    def plain(self, content: Any) -> Any:
        """Return the content without stand-ins.

        Raises:
            ValueError: it contains itself, refers to the same data too often, or has tensors far larger than the file.
            RecursionError: it is nested too deeply.
        """
        value, count = self._visit(content)
        if count > _MAX_REPEATED * self._distinct + _MAX_VALUES:
            raise ValueError("it refers to the same data over and over")
        return value

    def _visit(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, _Array | _Scalar):
            return value.value, 1
        if isinstance(value, torch.Tensor):
            _check_size(value)
            return value, 1
        if not isinstance(value, dict) and type(value) not in (list, tuple):
            return value, 1
        if id(value) in self._done:
            done = self._done[id(value)]
            if done is None:
                raise ValueError("it contains itself")
            return done[1], done[2]
        self._done[id(value)] = None
        plain, count = self._container(value)
        self._done[id(value)] = (value, plain, count)
        self._distinct += len(value)
        return plain, count

    def _container(self, value: Any) -> tuple[Any, int]:
        count = 1
        items = value.items() if isinstance(value, dict) else enumerate(value)
        changed = {}
        for key, item in items:
            new, number = self._visit(item)
            count += number
            if new is not item:
                changed[key] = new
        if not changed:
            return value, count
        if isinstance(value, tuple):
            return tuple(changed.get(index, item) for index, item in enumerate(value)), count
        for key, new in changed.items():  # in place, since a state dict has attributes
            value[key] = new
        return value, count


def _check_size(tensor: torch.Tensor) -> None:
    if tensor.layout is torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes() + _MAX_TENSOR:
        raise ValueError(f"a tensor of {tensor.nbytes} bytes is far larger than what the file holds of it")
