"""Reading a loader for ever, and knowing where in it one is."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...config import ConfigError
from .iterate import iterate
from .prefetch import CudaPrefetcher
from .whole_pass import ended_early, exact_length

__all__ = ["EpochIterator"]

_END: Any = object()


class EpochIterator:
    """An endless iterator over the batches of a loader, which it starts over whenever it ends.

    Before each pass it calls ``set_epoch(epoch)`` on the loader's batch sampler, its sampler or itself, where there is
    one: the order of samples depends on the epoch alone, so a position is all that a checkpoint has to hold. A loader
    that has ``state_dict()`` and ``load_state_dict()``, such as torchdata's StatefulDataLoader, is positioned by these.

    Args:
        loader: any iterable of batches. Endless ones (a generator, a loader over ``TrainingSampler``) are fine.
        length: batches an epoch, at most ``len(loader)``, the default where there is one. Of a loader without a length
            they are only counted: it is started over when it ends, wherever in an epoch that is. A loader that ends
            before its own length is an error.
        listener: has ``after_epoch()`` and ``before_epoch()``, called when an epoch ends while a batch is fetched:
            with loaders whose length is not known, that is where the end is seen.

        device: of a GPU: batches that worker processes make are copied there while the one before is computed on.

    Attributes:
        epoch: number of the pass, from 0.
        position: batches read in this pass.
    """

    def __init__(
        self, loader: Any, length: int | None = None, listener: Any = None, device: torch.device | None = None
    ) -> None:
        self.loader = loader
        own = _length(loader)
        self.length = own if length is None else length if own is None else min(length, own)
        if self.length == 0:
            raise ValueError("the data loader is empty: it has no batches")
        self._sampler = _sampler(loader)
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # A loader with a state of its own may begin in the middle of a pass without saying so.
        self._exact = None if self._stateful else exact_length(loader)
        # Epochs of these are only counted; their passes, which have nothing to do with them, have numbers of their own.
        self._endless = own is None and (length is not None or self._sampler not in (None, loader))
        # Batches at the end of each pass that are never asked for.
        self._cut = 0 if own is None or self.length is None else own - self.length
        self._pass = 0
        # Samples, of all ranks, that the present pass left out; batches read since.
        self._origin = self._read = 0
        self.epoch = 0
        self.position = 0
        self.listener = listener
        self._prefetch_to = device if getattr(loader, "num_workers", 0) and device and device.type == "cuda" else None
        self._iterator: Iterator[Any] | None = None
        self._skipping = False
        self._loaded = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Any:
        if self.ended:
            self._roll()
        self.prepare()
        # Not by "except StopIteration": what is made while an exception is handled keeps it, and with it this frame and
        # the loader's workers, until the garbage collector comes by.
        batch = next(self._iterator, _END)  # type: ignore[arg-type]
        if batch is _END:
            batch = self._start_over()
        self.position += 1
        self._read += 1
        return batch

    def prepare(self) -> None:
        """Create the loader's iterator, if there is none yet: this may draw random numbers and start workers."""
        if self._iterator is None:
            self._iterator = self._start()

    @property
    def ended(self) -> bool:
        """Whether the batch read last was the last of its epoch, as far as the length is known."""
        return self.position == self.length or self._skipping

    @property
    def samples_before(self) -> int:
        """Samples, of all ranks, that come before the batch read last in the present pass over the loader."""
        return self._origin + (self._read - 1) * self._sampler.batch_size

    @property
    def begun(self) -> bool:
        """Whether, had the run not been interrupted here, the loader's iterator would have been made before.

        Then it has to be made before random generators are restored: DataLoaders draw when they are started.
        """
        return bool(self.position or self._origin or self._loaded)

    def continue_count(self, epoch: int, begun: bool) -> None:
        """Count on from another loader's epoch, before any batch is read.

        Args:
            epoch: the number of its present epoch.
            begun: whether any of that epoch was read. If so the epoch is over, and the first batch is the next one's.
        """
        self.epoch, self._skipping = epoch, begun

    def skip_epoch(self) -> None:
        """Let the present epoch end here; the next batch is the first of the next one."""
        self._skipping = True

    def next_epoch(self) -> None:
        """Count the next epoch; the loader is started over when it runs out."""
        if (self._skipping or self._cut) and not self._endless:
            self._iterator = None
        self._skipping = False
        self.epoch += 1
        self.position = 0
        if not self._endless:
            self._origin = self._read = 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and the batches and samples (over all ranks) read in it; or the loader's own.

        It is that of the batch that was taken last, however far workers have read ahead.
        """
        epoch, position = (self.epoch + 1, 0) if self.ended else (self.epoch, self.position)
        state: dict[str, Any] = {"epoch": epoch, "position": position}
        if self._endless:
            state["pass"] = self._pass
        if self._stateful:
            batches = self._iterator
            state["loader"] = batches.state if isinstance(batches, CudaPrefetcher) else self.loader.state_dict()
            # With the position of an epoch that is not gone on with, for the sake of what is drawn along with it.
            state["skipped"] = (self._skipping or (self.ended and self._cut > 0)) and not self._endless
            return state
        batch_size = getattr(self._sampler, "batch_size", None)
        if batch_size is not None:
            over = self.ended and not self._endless
            state["samples"] = 0 if over else self._origin + self._read * batch_size
            state["batch_size"] = batch_size
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go to a saved position. Nothing is replayed: the sampler starts where it left off.

        Where the batch size is another one now, the position is that of the same sample.

        Returns:
            Whether the loader could be positioned; if not, its epoch starts from the beginning.
        """
        self._iterator, self._skipping, self._loaded = None, False, False
        self.epoch, self.position, self._pass = state["epoch"], 0, state.get("pass", 0)
        self._origin = self._read = 0
        if self._stateful and "loader" in state:
            return self._load_own_state(state)
        samples = state.get("samples", 0)
        if state["position"] == 0 and not samples:
            return True
        if not samples or not _takes_start(self._sampler):
            return False
        self._origin = samples
        if self._endless:
            self.position = self._counted(state)
            return True
        left = _batches_left(self._sampler, samples, self.length)
        left = left if left is None else max(0, left - self._cut)
        if left == 0:  # what is left makes no batch of the present size, and DROP_LAST is set
            self.epoch, self._origin = self.epoch + 1, 0
        else:
            known = self.length is not None and left is not None
            self.position = self.length - left if known else -(-samples // self._sampler.batch_size)  # type: ignore
        return True

    def _load_own_state(self, state: Mapping[str, Any]) -> bool:
        if self.loader.load_state_dict(state["loader"]) is False:
            return not (state["position"] or self._endless)  # at an epoch's beginning there is nowhere to go
        self.position = state["position"]
        if state.get("skipped"):
            self._start()  # takes the position up; the epoch that was left there is not gone on with
        else:
            self._loaded = True
        return True

    def _counted(self, state: Mapping[str, Any]) -> int:
        """Batches of the present epoch, where epochs are only counted: in batches of the present size."""
        position, before = state["position"], state.get("batch_size", self._sampler.batch_size)
        if before != self._sampler.batch_size:
            position = position * before // self._sampler.batch_size
        return position if self.length is None else min(position, self.length - 1)

    def _start(self) -> Iterator[Any]:
        sampler, number = self._sampler, self._pass if self._endless else self.epoch
        if self._origin and not self._read and not self._stateful:
            sampler.set_epoch(number, start=self._origin)
        elif sampler is not None:
            sampler.set_epoch(number)
        try:
            batches = iterate(self.loader)
        except AssertionError as error:
            if not self._stateful:
                raise
            raise ConfigError(
                f"{type(self.loader).__name__} cannot go on from the checkpoint's position. If it is torchdata's, it "
                "needs the number of workers that it was saved with"
            ) from error
        if self._prefetch_to is None:
            return batches
        return CudaPrefetcher(batches, self._prefetch_to, self.loader.state_dict if self._stateful else None)

    def _roll(self) -> None:
        """The epoch turned out to have ended, in the middle of a step."""
        if self.listener is not None:
            self.listener.after_epoch()
        self.next_epoch()
        if self.listener is not None:
            self.listener.before_epoch()

    def _start_over(self) -> Any:
        """The loader ran out: begin the next pass and read its first batch."""
        if self._exact is not None and self.position:
            raise ended_early(self.position, self._exact)
        if self._endless and self.length is None:
            self._endless = False
        if self._endless:
            self._pass += 1
            self._origin = self._read = 0
        elif self.position:
            self._roll()
        self._iterator = self._start()
        batch = next(self._iterator, _END)
        if batch is _END:
            if self._exact is not None:
                raise ended_early(0, self._exact)
            raise RuntimeError(
                f"the data loader gave no batch when it was started over (epoch {self.epoch}): it is empty, "
                "or a generator that can be read only once; give a loader that can be read again"
            )
        return batch


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a generator, an iterable dataset, an endless sampler
        return None


def _sampler(loader: Any) -> Any:
    """What decides the loader's order: its batch sampler, its sampler or itself, if it has ``set_epoch``."""
    for owner in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None), loader):
        if hasattr(owner, "set_epoch"):
            return owner
    return None


def _takes_start(sampler: Any) -> bool:
    """Whether the sampler can begin in the middle of an epoch."""
    return (
        sampler is not None
        and getattr(sampler, "batch_size", None) is not None
        and "start" in inspect.signature(sampler.set_epoch).parameters
    )


def _batches_left(sampler: Any, samples: int, length: int | None) -> int | None:
    """Batches that an epoch still has after so many samples, as far as anybody knows."""
    if hasattr(sampler, "batches_after"):
        return sampler.batches_after(samples)
    return None if length is None else length + samples // -sampler.batch_size
