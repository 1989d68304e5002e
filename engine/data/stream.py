"""Loaders of iterable data sets, with a position that can be saved.

There are two kinds of iterable data sets. A :class:`ShardedIterable` is one stream, which is split into global batches:
its batches do not depend on the number of ranks and workers. Any other iterable data set splits itself between ranks
and workers, as is torch's convention, and each shard is read to its end.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ...config import ConfigError
from .. import comm
from .batch_sampler import takes_start
from .generators import COLLATE, SAMPLE, TRANSFORM, seed_generators, stream_key
from .reading import identity, note_sample
from .seeding import is_deterministic, isolated_generators
from .workers import WorkerLoader, swapped

__all__ = ["ShardedIterable", "StreamLoader", "has_state"]

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
        max_batches: batches per pass on this rank, at most.
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
        max_batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=collate_fn or default_collate, **options)
        self._parts = _Parts(batch_size, rank, world_size, drop_last, keep_rest)
        self._seed = seed
        self._max_batches = max_batches
        self._sharded = isinstance(dataset, ShardedIterable)
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._progress: dict[str, Any] = {}
        self._stream: _BatchStream | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``; passed to the data set if it has ``set_epoch``."""
        self._epoch = epoch

    def __iter__(self) -> Any:
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch"] != self._epoch:
            resume = self._start()
        self._check(resume)
        if discarded := self._samples_to_discard(resume):
            logger.warning(
                "%s has no state_dict(): to resume, %d samples are read and discarded",
                type(getattr(self.dataset, "source", self.dataset)).__name__,
                discarded,
            )
        self._progress = dict(resume)
        if not self._sharded:
            self._progress["shards"] = [list(shard) for shard in resume["shards"]]
        self._stream = _BatchStream(self.dataset, self._parts, self.collate_fn, self._seed, resume)
        with swapped(self, dataset=self._stream, collate_fn=identity):
            items = super().__iter__()
        return self._consume(items)

    def _consume(self, items: Iterator[Any]) -> Iterator[Any]:
        while self._max_batches is None or self._batches_read() < self._max_batches:
            try:
                batch, worker, samples, source = next(items)
            except StopIteration:
                return
            if samples is None:  # only advances to the next worker
                continue
            if self._sharded:
                self._progress = {"epoch": self._epoch, "samples": samples, "source": source}
            else:
                self._progress["shards"][worker] = [samples, source]
                self._progress["last"] = worker
            yield batch

    def _batches_read(self) -> int:
        """Batches of this pass that were returned, before a resume too."""
        if self._sharded:
            return -(-self._progress["samples"] // self._parts.batch_size)
        return sum(-(-samples // self._parts.share) for samples, _ in self._progress["shards"])

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned. For a data set that splits itself, of this rank."""
        if self._resume is not None:
            return self._resume
        state = dict(self._progress or self._start())
        if not self.num_workers and self._stream is not None and self._stream.reader is not None:
            # Without workers, the state of the source is current. Workers read ahead, so they send it with batches.
            source = self._stream.reader.state_dict()
            state |= {"source": source} if self._sharded else {"shards": [[self._stream.reader.position, source]]}
        elif not self._sharded:
            state["shards"] = [list(shard) for shard in state["shards"]]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next ``iter()`` at a saved position, if it is of the same epoch."""
        self._resume = state

    def __len__(self) -> int:
        """Batches per pass on this rank; ``max_batches``, if the data may have more.

        Raises:
            TypeError: unknown: the data set has no length, or splits itself into several shards.
        """
        if self._max_batches is None:
            return self._batches()
        try:
            return min(self._max_batches, self._batches())
        except TypeError:
            return self._max_batches

    def _batches(self) -> int:
        if isinstance(self.dataset, ShardedIterable):
            return self._parts.number(len(self.dataset.source))  # type: ignore[arg-type]
        if self._parts.world_size * max(1, self.num_workers) > 1:
            raise TypeError("the number of batches is unknown: the data set splits itself between ranks and workers")
        return self._parts.number(len(self.dataset))  # type: ignore[arg-type]

    def _start(self) -> dict[str, Any]:
        if self._sharded:
            return {"epoch": self._epoch, "samples": 0, "source": None}
        return {
            "epoch": self._epoch,
            "shards": [[0, None] for _ in range(max(1, self.num_workers))],
            "last": -1,
            "world_size": self._parts.world_size,
        }

    def _samples_to_discard(self, state: dict[str, Any]) -> int:
        """Number of samples to read and discard to reach a position."""
        if isinstance(self.dataset, ShardedIterable) and takes_start(self.dataset.source):
            return 0
        shards = [[state["samples"], state["source"]]] if "samples" in state else state["shards"]
        return sum(samples for samples, source in shards if source is None)

    def _check(self, resume: dict[str, Any]) -> None:
        """Check that the saved position has the shards of this run."""
        if self._sharded != ("samples" in resume):
            raise ConfigError("DATASETS.TRAIN: the checkpoint's position is of another kind of data set")
        if self._sharded:
            return
        name = type(self.dataset).__name__
        before, now = len(resume["shards"]), max(1, self.num_workers)
        if before != now:
            raise ConfigError(
                f"DATALOADER.NUM_WORKERS: {name} splits itself between workers, and was read by {before} of them: "
                f"in the middle of an epoch it cannot continue with {now}. Restore NUM_WORKERS, or make the data set "
                "a ShardedIterable, which continues with any number"
            )
        if resume["world_size"] != self._parts.world_size:
            raise ConfigError(
                f"{name} splits itself between ranks, and was read by {resume['world_size']} of them: in the "
                f"middle of an epoch it cannot continue with {self._parts.world_size}; a ShardedIterable can"
            )


class _Parts:
    """How a stream is split into global batches, and each batch into parts of ranks."""

    def __init__(
        self, batch_size: int, rank: int | None, world_size: int | None, drop_last: bool, keep_rest: bool
    ) -> None:
        self.batch_size = batch_size
        self.rank = comm.get_data_rank() if rank is None else rank
        self.world_size = comm.get_data_size() if world_size is None else world_size
        self.drop_last = drop_last
        self.least = 1 if keep_rest else self.world_size
        if batch_size < self.world_size:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {self.world_size} ranks"
            )
        first, end = self.part(batch_size)
        self.share = end - first

    def part(self, length: int) -> tuple[int, int]:
        """Start and end of the rank's part of a batch of ``length`` samples."""
        return length * self.rank // self.world_size, length * (self.rank + 1) // self.world_size

    def counts(self, length: int) -> bool:
        """Whether ``length`` samples make a batch."""
        return length == self.batch_size or (length >= self.least and not self.drop_last)

    def number(self, samples: int) -> int:
        full, rest = divmod(samples, self.batch_size)
        return full + self.counts(rest)


class _BatchStream(IterableDataset[Any]):
    """What workers read: items of (batch, worker, samples read, state of the source)."""

    def __init__(self, dataset: Any, parts: _Parts, collate: Callable[[Any], Any], seed: int, resume: Any) -> None:
        self.dataset = dataset
        self._parts = parts
        self._collate = collate
        self._seed = seed
        self._resume = resume
        self._seed_collate = not is_deterministic([], collate)
        self.reader: _StreamReader | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._one_stream() if isinstance(self.dataset, ShardedIterable) else self._own_shard()

    def _one_stream(self) -> Iterator[Any]:
        """Yield this rank's part of the batches whose turn is this worker's."""
        worker, workers = _worker()
        parts, resume = self._parts, self._resume
        stamp = (self._seed, resume["epoch"])
        reader = self.reader = _StreamReader(
            self.dataset.source, stamp, resume["samples"], resume["source"], takes_start(self.dataset.source)
        )
        turn = 0
        while True:
            with isolated_generators():
                samples = reader.take(parts.batch_size)
                if not parts.counts(len(samples)):
                    return
                first, end = parts.part(len(samples))
                mine = turn == worker and end > first
                if mine:
                    place = reader.position - len(samples) + first
                    batch = self._batch(samples[first:end], stamp, place, self.dataset.transform)
            if mine:
                yield batch, worker, reader.position, reader.state_dict() if get_worker_info() else None
            turn = (turn + 1) % workers

    def _own_shard(self) -> Iterator[Any]:
        """Yield batches of everything that the data set yields in this worker."""
        worker, workers = _worker()
        parts, resume = self._parts, self._resume
        read, state = resume["shards"][worker]
        # A DataLoader reads its first item from worker 0. Empty items advance it to the worker whose turn it is.
        if worker <= resume["last"]:
            yield None, worker, None, None
        stamp = (self._seed, resume["epoch"], parts.rank * workers + worker)
        reader = self.reader = _StreamReader(self.dataset, stamp, read, state, False)
        while True:
            with isolated_generators():
                samples = reader.take(parts.share)
                if not samples or (len(samples) < parts.share and parts.drop_last):
                    return
                batch = self._batch(samples, stamp, reader.position - len(samples), None)
            yield batch, worker, reader.position, reader.state_dict() if get_worker_info() else None

    def _batch(self, samples: list[Any], stamp: tuple[int, ...], place: int, transform: Any) -> Any:
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
        if self._seed_collate:
            seed_generators(stream_key(*stamp, COLLATE), place)
        return self._collate(samples)


def _worker() -> tuple[int, int]:
    """Index of this worker and number of workers; (0, 1) in the training process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def has_state(source: Any) -> bool:
    """Return whether a loader or a source saves its position by ``state_dict()`` and ``load_state_dict()``."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


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
