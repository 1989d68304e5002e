"""The state of the global random number generators: save it, restore it, preserve it."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "gpus_of", "preserve_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """Return the state of Python's, NumPy's, torch's and each GPU's generator, loadable with ``weights_only=True``."""
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


@contextmanager
def preserve_rng(gpus: Iterable[int] = ()) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end of the block.

    Args:
        gpus: GPUs whose generators are restored too.
    """
    # Not capture_rng(): this runs for every batch that is read, and the plain form costs more.
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        for gpu, state in cuda.items():
            torch.cuda.set_rng_state(state, gpu)


def gpus_of(model: torch.nn.Module) -> list[int]:
    """Return the GPUs that a model's parameters are on."""
    return sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
