"""Read batches of map-style data sets: seeded by sample, with errors that name the sample, also in workers."""

import signal
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, default_collate

from ...config.errors import MismatchError
from ...hooks.control.interruption import STOP_SIGNALS, announce_exit_to_workers, leave_signals_to_parent
from .batch_sampler import PlacedBatch
from .seeding import COLLATE, GENERATORS, SAMPLE, Generator, seed_generators, stream_key

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
    torch's, which takes 1 µs, and those are seeded that the data set has drawn from. A batch that draws from another
    one is read again.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int | None) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        # A Subset reads whole batches only if its data set does.
        owner = dataset
        while isinstance(owner, Subset) and type(owner).__getitems__ is Subset.__getitems__:
            owner = owner.dataset
        self._fetch = getattr(dataset, "__getitems__", None) if hasattr(owner, "__getitems__") else None
        # Generators that the data set draws from, by their numbers in GENERATORS. Torch's is always seeded: a data set
        # may read torch.initial_seed(), or draw in torch.random.fork_rng(), and its state is then unchanged.
        self._drawn = [len(GENERATORS) - 1]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if self._seed is None:
            return self._read(indices)
        batch, drawn = self._read_isolated(indices)
        while not drawn.issubset(self._drawn):
            self._drawn = sorted(drawn.union(self._drawn))
            batch, drawn = self._read_isolated(indices)
        return batch

    def _read_isolated(self, indices: Sequence[int]) -> tuple[Any, set[int]]:
        """Return a batch, and the generators it drew from. They are restored, since the model draws from them too."""
        before: list[Any] = [generator.get() for generator in GENERATORS]
        drawn: set[int] = set()
        try:
            batch = self._read(indices, [GENERATORS[number] for number in self._drawn])
        finally:
            for number, (generator, state) in enumerate(zip(GENERATORS, before, strict=True)):
                if not generator.unchanged(state):
                    drawn.add(number)
                    generator.set(state)
        return batch, drawn

    def _read(self, indices: Sequence[int], generators: Sequence[Generator] = ()) -> Any:
        """Return a batch, with the generators seeded for each sample.

        Raises:
            MismatchError: the samples do not make a batch, without a collate function of one's own.
            Exception: of the data set or the collate function, with a note that names the samples.
        """
        samples: Any = None
        try:
            if generators:
                epoch, places = (indices.epoch, indices.places) if isinstance(indices, PlacedBatch) else (0, indices)
                samples = self._seeded_samples(indices, places, stream_key(self._seed or 0, epoch, SAMPLE), generators)
                seed_generators(stream_key(self._seed or 0, epoch, COLLATE), places[0], generators)
            elif self._fetch is not None:
                samples = self._fetch(indices)
            else:
                samples = [self._sample(index) for index in indices]
            return self._collate(samples)
        except Exception as error:
            if _has_note(error):
                raise
            names = [_sample_name(self._dataset, index) for index in islice(indices, _MAX_LISTED)]
            error.add_note(f"while making a batch of {', '.join(names)}{', ...' if len(names) == _MAX_LISTED else ''}")
            error.add_note('DATALOADER.COLLATE_FN names what makes batches: "pad_collate", or a function of your own')
            if samples is None or self._collate is not default_collate:
                raise
            clear = MismatchError(f"the samples do not make a batch: {error}")
            clear.__notes__ = error.__notes__
            raise clear from error

    def _seeded_samples(
        self, indices: Sequence[int], places: Sequence[int], key: int, generators: Sequence[Generator]
    ) -> Any:
        if self._fetch is not None:
            seed_generators(key, places[0], generators)
            return self._fetch(indices)
        samples = []
        for place, index in zip(places, indices, strict=True):
            seed_generators(key, place, generators)
            samples.append(self._sample(index))
        return samples

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            note_sample(error, _sample_name(self._dataset, index))
            raise


def note_sample(error: Exception, name: str) -> None:
    """Add a note to an error that names the sample that was read."""
    if not _has_note(error):
        error.add_note(f"{_NOTE}{name}")


def _has_note(error: Exception) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def _sample_name(dataset: Any, index: Any) -> str:
    """Name a sample: its index in the data set itself, not in a ``Subset`` or ``ConcatDataset`` of it."""
    part = ""
    try:
        while isinstance(dataset, Subset | ConcatDataset):
            if isinstance(dataset, Subset):
                dataset, index = dataset.dataset, dataset.indices[index]
                continue
            number = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset, part = dataset.datasets[number], f" (set {number} of the concatenated ones)"
    except (IndexError, TypeError):
        pass  # the index itself is the error
    return f"sample {index} of {type(dataset).__name__}{part}"


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


def length_of(loader: Any) -> int | None:
    """Return ``len(loader)``; None for a generator, an iterable data set, an endless sampler."""
    try:
        return len(loader)
    except TypeError:
        return None


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
