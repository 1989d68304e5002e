"""The three global generators of random numbers on the CPU, as loaders use them, and the seeds of their streams.

``get`` returns a generator's state, ``unchanged`` compares it with the present one, ``set`` restores it, and ``seed``
takes an int of 64 bits.
"""

import ctypes
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...config import ConfigError

__all__ = ["GENERATORS", "Generator", "seed_generators", "stream_key"]

# Separate random streams for reading, collating and transforming a sample, and for the order of samples.
SAMPLE, COLLATE, TRANSFORM, ORDER = 0, 1, 2, 3
_MASK = 2**64 - 1


class Generator(Protocol):
    """A global generator."""

    def get(self) -> Any: ...
    def unchanged(self, state: Any) -> bool: ...
    def set(self, state: Any) -> None: ...
    def seed(self, seed: int) -> None: ...


class _Python:
    def get(self) -> Any:
        return random.getstate()

    def unchanged(self, state: Any) -> bool:
        return bool(random.getstate() == state)

    def set(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, seed: int) -> None:
        random.seed(seed)


class _Torch:
    def get(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def unchanged(self, state: torch.Tensor) -> bool:
        return torch.equal(torch.default_generator.get_state(), state)

    def set(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed >> 1)


class _Numpy:
    """NumPy's generator. ``np.random.get_state()`` takes 40 µs, so its memory is read.

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
        memory, kept = state
        same = ctypes.string_at(self._address(), self._SIZE) == memory
        return same and (kept is None or self.get() == state)

    def set(self, state: tuple[bytes, float | None]) -> None:
        memory, kept = self._seen, self._kept = state
        np.random.seed(0)  # forgets a number that is kept
        ctypes.memmove(self._address(), memory, self._SIZE)
        if kept is not None:
            whole: Any = np.random.get_state(legacy=False)
            np.random.set_state(whole | {"has_gauss": 1, "gauss": kept})

    def seed(self, seed: int) -> None:
        np.random.seed(seed >> 32)


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
