"""The state of the process that a checkpoint must hold: random number generators, as plain data."""

import random
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "restore_rng", "to_plain"]


def capture_rng() -> dict[str, Any]:
    """The state of python's, numpy's, torch's and each GPU's generator, loadable with ``weights_only=True``."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`capture_rng` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


_PLAIN = {int, float, bool, str, type(None)}


def to_plain(value: Any) -> Any:
    """Turn numpy scalars and arrays, deques, default dicts, paths and the like into what loads without pickle.

    Raises:
        TypeError: something has no plain form; the message says where it stands.
    """
    return _plain(value, "state")


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | torch.Size | torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach() if isinstance(value, torch.nn.Parameter) else value
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return complex(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())
    if isinstance(value, dict) or hasattr(value, "items"):
        return {_plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (tuple, list) and _PLAIN.issuperset(map(type, value)):
        return type(value)(value)
    if isinstance(value, tuple):
        return tuple(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, set | frozenset):
        return {_plain(item, where) for item in value}
    if hasattr(value, "__iter__") and not isinstance(value, np.ndarray):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise TypeError(
        f"{where} is a {type(value).__name__}, which cannot be saved: checkpoints hold tensors and plain data "
        "(numbers, strings, lists, dicts), so that loading one never runs code"
    )
