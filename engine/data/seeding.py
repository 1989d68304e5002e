"""Seed the random numbers of each sample by its position in the stream.

Data sets draw random numbers (crops, noise, mixing in a collate function) from the global generators of python, numpy
and torch. Their state depends on what the process has read before: it differs with the number of workers and ranks, and
after a resume. Loaders therefore seed the three generators before each sample, from the run's seed and the sample's
position. A sample then gets the same random numbers in every process.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from ...config import ConfigError

# Separate random streams for reading, collating and transforming a sample, and for the order of samples.
SAMPLE, COLLATE, TRANSFORM, ORDER = 0, 1, 2, 3
_MASK = 2**64 - 1


# The global generators on the CPU: ``get`` returns the state, ``unchanged`` compares it with the present one, ``set``
# restores it, and ``seed`` takes an int of 64 bits.


class _Python:
    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    def unchanged(self, state: Any) -> bool:
        return bool(random.getstate() == state)


class _Torch:
    get = staticmethod(torch.default_generator.get_state)
    set = staticmethod(torch.default_generator.set_state)

    def unchanged(self, state: torch.Tensor) -> bool:
        return torch.equal(torch.default_generator.get_state(), state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed >> 1)


class _Numpy:
    """NumPy's generator. ``np.random.get_state()`` and ``set_state()`` take 60 µs each, so its memory is copied.

    NumPy keeps every second normal number for the next call, outside of that memory. One can be there only after the
    memory has changed, so only then the whole state is asked for.
    """

    _SIZE = 625 * 4  # MT19937: 624 words, and the position in them

    def __init__(self) -> None:
        self._seen = b""
        self._kept: float | None = None  # the normal number that was kept when _seen was read

    def _address(self) -> int:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            raise ConfigError(
                f"np.random.set_bit_generator: NumPy's global generator must be MT19937, as usual, to be seeded for "
                f"each sample, not {type(generator).__name__}; draw from a generator of your own instead"
            )
        return generator.ctypes.state_address

    def get(self) -> tuple[bytes, float | None]:
        memory = ctypes.string_at(self._address(), self._SIZE)
        if memory != self._seen or self._kept is not None:
            whole: Any = np.random.get_state(legacy=False)
            self._seen, self._kept = memory, whole["gauss"] if whole["has_gauss"] else None
        return memory, self._kept

    def unchanged(self, state: tuple[bytes, float | None]) -> bool:
        same = ctypes.string_at(self._address(), self._SIZE) == state[0]
        return same and (state[1] is None or self.get() == state)

    def set(self, state: tuple[bytes, float | None]) -> None:
        memory, kept = self._seen, self._kept = state
        np.random.seed(0)  # forgets a number that is kept
        ctypes.memmove(self._address(), memory, self._SIZE)
        if kept is not None:
            whole: Any = np.random.get_state(legacy=False)
            np.random.set_state(whole | {"has_gauss": 1, "gauss": kept})

    def seed(self, seed: int) -> None:
        np.random.seed(seed >> 32)


Generator = _Python | _Numpy | _Torch
GENERATORS: tuple[Generator, ...] = (_Python(), _Numpy(), _Torch())


def stream_key(*numbers: int) -> int:
    """Hash numbers, such as seed, epoch and purpose, into one of 64 bits."""
    key = 0
    for number in numbers:
        key = _mix(key ^ _mix(number & _MASK))
    return key


def seed_generators(key: int, place: int, generators: Sequence[Generator] = GENERATORS) -> None:
    """Seed the global CPU generators of python, numpy and torch for one position of a stream.

    Takes about 10 µs. GPU generators are not seeded: samples are made on the CPU, and seeding those is slow.

    Args:
        key: key of the stream, see :func:`stream_key`.
        place: position of a sample in it.
        generators: those to seed.
    """
    seed = _mix(key + place)
    for generator in generators:
        generator.seed(seed)


def _mix(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def is_deterministic(dataset: Any, collate_fn: Callable[[Any], Any] | None = None) -> bool:
    """Whether reading a data set is known to draw no random numbers, so that no seeding is needed.

    A data set declares it by ``deterministic = True``, on the object or its class; a subclass, which may override
    reading, declares it again. It is known of TensorDatasets and sequences, and of subsets and concatenations of
    deterministic data sets.

    Args:
        dataset: any data set.
        collate_fn: makes its batches. Other functions than torch's and the data set's own may draw.
    """
    if collate_fn not in (None, default_collate, own_collate_fn(dataset)):
        return False
    if isinstance(dataset, Subset):
        return is_deterministic(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_deterministic, dataset.datasets))
    if type(dataset) in (TensorDataset, list, tuple, range):
        return True
    declared = {**vars(type(dataset)), **getattr(dataset, "__dict__", {})}
    return bool(declared.get("deterministic", False))


def own_collate_fn(dataset: Any) -> Callable[[Any], Any] | None:
    """The ``collate_fn`` of a data set, or of the data set of a Subset."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    return getattr(dataset, "collate_fn", None)
