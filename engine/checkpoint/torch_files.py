"""Reading torch.save's files without running code in them, numpy arrays included."""

import math
import re
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...config import ConfigError

__all__ = ["load_torch_file"]

# What a file of torch.save() began with before it was a zip archive: a pickled number.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def load_torch_file(path: str, *, mmap: bool = False) -> Any:
    """``torch.load(path, weights_only=True)`` on the CPU, for files that hold numpy arrays as well.

    Args:
        path: a local file.
        mmap: map the file into memory, so that only what is looked at is read; where the format allows it.

    Returns:
        What was saved, numpy's numbers as Python's, its arrays as tensors.

    Raises:
        ConfigError: the file is damaged, is none of torch.save's, or holds objects that could run code.
    """
    mmap = mmap and zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STAND_INS):
            # What cannot be read is an error.
            warnings.filterwarnings("ignore", "Detected pickle protocol|'torch.load' received a zip file")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # of any kind, as the bytes happen to be
        raise ConfigError(_explain(path, error)) from error
    return _without_stand_ins(content)


def _explain(path: str, error: Exception) -> str:
    if _is_plain_pickle(path):
        return (
            f"{path} is a pickle. Reading one can run any code, so it is not read. If you trust where it is from, "
            "convert it once: load it with the pickle module, and torch.save() the dict that you get"
        )
    if unknown := re.search(r"GLOBAL ([\w.]+) was not an allowed global|unsupported GLOBAL ([\w.]+)", str(error)):
        name = unknown[1] or unknown[2]
        return (
            f"{path} is damaged, or is not a checkpoint that can be read without running code: it holds an object "
            f"that {name} makes. Save tensors and plain data alone, such as model.state_dict()"
        )
    if "TorchScript" in str(error):
        return f"{path} is a TorchScript program, not a checkpoint; save the state_dict() of torch.jit.load(...)"
    return f"{path} is damaged, or is not a checkpoint{_from_its_ends(path) or f' ({first_line(error)})'}"


def _from_its_ends(path: str) -> str:
    """What the first bytes of a file and its last ones say is wrong with it; empty if nothing."""
    with open(path, "rb") as file:
        start = file.read(2 + len(_LEGACY))
        whole = zipfile.is_zipfile(file)
    if not start:
        return ": it is empty"
    if start[:4] == b"PK\x03\x04" and not whole:
        return ": it is cut short"
    if not whole and start[2:] != _LEGACY and start[: len(_LEGACY)] != _LEGACY:
        return ": it does not begin as files of torch.save() do"
    return ""


def _is_plain_pickle(path: str) -> bool:
    """Whether the file holds a pickle that torch.save() did not write."""
    if zipfile.is_zipfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(2 + len(_LEGACY))
    return path.endswith((".pkl", ".pickle")) or (
        start[:1] == b"\x80" and start[1:2] <= b"\x05" and start[2:] != _LEGACY
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a message of one's own; its type's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# ---------------------------------------------------------------------------- numpy
#
# numpy's own functions for unpickling believe whatever the file says of an array's memory. These stand in for them,
# and make arrays of numbers only, of as many bytes as there are.


class _Dtype:
    """Stands for ``numpy.dtype``."""

    def __init__(self, name: str, *_: Any) -> None:
        self.dtype = np.dtype(name) if isinstance(name, str) and re.fullmatch(r"[biufc]\d{1,2}|\?", name) else None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.dtype is not None and state[1] in ("<", ">", "|", "="):
            self.dtype = self.dtype.newbyteorder(state[1])

    def decode(self, data: Any, shape: tuple[int, ...]) -> np.ndarray:
        if self.dtype is None or not isinstance(data, bytes) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("an array of something else than numbers")
        if len(data) != math.prod(shape) * self.dtype.itemsize:
            raise ValueError("an array that is not as long as its shape says")
        # A copy, in the machine's byte order: torch takes nothing else.
        return np.frombuffer(data, self.dtype).astype(self.dtype.newbyteorder("="))


class _Array:
    """Stands for ``numpy.ndarray``."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, column_major, data = state
        flat = torch.from_numpy(dtype.decode(data, shape))
        self.value = flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1]) if column_major else flat.view(shape)


class _Scalar:
    """Stands for a numpy number."""

    def __init__(self, dtype: _Dtype, data: Any) -> None:
        self.value = dtype.decode(data, ()).item()


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _no_bytes() -> bytes:
    return b""


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    (_no_bytes, "builtins.bytes"),  # the content of an array without elements
    *((_reconstruct, f"{module}._reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((_Scalar, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
]


def _without_stand_ins(content: Any) -> Any:
    if isinstance(content, _Array | _Scalar):
        return content.value
    if isinstance(content, dict):  # in place: a state dict has attributes
        for key, value in content.items():
            content[key] = _without_stand_ins(value)
    elif type(content) is list:
        content[:] = map(_without_stand_ins, content)
    elif type(content) is tuple:
        return tuple(map(_without_stand_ins, content))
    return content
