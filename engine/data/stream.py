"""Loaders of iterable data sets, with a position that can be saved.

There are two kinds of iterable data sets. A :class:`ShardedIterable` is one stream, which is split into global batches:
its batches do not depend on the number of ranks and workers. Any other iterable data set splits itself between ranks
and workers, as is torch's convention, and each shard is read to its end as a stream of its own.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ...config import ConfigError
from ...hooks.common.rng import preserve_rng
from .. import comm
from .batch_sampler import has_state, takes_start
from .loader import WorkerLoader, identity, note_sample, swapped
from .seeding import COLLATE, SAMPLE, TRANSFORM, is_deterministic, seed_generators, stream_key

logger = logging.getLogger(__name__)


class ShardedIterable(IterableDataset[Any]):
    """One stream of samples that is split between ranks and loader workers.

    Every worker on every rank reads the whole source, so reading should be cheap: file names, records, bytes. Expensive
    work (decoding, augmentation) belongs in ``transform``, which is applied only to the samples that are used.

    :func:`build_train_loader` gives the same global batches on any number of ranks and workers, and all ranks end at
    the same step. Iterated directly, it yields every n-th sample, with n = ranks times workers.

    Args:
        source: yields the same samples in the same order on every rank and in every worker. Random numbers from the
            global generators are the same everywhere. These are used if the source has them:
            ``set_epoch(epoch)`` before each pass; ``set_epoch(epoch, start)`` if it can skip ``start`` samples;
            ``state_dict()`` and ``load_state_dict(state)``, of the source or its iterator, after which ``iter(source)``
            continues after the last sample read; ``len()``; ``deterministic = True`` if it draws no random numbers.
        transform: makes a sample from an item of the source.
    """

    def __init__(self, source: Iterable[Any], transform: Callable[[Any], Any] | None = None) -> None:
        self.source = source
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        shard, shards = comm.get_data_rank() * workers + worker, comm.get_data_size() * workers
        for sample in islice(self.source, shard, None, shards):
            yield sample if self.transform is None else self.transform(sample)


class StreamLoader(WorkerLoader):
    """Batches of an iterable data set, with a position that can be saved.

    Args:
        dataset: a :class:`ShardedIterable`, or one that splits itself (by ``get_worker_info()`` and
            ``hookline.engine.comm``).
        batch_size: samples per global batch, at least one per rank.
        seed: seed of the run, the same on all ranks.
        drop_last: drop the last batch of the stream, or of each shard, if it is not full.
        collate_fn: makes a batch from a list of samples.
        keep_rest: keep the last batch of a :class:`ShardedIterable` even if some ranks have no sample of it, and so one
            batch fewer. For evaluation; in training, ranks must take the same number of steps.
        rank: the rank to read for. Default: this process's data rank.
        world_size: number of ranks. Default: the number of data ranks.
        **options: as for DataLoader.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        seed: int,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        keep_rest: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=collate_fn or default_collate, **options)
        rank = comm.get_data_rank() if rank is None else rank
        self._world_size = comm.get_data_size() if world_size is None else world_size
        if batch_size < self._world_size:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {self._world_size} ranks"
            )
        self._sharded = isinstance(dataset, ShardedIterable)
        self._source: Any = dataset.source if isinstance(dataset, ShardedIterable) else dataset
        self._parts = _Parts(batch_size, rank, self._world_size, drop_last, keep_rest)
        self._stamp: tuple[int, ...] = (seed,)
        if not self._sharded:  # each shard is a stream of its own, with this rank's part of the batch size
            first, end = self._parts.part(batch_size)
            self._parts = _Parts(end - first, 0, 1, drop_last, keep_rest)
            self._stamp = (seed, rank)
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._progress: dict[str, Any] = {}
        self._stream: _BatchStream | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``; passed to the data set if it has ``set_epoch``."""
        self._epoch = epoch

    def __iter__(self) -> Any:
        position, self._resume = self._resume, None
        if position is None or position["epoch"] != self._epoch:
            position = self._beginning()
        self._check(position)
        seeks = self._sharded and takes_start(self._source)
        discarded = sum(samples for samples, state in position["shards"] if state is None)
        if discarded and not seeks:
            name = type(self._source).__name__
            logger.warning("%s has no state_dict(): to resume, %d samples are read and discarded", name, discarded)
        self._progress = {**position, "shards": list(position["shards"])}
        self._stream = _BatchStream(self.dataset, self._parts, self.collate_fn, self._stamp, position, seeks)
        with swapped(self, dataset=self._stream, collate_fn=identity):
            items = super().__iter__()
        return self._consume(items)

    def _consume(self, items: Iterator[Any]) -> Iterator[Any]:
        progress = self._progress
        for batch, shard, samples, source in items:
            if samples is None:  # only advances to the next worker
                continue
            progress["shards"][shard] = [samples, source]
            progress["last"] = shard
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned. For a data set that splits itself, of this rank."""
        if self._resume is not None:
            return self._resume
        state = self._progress or self._beginning()
        shards = list(state["shards"])
        if not self.num_workers and self._stream is not None and self._stream.reader is not None:
            # Without workers, the state of the source is current. Workers read ahead, so they send it with batches.
            shards = [[self._stream.reader.position, self._stream.reader.state_dict()]]
        return {**state, "shards": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next ``iter()`` at a saved position, if it is of the same epoch."""
        self._resume = state

    def __len__(self) -> int:
        """Batches per pass on this rank.

        Raises:
            TypeError: unknown: the data set has no length, or splits itself into several shards.
        """
        if not self._sharded and self._world_size * max(1, self.num_workers) > 1:
            raise TypeError("the number of batches is unknown: the data set splits itself between ranks and workers")
        return self._parts.number(len(self._source))

    def _beginning(self) -> dict[str, Any]:
        """The position of an epoch's start: samples read and the source's state, for each stream that is read."""
        if self._sharded:
            return {"epoch": self._epoch, "shards": [[0, None]]}
        shards = [[0, None] for _ in range(max(1, self.num_workers))]
        return {"epoch": self._epoch, "shards": shards, "last": -1, "world_size": self._world_size}

    def _check(self, position: dict[str, Any]) -> None:
        """Check that a saved position has the shards of this run."""
        if "shards" not in position or self._sharded == ("world_size" in position):
            raise ConfigError("DATASETS.TRAIN: the checkpoint's position is of another kind of data set")
        if self._sharded:
            return
        before = len(position["shards"]), position["world_size"]
        now = max(1, self.num_workers), self._world_size
        if before != now:
            raise ConfigError(
                f"DATALOADER.NUM_WORKERS: {type(self.dataset).__name__} splits itself between ranks and workers, and "
                f"was read by {before[0]} worker(s) on {before[1]} rank(s). In the middle of an epoch it cannot "
                f"continue with {now[0]} on {now[1]}. Restore both numbers, or make the data set a ShardedIterable"
            )


@dataclass(frozen=True)
class _Parts:
    """How a stream is split into global batches, and each batch into parts of ranks."""

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    keep_rest: bool

    def part(self, length: int) -> tuple[int, int]:
        """Start and end of the rank's part of a batch of ``length`` samples."""
        return length * self.rank // self.world_size, length * (self.rank + 1) // self.world_size

    def counts(self, length: int) -> bool:
        """Whether ``length`` samples make a batch."""
        least = 1 if self.keep_rest else self.world_size
        return length == self.batch_size or (length >= least and not self.drop_last)

    def number(self, samples: int) -> int:
        full, rest = divmod(samples, self.batch_size)
        return full + self.counts(rest)


@dataclass(eq=False)
class _BatchStream(IterableDataset[Any]):
    """What workers read: items of (batch, shard, samples read, state of the source)."""

    dataset: Any
    parts: _Parts
    collate: Callable[[Any], Any]
    stamp: tuple[int, ...]
    position: dict[str, Any]
    seeks: bool
    reader: "_StreamReader | None" = None

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        parts, (seed, *rank) = self.parts, self.stamp
        if isinstance(self.dataset, ShardedIterable):  # workers take turns to make this rank's part of a batch
            source, shard, turn, turns = self.dataset.source, 0, worker, workers
            stamp: tuple[int, ...] = (seed, self.position["epoch"])
        else:
            source, shard, turn, turns = self.dataset, worker, 0, 1
            stamp = (seed, self.position["epoch"], rank[0] * workers + worker)
            # A DataLoader reads its first item from worker 0. Empty items advance it to the worker whose turn it is.
            if worker <= self.position["last"]:
                yield None, shard, None, None
        read, state = self.position["shards"][shard]
        reader = self.reader = _StreamReader(source, stamp, read, state, self.seeks)
        for number in count():
            # The model draws from the global generators too, but not in a worker.
            with preserve_rng() if get_worker_info() is None else nullcontext():
                samples = reader.take(parts.batch_size)
                if not parts.counts(len(samples)):
                    return
                first, end = parts.part(len(samples))
                mine = number % turns == turn and end > first
                if mine:
                    batch = self._batch(samples[first:end], stamp, reader.position - len(samples) + first)
            if mine:
                yield batch, shard, reader.position, reader.state_dict() if get_worker_info() else None

    def _batch(self, samples: list[Any], stamp: tuple[int, ...], place: int) -> Any:
        transform = self.dataset.transform if isinstance(self.dataset, ShardedIterable) else None
        if transform is not None:
            made, key = [], stream_key(*stamp, TRANSFORM)
            for number, sample in enumerate(samples, place):
                seed_generators(key, number)
                try:
                    made.append(transform(sample))
                except Exception as error:
                    note_sample(error, f"sample {number} of the stream, in the transform")
                    raise
            samples = made
        if not is_deterministic([], self.collate):
            seed_generators(stream_key(*stamp, COLLATE), place)
        return self.collate(samples)


def _worker() -> tuple[int, int]:
    """Index of this worker and number of workers; (0, 1) in the training process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class _StreamReader:
    """Reads a stream from a position on, and seeds each sample by its position.

    Args:
        source: the stream.
        stamp: numbers that seed it together with the position: seed, epoch, ...
        start: samples before the position.
        state: state of the source there, or None.
        seeks: whether the source can go to the position by ``set_epoch(epoch, start)``.
    """

    def __init__(self, source: Any, stamp: tuple[int, ...], start: int, state: Any, seeks: bool) -> None:
        self.position = start
        self._source = source
        self._epoch = stamp[1]
        self._key = stream_key(*stamp, SAMPLE)
        self._seeded = not is_deterministic(source)
        self._samples: Any = None
        self._begin = (start, state, seeks)

    def take(self, number: int) -> list[Any]:
        """Return the next ``number`` samples, or fewer at the end."""
        if self._samples is None:
            self._open(*self._begin)
        taken: list[Any] = []
        try:
            if self._seeded:
                while len(taken) < number:
                    seed_generators(self._key, self.position + len(taken))
                    taken.append(next(self._samples))
            else:
                taken.extend(islice(self._samples, number))  # on an error, those before it are in the list
        except StopIteration:
            pass
        except Exception as error:
            note_sample(error, f"sample {self.position + len(taken)} of {type(self._source).__name__}")
            raise
        self.position += len(taken)
        return taken

    def state_dict(self) -> Any:
        """The source's state after the last sample, or None if it has none."""
        if self._samples is None:
            return self._begin[1]
        owner = self._source if has_state(self._source) else self._samples
        return owner.state_dict() if has_state(owner) else None

    def _open(self, start: int, state: Any, seeks: bool) -> None:
        source, epoch = self._source, self._epoch
        seed_generators(self._key, -1)  # for random numbers drawn before the first sample
        if hasattr(source, "set_epoch"):
            if seeks and state is None:
                source.set_epoch(epoch, start)
            else:
                source.set_epoch(epoch)
        if state is not None and has_state(source):
            source.load_state_dict(state)
        self._samples = iter(source)
        if state is not None:
            if not has_state(source):
                self._samples.load_state_dict(state)
        elif not seeks:
            self.position = 0
            while self.position < start and self.take(min(1024, start - self.position)):
                pass
