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
        ConfigError: the file is damaged, not by ``torch.save``, or holds objects that could run code.
    """
    if not os.path.isfile(path):  # reading a pipe would wait
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    mmap = mmap and zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STAND_INS):
            warnings.filterwarnings("ignore", "Detected pickle protocol|'torch.load' received a zip file")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path} is {_explain(path, error)}") from error


def _explain(path: str, error: Exception) -> str:
    with open(path, "rb") as file:
        start, whole = file.read(2 + len(_LEGACY)), zipfile.is_zipfile(file)
    legacy = _LEGACY in (start[2:], start[: len(_LEGACY)])
    if not (whole or legacy) and (path.endswith((".pkl", ".pickle")) or re.match(rb"\x80[\0-\5]", start)):
        return (
            "a pickle. Reading one can run any code, so it is refused. If you trust its source, convert it once: load "
            "it with the pickle module, and torch.save() the dict"
        )
    if unknown := re.search(r"GLOBAL ([\w.]+) was not an allowed global|unsupported GLOBAL ([\w.]+)", str(error)):
        return (
            "damaged, or is not a checkpoint that can be read without running code: it holds an object of "
            f"{unknown[1] or unknown[2]}. Save only tensors and plain data, such as model.state_dict()"
        )
    if "TorchScript" in str(error):
        return "a TorchScript program, not a checkpoint; save the state_dict() of torch.jit.load(...)"
    problem = first_line(error)
    if not start:
        problem = "it is empty"
    elif not (whole or legacy):
        problem = "it is cut short" if start[:4] == b"PK\x03\x04" else "it does not start like files of torch.save()"
    return f"damaged, or is not a checkpoint ({problem})"


# NumPy's own functions for unpickling trust what the file says about an array's memory. These replace them, and build
# only arrays of numbers, with exactly the bytes in the file.


class _Dtype:
    """Replaces ``numpy.dtype``."""

    def __init__(self, name: str, *_: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[biufc]\d{1,2}|\?", name):
            raise ValueError("an array that does not hold numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])

    def decode(self, data: Any, shape: tuple[int, ...]) -> np.ndarray:
        if (
            not isinstance(data, bytes)
            or min(shape, default=0) < 0
            or len(data) != math.prod(shape) * self.dtype.itemsize
        ):
            raise ValueError("an array whose length does not match its shape")
        # A copy in native byte order, which torch requires.
        return np.frombuffer(data, self.dtype).astype(self.dtype.newbyteorder("="))


class _Array(torch.Tensor):
    """Replaces ``numpy.ndarray``, and becomes a plain tensor when it gets its values."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, column_major, data = state
        flat = torch.from_numpy(dtype.decode(data, shape))
        self.data = flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if column_major else flat.view(shape)
        self.__class__ = torch.Tensor  # type: ignore[assignment]


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: Any) -> Any:
    return dtype.decode(data, ()).item()


def _no_bytes() -> bytes:
    return b""


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    (_no_bytes, "builtins.bytes"),  # content of an empty array
    *((_reconstruct, f"{module}._reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((_scalar, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
]
