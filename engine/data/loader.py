"""Read batches of map-style data sets: seeded by sample, with errors that name the sample, also in workers."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, default_collate

from ...config import ConfigError
from ...config.errors import MismatchError
from ...hooks.common import convert, length_of
from .batch_sampler import PlacedBatch
from .batches import CollateFn, SizedBatch, cut, present, trivial_batch_collator
from .datasets import MapDataset
from .seeding import COLLATE, SAMPLE, generators_for_reading, is_deterministic, seed_generators, stream_key
from .workers import WorkerLoader, swapped

_NOTE = "while reading "
# Errors of a whole batch list so many samples, at most.
_MAX_LISTED = 8


class SeededLoader(WorkerLoader):
    """A DataLoader of a map-style data set whose samples draw the same random numbers in any process.

    The generators are seeded before each sample, by its position in a batch of a
    :class:`~hookline.engine.data.GlobalBatchSampler` (in other batches by its index), and before the batch is collated,
    by the position of its first sample. A data set with ``__getitems__`` is seeded once per batch, by the first
    position. Nothing is seeded for a data set that is known to be deterministic. An error names the sample.

    Args:
        dataset: map-style.
        seed: seed of the run, the same on all ranks.
        make_batches: makes the batch sampler again when the length of the data set has changed.
        **options: as for DataLoader.

    Attributes:
        sample_seed: the seed; None if reading draws no random numbers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        make_batches: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, seed=seed, **options)
        self.sample_seed = None if is_deterministic(dataset, self.collate_fn) else seed
        self._make_batches = make_batches
        self._size = length_of(dataset)

    def follow_length(self) -> None:
        """Use the present length of the data set, for a new epoch.

        Raises:
            ConfigError: it has changed, and persistent workers read a copy of the data set with the former length.
        """
        size = length_of(self.dataset)
        if size == self._size or self._make_batches is None:
            return
        if self._iterator is not None or "_reader" in vars(self):
            raise ConfigError(
                f"DATALOADER.PERSISTENT_WORKERS: {type(self.dataset).__name__} has {size} samples instead of "
                f"{self._size}, and persistent workers keep their copy of a data set: set it to False"
            )
        self._size = size
        self.__dict__["batch_sampler"] = self._make_batches()  # DataLoader's __setattr__ refuses it

    def _get_iterator(self) -> Any:
        reader = _BatchReader(self.dataset, self.collate_fn, self.sample_seed)
        with swapped(self, dataset=reader, collate_fn=trivial_batch_collator):
            return super()._get_iterator()


class Collated(list[SizedBatch]):
    """What is read at once: a batch or its micro-batches, each with its number of samples, None if it is not known."""


class Collate:
    """Makes :class:`Collated` of a list of samples, which is cut into micro-batches before they are collated.

    Args:
        collate: makes a batch of a list of samples. Samples that are None do not count.
        parts: number of micro-batches, at most.
    """

    def __init__(self, collate: CollateFn, parts: int) -> None:
        self.collate = collate
        self.parts = parts

    def __call__(self, samples: Any, number: int | None = None) -> Collated:
        """Return the micro-batches; if a data set with ``__getitems__`` returns no list, its batch of ``number``."""
        if not isinstance(samples, list):
            return Collated([(self.collate(samples), number)])
        pieces = cut(samples, self.parts)
        if self.parts > 1:
            pieces = list(filter(present, pieces)) or pieces[:1]
        return Collated([(self.collate(piece), present(piece)) for piece in pieces])


class _BatchReader(Dataset[Any]):
    """Reads and collates whole batches of a data set, seeded as :class:`SeededLoader` says.

    Seeding all generators takes longer than reading a small sample, and most data sets draw from one or none. So only
    torch's is always seeded. The first batch that draws from Python's or NumPy's is read again, with that one seeded.

    Args:
        dataset: map-style.
        collate: makes a batch of a list of samples, or :class:`Collate`.
        seed: seed of the run; None: nothing is seeded.
    """

    def __init__(self, dataset: Any, collate: CollateFn, seed: int | None) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._drawn: set[str] = set()
        # A Subset reads whole batches only if its data set does.
        owner = dataset
        while isinstance(owner, Subset) and type(owner).__getitems__ is Subset.__getitems__:
            owner = owner.dataset
        self._reads_batches = getattr(owner, "__getitems__", None) is not None  # None: as for torch, it does not
        self._fetch = dataset.__getitems__ if self._reads_batches else self._samples

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch.

        Raises:
            MismatchError: the samples do not make a batch, without a collate function of one's own.
            Exception: of the data set or the collate function, with a note that names the samples.
        """
        if self._seed is None:
            return self._make(indices, self._fetch)
        while True:
            with generators_for_reading() as drawn_from:
                batch = self._make(indices, partial(self._seeded, self._seed))
                drawn = drawn_from()
            if drawn <= self._drawn:
                return batch
            self._drawn |= drawn

    def _make(self, indices: Sequence[int], fetch: Callable[[Sequence[int]], Any]) -> Any:
        samples, collate = None, self._collate
        try:
            samples = fetch(indices)
            return collate(samples, len(indices)) if isinstance(collate, Collate) else collate(samples)
        except Exception as error:
            if _has_note(error):
                raise
            names = ", ".join(map(str, indices[:_MAX_LISTED])) + (", ..." if len(indices) > _MAX_LISTED else "")
            error.add_note(f"while making a batch of the samples {names} of {type(self._dataset).__name__}")
            error.add_note('DATALOADER.COLLATE_FN names what makes batches: "pad_collate", or a function of your own')
            if samples is None or getattr(collate, "collate", collate) is not default_collate:
                raise
            clear = MismatchError(f"the samples do not make a batch: {error}")
            clear.__notes__ = error.__notes__
            raise clear from error

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        return list(map(self._sample, indices))

    def _seeded(self, seed: int, indices: Sequence[int]) -> Any:
        """Read samples, and leave the generators seeded for the collate function."""
        epoch, places = (indices.epoch, indices.places) if isinstance(indices, PlacedBatch) else (0, indices)
        key = stream_key(seed, epoch, SAMPLE)
        if self._reads_batches:
            seed_generators(key, places[0], self._drawn)
            samples = self._fetch(indices)
        else:
            samples = []
            for place, index in zip(places, indices, strict=True):
                seed_generators(key, place, self._drawn)
                samples.append(self._sample(index))
        seed_generators(stream_key(seed, epoch, COLLATE), places[0], self._drawn)
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


def iterate(loader: Any, parts: int = 1) -> Iterator[Any]:
    """Read the batches of a loader.

    A DataLoader whose collate function gets samples makes ``parts`` micro-batches of them: :class:`Collated`. Batches
    of other loaders are as they are. A DataLoader without workers is read by a plain loop, which gives the same.
    """
    if isinstance(loader, LimitedLoader):
        return islice(iterate(loader.loader, parts), loader.limit)
    if (
        type(loader) in (DataLoader, SeededLoader)
        and not (loader.num_workers or loader.pin_memory or torch.autograd._profiler_enabled())
        and not isinstance(loader.dataset, IterableDataset)
    ):
        indices = iter(loader._index_sampler)
        # iter() draws a seed for its workers here. Draw it too, so that later random numbers are the same.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if loader.batch_sampler is None:  # the samples are batches already
            return map(loader.collate_fn, map(loader.dataset.__getitem__, indices))
        seed = loader.sample_seed if isinstance(loader, SeededLoader) else None
        return map(_BatchReader(loader.dataset, Collate(loader.collate_fn, parts), seed).__getitems__, indices)
    if not collates(loader):
        return iter(loader)
    collate = Collate(loader.collate_fn, parts)
    if loader.persistent_workers:  # they keep the function
        loader = _reader_of(loader, collate)
    with swapped(loader, collate_fn=collate):
        return iter(loader)


def _reader_of(loader: Any, collate: Collate) -> Any:
    """Return a copy of a loader with workers of its own; the loader itself if it has a position or an epoch."""
    if hasattr(loader, "state_dict") or hasattr(loader, "set_epoch"):
        return loader
    parts, reader = vars(loader).get("_reader", (0, None))
    if parts != collate.parts:
        loader._reader = (collate.parts, reader := copy.copy(loader))
        reader._iterator = None
    return reader


def collates(loader: object) -> bool:
    """Return whether a loader passes lists of samples to its ``collate_fn``, and returns what that makes of them."""
    if not isinstance(loader, DataLoader) or (loader.batch_sampler is None and not isinstance(loader, WorkerLoader)):
        return False
    definer = type(loader).__iter__.__module__.partition(".")[0]
    return definer in ("torch", "torchdata", __name__.partition(".")[0])


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
        return islice(self.loader, self.limit)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # asked for while the object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)


def whole_pass(loader: Iterable[Any]) -> Iterator[SizedBatch]:
    """Yield each batch of a loader once, and its number of samples; None if the loader does not know it.

    Raises:
        RuntimeError: the loader ended before its length.
    """
    length, read = exact_length(loader), 0
    for found in iterate(loader):
        read += 1
        [(batch, number)] = found if type(found) is Collated else [(found, None)]
        yield batch, number
    if length is not None and read < length:
        raise ended_early(read, length)


def begin_dataset_epoch(dataset: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a data set, or of those that a Subset, MapDataset or ConcatDataset is made of."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, Subset | MapDataset):
        begin_dataset_epoch(dataset.dataset if isinstance(dataset, Subset) else dataset._dataset, epoch)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            begin_dataset_epoch(part, epoch)
        dataset.cumulative_sizes = dataset.cumsum(dataset.datasets)  # hooks may have changed their lengths


def exact_length(loader: object) -> int | None:
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
