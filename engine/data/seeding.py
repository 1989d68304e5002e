"""Seed the random numbers of each sample by its position in the stream.

Data sets draw random numbers (crops, noise, mixing in a collate function) from the global generators of python, numpy
and torch. Their state depends on what the process has read before: it differs with the number of workers and ranks, and
after a resume. Loaders therefore seed the three generators before each sample, from the run's seed and the sample's
position. A sample then gets the same random numbers in every process.
"""

import random
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

# Separate random streams for reading, collating and transforming a sample, and for the order of samples.
SAMPLE, COLLATE, TRANSFORM, ORDER = 0, 1, 2, 3
_MASK = 2**64 - 1

_NUMPY: Any = np.random  # its functions for bit generators are in no stub
_BITS = np.random.MT19937(0)  # NumPy draws from it while a batch is read
_FIRST = np.random.RandomState(0).random_sample()


def stream_key(*numbers: int) -> int:
    """Hash numbers, such as seed, epoch and purpose, into one of 64 bits."""
    key = 0
    for number in numbers:
        key = _mix(key ^ _mix(number & _MASK))
    return key


def seeded_generator(*seeds: int) -> torch.Generator:
    """A CPU generator seeded by all the numbers (not by their sum)."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def seed_generators(key: int, place: int, drawn: Container[str] = ("python", "numpy")) -> None:
    """Seed the global CPU generators of python, numpy and torch for one position of a stream.

    Takes about 10 µs, torch's alone 1 µs. GPU generators are not seeded: samples are made on the CPU, and seeding those
    is slow.

    Args:
        key: key of the stream, see :func:`stream_key`.
        place: position of a sample in it.
        drawn: "python" and "numpy": the generators to seed besides torch's.
    """
    seed = _mix(key + place)
    if "python" in drawn:
        random.seed(seed)
    if "numpy" in drawn:
        np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def generators_for_reading() -> Iterator[Callable[[], set[str]]]:
    """Restore the global CPU generators after the block: the model draws from them too.

    Saving NumPy's state takes 0.1 ms, so NumPy gets another bit generator for the block. The second normal number of a
    pair, which NumPy keeps for the next ``randn()``, is lost by that.

    Yields:
        A function that says which of "python" and "numpy" the block has drawn from.
    """
    python, numpy, cpu = random.getstate(), _NUMPY.get_bit_generator(), torch.default_generator.get_state()
    _NUMPY.set_bit_generator(_BITS)
    np.random.seed(0)

    def drawn() -> set[str]:
        used = {"python": random.getstate() != python, "numpy": np.random.random_sample() != _FIRST}
        return {name for name, is_used in used.items() if is_used}

    try:
        yield drawn
    finally:
        _NUMPY.set_bit_generator(numpy)
        torch.default_generator.set_state(cpu)
        random.setstate(python)


@contextmanager
def seeded(key: int, place: int) -> Iterator[None]:
    """Seed the global CPU generators as :func:`seed_generators` does, and restore them after the block, to the bit."""
    # Not preserve_rng(): GPU generators are not seeded, so each block would draw the same numbers from them.
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        seed_generators(key, place)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


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
