"""Loaders of iterable data sets.

A stream that one process reads, or a :class:`ShardedIterable`, has a position that can be saved: its batches do not
depend on the number of ranks and workers. That of a data set that splits itself between several ranks or workers, as is
torch's convention, is one of each rank.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import itemgetter
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ...config import ConfigError
from .. import comm
from .batch_sampler import has_state
from .batches import CollateFn, trivial_batch_collator
from .loader import Collate, note_sample
from .seeding import (
    COLLATE,
    SAMPLE,
    TRANSFORM,
    generators_for_reading,
    is_deterministic,
    seed_generators,
    seeded,
    stream_key,
)
from .workers import WorkerLoader, swapped

logger = logging.getLogger(__name__)

Position: TypeAlias = dict[str, Any]


class ShardedIterable(IterableDataset[Any]):
    """One stream of samples that is split between ranks and loader workers.

    Every worker on every rank reads the whole source, so reading should be cheap: file names, records, bytes. Expensive
    work (decoding, augmentation) belongs in ``transform``, which is applied only to the samples that are used.

    :func:`build_train_loader` gives the same global batches on any number of ranks and workers, and all ranks end at
    the same step. Iterated directly, it yields every n-th sample, with n = ranks times workers.

    Args:
        source: yields the same samples in the same order on every rank and in every worker. Random numbers from the
            global generators are the same everywhere. These are used if the source has them:
            ``set_epoch(epoch)`` before each pass; ``state_dict()`` and ``load_state_dict(state)``, after which
            ``iter(source)`` continues after the last sample read; ``len()``; ``deterministic = True`` if it draws no
            random numbers.
        transform: makes a sample, such as tensors (...), from an item of the source.
    """

    def __init__(self, source: Iterable[Any], transform: Callable[[Any], Any] | None = None) -> None:
        self.source = source
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        shard, shards = comm.get_data_rank() * workers + worker, comm.get_data_size() * workers
        for sample in islice(self.source, shard, None, shards):
            yield sample if self.transform is None else self.transform(sample)


class PositionedLoader(WorkerLoader):
    """A loader with a position that can be saved.

    Attributes:
        epoch: of the next ``iter()``.
        beginning: the entries of the position at the beginning of an epoch.
    """

    epoch = 0
    beginning: Position
    _position: Position | None = None  # after the last batch
    _start: Position | None = None  # of the next pass, if it was loaded

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``; it is passed to the data set if that has ``set_epoch``."""
        self.epoch = epoch

    def state_dict(self) -> Position:
        """The position after the last batch returned."""
        return self._start or self._position or {"epoch": self.epoch, **self.beginning}

    def load_state_dict(self, state: Position) -> None:
        """Start the next ``iter()`` at a saved position, if it is of the same epoch and read in the same way."""
        self._start = state

    def _begin(self, name: str) -> Position:
        """Return the position to start at."""
        start, self._start = self._start, None
        self._position = {"epoch": self.epoch, **self.beginning}
        if start is not None and start.get("epoch", self.epoch) == self.epoch:
            known = [key for key in ("samples", "batches") if key in self.beginning and key in start]
            if known and all(start.get(key) == self.beginning.get(key) for key in ("ranks", "workers")):
                self._position = start
            else:
                logger.warning("%s is read by another number of ranks or workers: its epoch starts again", name)
        return self._position


class SplitLoader(PositionedLoader):
    """Batches of an iterable data set that splits itself between ranks and workers.

    Each worker makes batches of its part. A resume reads the batches before its position again, and discards them. It
    starts the epoch again if the numbers of ranks or workers are others: then the parts are others.

    Args:
        dataset: yields other samples in each worker of each rank. ``set_epoch(epoch)`` is called if it exists.
        batch_size: samples per global batch, a multiple of the number of ranks. A rank's batch has tensors
            (batch_size / ranks, ...).
        seed: seed of the random numbers, together with rank and epoch.
        **options: as for DataLoader.
    """

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, *, seed: int, **options: Any) -> None:
        ranks = comm.get_data_size()
        if batch_size % ranks:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE: is {batch_size}, and {type(dataset).__name__} splits itself between {ranks} "
                "ranks: use a multiple of their number"
            )
        super().__init__(dataset, seed=seed, batch_size=batch_size // ranks, **options)
        self.beginning = {"batches": 0, "ranks": ranks, "workers": self.num_workers}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Any:
        name = type(self.dataset).__name__
        known = self._begin(name)["batches"]
        if known:
            logger.warning("To resume, %d batches of %s are read and discarded", known, name)
        key = stream_key(self.seed, self.epoch, comm.get_data_rank())
        self.generator.manual_seed(key >> 1)  # seeds the workers; without them this process draws what a batch needs
        with nullcontext() if self.num_workers else seeded(key, 0):
            return self._follow(super().__iter__(), known, key)

    def _follow(self, batches: Iterator[Any], known: int, key: int) -> Iterator[Any]:
        for number in count(1):
            with nullcontext() if self.num_workers else seeded(key, number):
                batch = next(batches, self)
            if batch is self:
                return
            if number > known:
                self._position = {"epoch": self.epoch, **self.beginning, "batches": number}
                yield batch

    def __len__(self) -> int:
        raise TypeError("the number of batches is unknown: the data set splits itself between ranks and workers")


class StreamLoader(PositionedLoader):
    """Batches of one stream, with a position that can be saved: epoch, samples over all ranks, and the source's state.

    Args:
        dataset: a :class:`ShardedIterable`; or another iterable, which then is its source.
        batch_size: samples per global batch, at least one per rank. A batch has tensors (n, ...) of this rank's n.
        seed: seed of the run, the same on all ranks.
        drop_last: drop the last batch of the stream if it is not full.
        collate_fn: makes a batch from a list of samples.
        keep_rest: keep the last batch even if some ranks have no sample of it, and so one batch fewer. For evaluation;
            in training, ranks must take the same number of steps.
        **options: as for DataLoader.
    """

    beginning = {"samples": 0, "source": None}

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        seed: int,
        drop_last: bool = False,
        collate_fn: CollateFn | None = None,
        keep_rest: bool = False,
        **options: Any,
    ) -> None:
        stream = dataset if isinstance(dataset, ShardedIterable) else ShardedIterable(dataset)
        super().__init__(stream, seed=seed, batch_size=None, collate_fn=collate_fn or default_collate, **options)
        rank, ranks = comm.get_data_rank(), comm.get_data_size()
        if batch_size < ranks:
            raise ConfigError(f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {ranks} ranks")
        min_size = batch_size if drop_last else 1 if keep_rest else ranks
        self._batches = _BatchStream(stream, self.collate_fn, seed, batch_size, min_size, rank, ranks)

    def __iter__(self) -> Any:
        name = type(self._batches.source).__name__
        start = self._begin(name)
        if start["samples"] and start["source"] is None:
            logger.warning(
                "%s has no state_dict(): to resume, %d samples are read and discarded", name, start["samples"]
            )
        with swapped(
            self,
            dataset=replace(self._batches, start=start, collate=self.collate_fn),
            collate_fn=trivial_batch_collator,
        ):
            return self._follow(super().__iter__())

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch, self._position in batches:
            yield batch

    def __len__(self) -> int:
        """Batches per pass. A TypeError if the source has no length."""
        full, rest = divmod(len(self._batches.source), self._batches.size)
        return full + (rest >= self._batches.min_size)


@dataclass(eq=False)
class _BatchStream(IterableDataset[Any]):
    """What workers read: pairs of a batch and the position after it. Each sample is seeded by its position.

    Attributes:
        dataset: what is read.
        collate: makes a batch from a list of samples.
        seed: seed of the run.
        size: samples per batch over all ranks.
        min_size: the last batch is dropped if it has fewer samples.
        rank: the rank whose samples are read.
        world_size: number of ranks.
        start: the position to start at: see :meth:`StreamLoader.state_dict`.
    """

    dataset: ShardedIterable
    collate: CollateFn
    seed: int
    size: int
    min_size: int
    rank: int
    world_size: int
    start: Position = field(default_factory=dict)

    @property
    def source(self) -> Any:
        return self.dataset.source

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        position, items = self.start["samples"], None
        for number in count():
            with generators_for_reading():
                items = self._open() if items is None else items
                samples = self._take(items, position, self.size)
                length = len(samples)
                if length < self.min_size or not samples:
                    return
                first, end = (length * rank // self.world_size for rank in (self.rank, self.rank + 1))
                mine = number % workers == worker and end > first  # workers take turns
                if mine:
                    batch = self._batch(samples[first:end], position + first)
                position += length
            if mine:
                state = self.source.state_dict() if has_state(self.source) else None
                yield batch, {**self.start, "samples": position, "source": state}

    def _open(self) -> Iterator[Any]:
        """Return an iterator of the source that is at the position to start at."""
        source, (epoch, start, state) = self.source, itemgetter("epoch", "samples", "source")(self.start)
        seed_generators(self._key(SAMPLE), -1)  # for random numbers drawn before the first sample
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        if state is not None:
            source.load_state_dict(state)
        items = iter(source)
        for position in range(0, start, 1024) if state is None else ():
            self._take(items, position, min(1024, start - position))
        return items

    def _take(self, items: Iterator[Any], position: int, number: int) -> list[Any]:
        """Return the next ``number`` samples, or fewer at the end."""
        taken, key, still = list[Any](), self._key(SAMPLE), is_deterministic(self.source)
        try:
            for place in range(position, position + number):
                if not still:
                    seed_generators(key, place)
                taken.append(next(items))
        except StopIteration:
            pass
        except Exception as error:
            note_sample(error, f"sample {position + len(taken)} of {type(self.source).__name__}")
            raise
        return taken

    def _batch(self, samples: list[Any], place: int) -> Any:
        transform = self.dataset.transform
        if transform is not None:
            made, key = [], self._key(TRANSFORM)
            for number, sample in enumerate(samples, place):
                seed_generators(key, number)
                try:
                    made.append(transform(sample))
                except Exception as error:
                    note_sample(error, f"sample {number} of the stream, in the transform")
                    raise
            samples = made
        own = self.collate.collate if isinstance(self.collate, Collate) else self.collate
        if not is_deterministic([], own):
            seed_generators(self._key(COLLATE), place)
        return self.collate(samples)

    def _key(self, purpose: int) -> int:
        return stream_key(self.seed, self.start["epoch"], purpose)


def _worker() -> tuple[int, int]:
    """Index of this worker and number of workers; (0, 1) in the training process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
