"""Read batches of map-style data sets: seeded by sample, with errors that name the sample, also in workers."""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ...config import Registry
from ...config.errors import MismatchError
from ...hooks.common import convert, is_samples, length_of, samples_in
from ...hooks.control.interruption import STOP_SIGNALS, announce_exit_to_workers, leave_signals_to_parent
from .batch_sampler import PlacedBatch
from .seeding import COLLATE, SAMPLE, generators_for_reading, seed_generators, stream_key

_NOTE = "while reading "
# Errors of a whole batch list so many samples, at most.
_MAX_LISTED = 8

# The queues of each iterator. An error keeps an iterator in a reference cycle. When the garbage collector frees both
# together, it closes the queues first, and the iterator waits 5 s for each worker that it can no longer tell to end.
_queues: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers leave signals to the training process.

    Until ``worker_init_fn`` runs, SIGTERM would end a worker. Workers therefore start with the signals blocked, and
    unblock them after setting the handlers of :func:`leave_signals_to_parent`.
    """

    def __iter__(self) -> Any:
        if not self.num_workers or getattr(self, "_iterator", None) is not None:  # persistent workers are running
            return super().__iter__()
        announce_exit_to_workers()
        can_block = hasattr(signal, "pthread_sigmask")  # not on Windows
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if can_block else []
        try:
            with swapped(self, worker_init_fn=partial(_begin_worker, self.worker_init_fn)):
                batches: Any = super().__iter__()
        finally:
            if can_block:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _queues[batches] = [*batches._index_queues, batches._worker_result_queue]
        for worker in batches._workers:
            worker.terminate = worker.kill  # the last resort of the loader; the workers defer SIGTERM
        return batches


def _begin_worker(then: Callable[[int], Any] | None, worker_id: int) -> None:
    leave_signals_to_parent()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if then is not None:
        then(worker_id)


@contextmanager
def swapped(loader: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a loader temporarily, while it makes its iterator and workers."""
    own = {name: getattr(loader, name) for name in attributes}
    loader.__dict__.update(attributes)  # DataLoader's __setattr__ refuses to change the data set
    try:
        yield
    finally:
        loader.__dict__.update(own)


class SeededLoader(WorkerLoader):
    """A DataLoader of a map-style data set whose samples draw the same random numbers in any process.

    The generators are seeded before each sample, by its position in a :class:`~hookline.engine.data.PlacedBatch` (in
    other batches by its index), and before the batch is collated, by the position of its first sample. A data set with
    ``__getitems__`` is seeded once per batch, by the first position. An error names the sample.

    Args:
        dataset: map-style.
        seed: seed of the run, the same on all ranks. None: reading draws no random numbers.
        **options: as for DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int | None, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.seed = seed

    def __iter__(self) -> Any:
        with swapped(self, dataset=_BatchReader(self.dataset, self.collate_fn, self.seed), collate_fn=identity):
            return super().__iter__()


def identity(batch: Any) -> Any:
    """Collate function for items that are batches already."""
    return batch


class _BatchReader(Dataset[Any]):
    """Reads and collates whole batches of a data set, seeding as :class:`SeededLoader` says.

    Seeding all generators takes longer than reading a small sample, and most data sets draw from one or none. So only
    torch's is always seeded. The first batch that draws from Python's or NumPy's is read again, with that one seeded.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int | None) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._drawn: set[str] = set()
        # A Subset reads whole batches only if its data set does.
        owner = dataset
        while isinstance(owner, Subset) and type(owner).__getitems__ is Subset.__getitems__:
            owner = owner.dataset
        self._fetch = getattr(dataset, "__getitems__", None) if hasattr(owner, "__getitems__") else None

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if self._seed is None:
            return self._read(indices)
        while True:
            with generators_for_reading() as drawn_from:
                batch = self._read(indices)
                drawn = drawn_from()
            if drawn <= self._drawn:
                return batch
            self._drawn |= drawn

    def _read(self, indices: Sequence[int]) -> Any:
        """Return a batch, with the generators seeded for each sample.

        Raises:
            MismatchError: the samples do not make a batch, without a collate function of one's own.
            Exception: of the data set or the collate function, with a note that names the samples.
        """
        samples: Any = None
        try:
            if self._seed is not None:
                epoch, places = (indices.epoch, indices.places) if isinstance(indices, PlacedBatch) else (0, indices)
                samples = self._seeded_samples(indices, places, stream_key(self._seed, epoch, SAMPLE))
                seed_generators(stream_key(self._seed, epoch, COLLATE), places[0], self._drawn)
            elif self._fetch is not None:
                samples = self._fetch(indices)
            else:
                samples = [self._sample(index) for index in indices]
            return self._collate(samples)
        except Exception as error:
            if _has_note(error):
                raise
            names = ", ".join(map(str, indices[:_MAX_LISTED])) + (", ..." if len(indices) > _MAX_LISTED else "")
            error.add_note(f"while making a batch of the samples {names} of {type(self._dataset).__name__}")
            error.add_note('DATALOADER.COLLATE_FN names what makes batches: "pad_collate", or a function of your own')
            if samples is None or self._collate is not default_collate:
                raise
            clear = MismatchError(f"the samples do not make a batch: {error}")
            clear.__notes__ = error.__notes__
            raise clear from error

    def _seeded_samples(self, indices: Sequence[int], places: Sequence[int], key: int) -> Any:
        if self._fetch is not None:
            seed_generators(key, places[0], self._drawn)
            return self._fetch(indices)
        samples = []
        for place, index in zip(places, indices, strict=True):
            seed_generators(key, place, self._drawn)
            samples.append(self._sample(index))
        return samples

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            note_sample(error, f"sample {index} of {type(self._dataset).__name__}")
            raise


def note_sample(error: Exception, name: str) -> None:
    """Add a note to an error that names the sample that was read."""
    if not _has_note(error):
        error.add_note(f"{_NOTE}{name}")


def _has_note(error: Exception) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def iterate(loader: Any) -> Iterator[Any]:
    """``iter(loader)``, with a plain loop for a DataLoader without workers. The batches are the same."""
    if (
        type(loader) not in (DataLoader, SeededLoader)
        or loader.num_workers
        or loader.pin_memory
        or loader.batch_sampler is None
        or isinstance(loader.dataset, IterableDataset)
        or torch.autograd._profiler_enabled()
    ):
        return iter(loader)
    indices = iter(loader.batch_sampler)
    # iter() draws a seed for its workers here. Draw it too, so that later random numbers are the same.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    reader = _BatchReader(loader.dataset, loader.collate_fn, getattr(loader, "seed", None))
    return _batches(reader.__getitems__, indices)


def _batches(read: Callable[[Any], Any], batches: Iterator[Any]) -> Iterator[Any]:
    for indices in batches:
        try:
            made = [read(indices)]
        except StopIteration:  # the caller reports that the data ended early
            return
        yield made.pop()  # this frame keeps no batch alive


class LimitedLoader:
    """The first batches of a loader, in each pass. Other attributes are the loader's.

    Args:
        loader: any iterable of batches.
        limit: number of batches, at most.
    """

    def __init__(self, loader: Any, limit: int) -> None:
        self.loader = loader
        self.limit = limit

    def __len__(self) -> int:
        own = length_of(self.loader)
        return self.limit if own is None else min(self.limit, own)

    def __iter__(self) -> Iterator[Any]:
        return islice(iterate(self.loader), self.limit)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # asked for while the object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)


def whole_pass(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield each batch of a loader once.

    Raises:
        RuntimeError: the loader ended before its length, or something in it called ``sys.exit()``.
    """
    length, read, batches = exact_length(loader), 0, iterate(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except SystemExit as error:  # which could end the program with success
            raise RuntimeError(f"the data loader called sys.exit({error.code!r}) after {read} batches") from error
        read += 1
        yield batch
    if length is not None and read < length:
        raise ended_early(read, length)


def exact_length(loader: Any) -> int | None:
    """Number of batches of a pass, or None if unknown.

    The length of a loader over an IterableDataset is only an estimate: workers may split the data unevenly.
    """
    return None if isinstance(getattr(loader, "dataset", None), IterableDataset) else length_of(loader)


def ended_early(read: int, length: int) -> RuntimeError:
    """The error for a loader that ends before its length."""
    return RuntimeError(
        f"the data loader ended after {read} of its {length} batches: a StopIteration was raised in its data set, "
        "collate function or sampler, or its len() is too large"
    )


# ---------------------------------------------------------------------------- batches

COLLATE_REGISTRY = Registry("COLLATE", Callable)
"""Functions from a list of samples to a batch, or classes of callable objects, for ``DATALOADER.COLLATE_FN.NAME``."""

COLLATE_REGISTRY.register(default_collate)


@COLLATE_REGISTRY.register()
def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples unchanged."""
    return batch


@COLLATE_REGISTRY.register()
def pad_collate(samples: list[Any], padding: Any = 0) -> Any:
    """Make a batch of sequences of different lengths: they are padded at the end to the longest one.

    Sequences are tensors, NumPy arrays and lists of numbers. Everything else is collated as usual.

    Args:
        samples: N sequences (length, ...), numbers and strings, alone or in dicts or tuples.
        padding: the number that fills up tensors; for dicts, also ``{entry: number}``, with 0 for other entries.

    Returns:
        The structure of one sample. Sequences are tensors (N, longest length, ...), numbers are tensors (N,).
    """
    first = samples[0]
    if isinstance(first, Mapping):
        fill = padding if isinstance(padding, Mapping) else dict.fromkeys(first, padding)
        return {key: pad_collate([sample[key] for sample in samples], fill.get(key, 0)) for key in first}
    if isinstance(first, list) and all(isinstance(value, float | int) for sample in samples for value in sample):
        dtype = torch.tensor(list(chain(*samples))).dtype
        samples = [torch.tensor(sample, dtype=dtype) for sample in samples]
    elif isinstance(first, list | tuple):
        return tuple(pad_collate(list(values), padding) for values in zip(*samples, strict=True))
    if isinstance(samples[0], torch.Tensor | np.ndarray) and samples[0].ndim:
        return pad_sequence(list(map(torch.as_tensor, samples)), batch_first=True, padding_value=padding)
    return default_collate(samples)


def batch_size_of(batch: Any) -> int:
    """Number N of samples in a batch: of its first tensor (N, ...), or of a list of samples.

    Raises:
        TypeError: the batch has no tensor and no list.
    """
    size = samples_in(batch)
    if size is None:
        raise TypeError(f"cannot tell the number of samples of a batch of type {type(batch).__name__}")
    return size


def split_batch(batch: Any, parts: int, *, exact: bool = False) -> Iterator[tuple[Any, float]]:
    """Split a batch into ``parts`` of nearly equal size.

    Args:
        batch: tensors (N, ...), in any nesting of tuples, lists and dicts; or a
            list of samples of any kind.
        parts: number of parts; fewer if there are fewer samples.
        exact: repeat the last part with a share of 0 up to ``parts``, for ranks that must have the same number of
            parts.

    Returns:
        Pairs of a part, with tensors (n, ...) for tensors (N, ...), and its share n / N. The shares add up to 1.
    """
    size = batch_size_of(batch)
    for part in range(min(parts, size)):
        start, end = size * part // min(parts, size), size * (part + 1) // min(parts, size)
        piece = convert(batch, partial(_rows, start, end, size))
        yield piece, (end - start) / size
    if exact and size:
        for _ in range(parts - size):
            yield piece, 0.0


def _rows(start: int, end: int, size: int, part: Any) -> Any:
    """Rows of a tensor over all samples, or samples of a list; None for another part of a batch."""
    if isinstance(part, torch.Tensor):
        return part[start:end] if part.ndim and part.shape[0] == size else part
    return part[start:end] if is_samples(part) else None


def move_to_device(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor in a batch to a device.

    Copies to CUDA do not block: later work on the same stream waits for them. Copies in other directions block, since
    the host could read a tensor before it has arrived.

    Args:
        batch: tensors of any shape, objects with a method ``to``, and dicts, lists, tuples and named tuples of these.
            Other values (strings, numbers) are kept.
        device: the target device.

    Returns:
        The same structure. Tensors that are already on the device are not copied.
    """
    device = torch.device(device)
    non_blocking = device.type == "cuda"

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=non_blocking)
        return value.to(device) if hasattr(value, "to") else None

    return convert(batch, move)
