"""Read a loader endlessly, with a position that can be saved."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

from ...config import ConfigError
from ...hooks.common import length_of, preserve_rng
from .. import comm
from .batch_sampler import GlobalBatchSampler, PlacedBatch, has_state, takes_start
from .batches import SizedBatch, split_batch
from .loader import Collated, LimitedLoader, SeededLoader, begin_dataset_epoch, ended_early, exact_length, iterate
from .stream import Position, SplitLoader, StreamLoader

logger = logging.getLogger(__name__)

_END: Any = object()
Length: TypeAlias = int | Callable[[Any], int | None] | None


class EpochIterator:
    """An endless iterator over the batches of a loader, which restarts when the loader ends.

    Before each pass it calls ``set_epoch(epoch)`` of the data set, and of the loader's batch sampler, sampler or
    itself, the first that has it. The order of samples depends only on the epoch, so a checkpoint only needs the
    position. A loader with ``state_dict()`` and ``load_state_dict()``, such as torchdata's StatefulDataLoader, is
    positioned by these.

    Args:
        loader: any iterable of batches, endless ones included (a generator, a loader over ``TrainingSampler``).
        length: batches per epoch, at most ``len(loader)``, which is the default; or a function of the loader that
            returns them. If the loader has no length, batches are only counted, and the loader restarts when it ends,
            also in the middle of an epoch. A loader that ends before its own length is an error.
        listener: has ``after_epoch()`` and ``before_epoch()``. They are called when an epoch ends during a fetch, as it
            does with loaders of unknown length.

    Attributes:
        given: the loader, as it was given.
        loader: the loader that is read: without a limit of its batches.
        epoch: number of the epoch, from 0.
        position: batches read in the epoch.
        ended: whether the last batch read is the last of its epoch, if the length is known, or the epoch was skipped.
        num_samples: number of samples in the last batch or micro-batch; None if the loader does not know it.
        loaded: the position that was loaded, until its next batch is read; otherwise None.
        differs_by_rank: whether the loader has a state of its own, which is that of this rank.
        has_indices: whether the indices of the loader's samples can be known.
    """

    def __init__(self, loader: Any, length: Length = None, listener: Any = None) -> None:
        self.listener = listener
        self.epoch = 0
        # Micro-batches per batch that are asked for, and those left to yield.
        self._parts = 1
        self._left = deque[SizedBatch]()
        self._read_from(loader, length)

    def _read_from(self, loader: Any, length: Length) -> None:
        """Set what belongs to a loader of which nothing was read."""
        self.given = loader
        self._length = length
        self.loader = loader.loader if isinstance(loader, LimitedLoader) else loader
        self.position = 0
        self.num_samples: int | None = None
        self._stateful = has_state(self.loader)
        self.differs_by_rank = self._stateful and not isinstance(self.loader, StreamLoader)
        self._sampler: Any = None
        self._measure()
        in_order = getattr(self.loader, "in_order", True) and not self._stateful
        self.has_indices = isinstance(self._sampler, GlobalBatchSampler) and in_order
        self._pass = 0  # number of the pass, if epochs are only counted
        self._samples = 0  # samples (over all ranks) before the next batch, in the present pass
        self._iterator: Iterator[Any] | None = None
        self.ended = False
        self.loaded: Position | None = None
        self._begun = -1  # the last epoch that begin_epoch() was called in
        # The indices of the last batch, and of those that workers read ahead.
        self._placed: PlacedBatch | None = None
        self._noted: deque[PlacedBatch] | None = None
        self._made_parts = 1  # micro-batches per batch that the iterator makes

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Any:
        if self._left:
            batch, self.num_samples = self._left.popleft()
            return batch
        if self.ended:
            self._roll()
        if self._iterator is None:
            self._iterator = self._start()
        elif self._made_parts != self._parts and (self._stateful or self._can_seek):
            with preserve_rng():  # as if it had read so many micro-batches from the start
                if self._stateful:
                    self.loader.load_state_dict(self.loader.state_dict())
                self._iterator = self._start()
        self._placed = None
        # No "except StopIteration": objects made in an except block keep the exception, and so this frame and the
        # loader's workers, alive until the garbage collector runs.
        read = next(self._iterator, _END)
        if read is _END:
            read = self._start_over()
        self.position += 1
        self.ended = self.position == self.length
        self._samples += self._size
        self.loaded = None
        if self._noted:
            self._placed = self._noted.popleft()
        found: list[SizedBatch] = read if type(read) is Collated else [(read, None)]
        if self._parts == 1 < len(found):
            raise RuntimeError(
                f"the data loader makes {self._made_parts} micro-batches of each batch until its pass ends: read them "
                "with SOLVER.ACCUMULATION_STEPS, or use a loader with state_dict()"
            )
        if self._parts > len(found) == 1:
            [(batch, number)] = found
            found = [*split_batch(batch, self._parts, number)]
        self._left.extend(found)
        batch, self.num_samples = self._left.popleft()
        return batch

    def micro_batches(self, parts: int, fetch: Callable[[], Any]) -> list[SizedBatch]:
        """Read a batch in micro-batches, and return each with its number of samples.

        Their samples are collated apart if the loader is a DataLoader; otherwise the batch is cut.

        Args:
            parts: number of micro-batches, at most.
            fetch: reads the next one from this iterator, or a whole batch from somewhere else.

        Raises:
            MismatchError: the batch cannot be cut.
        """
        self._parts, self.num_samples = parts, None
        try:
            found: list[SizedBatch] = [(fetch(), self.num_samples)]
            while self._left:
                found.append((fetch(), self.num_samples))
        finally:
            self._parts = 1
            self._left.clear()
        if parts > 1 and found[0][1] is None:
            return [*split_batch(found[0][0], parts)]
        return found

    def prepare(self, parts: int = 1) -> None:
        """Create the loader's iterator if an uninterrupted run would have created it before this position.

        Call this before restoring random generators: DataLoaders draw a number, and may start workers, when they start.

        Args:
            parts: as for :meth:`micro_batches`.
        """
        state = self.loaded
        if state is None or self._iterator is not None:
            return
        if not state.get("skipped") if "loader" in state else state["position"]:
            self._parts = parts
            self._iterator = self._start()
            self._parts = 1

    def begin_epoch(self) -> None:
        """Begin a pass of the data set as it is now: its ``set_epoch`` is called, and a new length is used.

        Called when an epoch begins or a loaded one continues, after the hooks' ``before_epoch``.
        """
        self._begun = self.epoch
        if not isinstance(self.loader, StreamLoader | SplitLoader):  # these do it in the process that reads
            begin_dataset_epoch(getattr(self.loader, "dataset", None), self.epoch)
        if self.position and self._iterator is not None:  # in the middle of it, in another train()
            return
        if isinstance(self.loader, SeededLoader):
            self.loader.follow_length()
        before = self.length
        self._measure()
        if self.length != before:
            logger.info(
                "Epoch %d has %s iterations instead of %s: the length of the data set has changed. Lengths in epochs "
                "stay as they were computed when the trainer was built",
                *(self.epoch, self.length, before),
            )
        if self.loaded is not None and not self._stateful:
            self._seek(self.loaded)

    @property
    def indices(self) -> list[int]:
        """The indices of the samples in the last batch, on this rank; after an error in reading, of the failed one.

        Raises:
            AttributeError: they are not known.
        """
        if self._placed is None and self._noted:
            return self._noted[0]
        if self._placed is None:
            raise AttributeError(
                "trainer.sample_indices is there from after_fetch on, for a map-style data set that is passed or named "
                "itself, and for a DataLoader with a GlobalBatchSampler"
            )
        return self._placed

    @property
    def share(self) -> float | None:
        """This rank's samples in the last batch over the mean number per rank; None if its indices are not known.

        The mean over ranks of (rank mean times share) is the mean over the batch.
        """
        placed = self._placed
        return None if placed is None else len(placed) * self._sampler.world_size / placed.total

    @property
    def order(self) -> int:
        """A checksum of the first batch over all ranks in the current pass; 0 if it may differ by rank."""
        sampler = self._sampler
        shared = isinstance(sampler, GlobalBatchSampler) and sampler.world_size == comm.get_data_size()
        return sampler.order if shared else 0

    def drop_loader(self) -> None:
        """Keep the position, but neither the loader nor its workers, until :meth:`replace_loader`."""
        self.given = self.loader = self._sampler = self._iterator = None

    def replace_loader(self, loader: Any) -> None:
        """Read from another loader, from the next batch on.

        If a position was loaded, and no batch was read since, this loader is positioned there. If batches of the epoch
        were read, the next batch starts a new epoch.
        """
        state, begun = self.loaded, self.position > 0
        self._read_from(loader, self._length)
        if state is not None:
            self.load_state_dict(state)
        else:
            self.ended = begun

    def skip_epoch(self) -> None:
        """End the current epoch here; the next batch starts a new one."""
        self.ended = True

    def next_epoch(self) -> None:
        """Start to count the next epoch."""
        if self._endless:
            if self._can_seek:  # the data set may change, so the stream of its indices begins again at this position
                self._iterator = None
        else:
            self._samples = 0
            if self.position != self.length or self._cut:
                self._iterator = None
            elif self._iterator is not None and exact_length(self.loader) is not None:
                # The pass ends before the next epoch begins: after its last index a sampler may draw once more.
                rest = next(self._iterator, _END)
                self._iterator = None if rest is _END else chain([rest], self._iterator)
        self.ended, self.loaded = False, None
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> Position:
        """The position after the last batch: epoch, batches and samples (over all ranks), or the loader's state.

        Batches that workers have read ahead do not count.
        """
        epoch, position = (self.epoch + 1, 0) if self.ended else (self.epoch, self.position)
        state: Position = {"epoch": epoch, "position": position}
        if self._endless:
            state["pass"] = self._pass
        if self._stateful:
            state["loader"] = self.loader.state_dict()
            # The loader's state may be that of an epoch that ends here.
            skipped = self.ended and (self.position != self.length or self._cut > 0)
            state["skipped"] = skipped and not self._endless
            return state
        if self._size:
            state["samples"] = 0 if self.ended and not self._endless else self._samples
            state["batch_size"] = self._size
        return state

    def load_state_dict(self, state: Position) -> None:
        """Go to a saved position. The sampler starts there; no batch is read for it.

        With another batch size, the position is that of the same sample. If the epoch has no batch left, it ends. If
        the loader cannot be positioned, its epoch starts from the beginning, with a warning.
        """
        self._iterator, self.loaded, self._begun = None, state, -1
        self.epoch, self._pass, self._samples = state["epoch"], state.get("pass", 0), 0
        if not self._stateful or "loader" not in state:
            return self._seek(state)
        self.loader.load_state_dict(state["loader"])
        self.position = state["position"]
        self.ended = self.position == self.length
        if state.get("skipped"):
            self._start()  # makes the loader use its state; the rest of that epoch is skipped

    def _seek(self, state: Position) -> None:
        """Go to the loaded position of a loader without a state of its own."""
        position, samples, size = state["position"], state.get("samples", 0), self._size
        self.position = self._samples = 0
        self.ended = False
        if not samples or not self._can_seek:
            if position or samples:
                logger.warning(
                    "The data loader cannot start in the middle of an epoch (it has neither set_epoch(epoch, start) "
                    "nor state_dict(); see docs/data.md): epoch %d starts from its beginning",
                    self.epoch,
                )
            return
        self._samples = samples
        if self._endless:  # the batches of the epoch, in the present batch size
            self.position = min(position * state.get("batch_size", size) // size, self.length - 1)
            return
        left = self._sampler.batches_after(samples) if hasattr(self._sampler, "batches_after") else None
        read = -(-samples // size) if left is None else self.length + self._cut - left
        # None is left if the rest is less than a batch, and DROP_LAST is set; or the data set is shorter now.
        self.ended = self.length is not None and read >= self.length
        self.position = 0 if self.ended else read

    def _measure(self) -> None:
        """Set what depends on the loader's length."""
        given, length, own = self.given, self._length, length_of(self.loader)
        limit = length(given) if callable(length) else length
        self.length: Any = length_of(given)
        if limit is not None:
            self.length = limit if self.length is None else min(limit, self.length)
        if self.length == 0:
            raise ValueError("the data loader is empty: it has no batches")
        # Epochs are only counted; passes over the loader are numbered separately.
        self._endless = own is None and self.length is not None
        # Unused batches at the end of each pass.
        self._cut = 0 if own is None else own - self.length
        # The loader's batch sampler, its sampler or itself: the first that has set_epoch.
        self._sampler = None
        for owner in (getattr(self.loader, "batch_sampler", None), getattr(self.loader, "sampler", None), self.loader):
            if self._sampler is None and hasattr(owner, "set_epoch"):
                self._sampler = owner
        self._size = getattr(self._sampler, "batch_size", None) or 0
        self._can_seek = bool(self._size) and not self._stateful and takes_start(self._sampler)

    def _start(self) -> Iterator[Any]:
        if self._begun != self.epoch:  # nobody has called it
            self.begin_epoch()
        sampler, number = self._sampler, self._pass if self._endless else self.epoch
        if self._samples and self._can_seek:
            sampler.set_epoch(number, start=self._samples)
        elif sampler is not None:
            sampler.set_epoch(number)
        self._noted = self._placed = None
        if self.has_indices:
            self._noted = sampler.noted = deque()
        self._made_parts = self._parts
        return iterate(self.loader, self._parts)

    def _roll(self) -> None:
        """Start the next epoch in the middle of a step, and call the listener."""
        if self.listener is not None:
            self.listener.after_epoch()
        self.next_epoch()
        if self.listener is not None:
            self.listener.before_epoch()
        self.begin_epoch()

    def _start_over(self) -> Any:
        """The loader has ended: start the next pass and read its first batch."""
        # A loader with its own state may start in the middle of a pass.
        exact = None if self._stateful else exact_length(self.loader)
        if exact is not None and self.position:
            raise ended_early(self.position, exact)
        self._iterator = None
        if self._endless:
            self._pass += 1
            self._samples = 0
        elif self.position:
            self._roll()
        self._iterator = self._start()
        read = next(self._iterator, _END)
        if read is _END:
            if exact is not None:
                raise ended_early(0, exact)
            raise RuntimeError(
                f"the data loader has no batch in its next pass (epoch {self.epoch}): it is empty, or a generator that "
                "can be read only once; use a loader that can be read again"
            )
        return read


def set_data_loader(trainer: Any, loader: Any) -> None:
    """Make a trainer read from a loader, from its next batch on."""
    if "batches" in vars(trainer):
        trainer.batches.replace_loader(loader)
        check_indices(trainer)
    else:
        trainer.batches = EpochIterator(loader, listener=weakref.proxy(trainer))


def check_indices(trainer: Any) -> None:
    """Raise a ConfigError if a hook of a trainer needs the indices of samples, and its data has none."""
    if any(map(attrgetter("uses_indices"), trainer.hooks.hooks)) and not trainer.batches.has_indices:
        raise ConfigError(
            "a hook has uses_indices = True, and the training data has no indices: they are known for a map-style "
            "data set that is passed or named itself, and for a DataLoader with a GlobalBatchSampler"
        )
