"""Reading a loader for ever, and knowing where in it one is."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ..fast_path import iterate
from .prefetch import CudaPrefetcher

__all__ = ["EpochIterator"]


class EpochIterator:
    """An endless iterator over the batches of a loader, which it starts over whenever it ends.

    Before each pass it calls ``set_epoch(epoch)`` on the loader's batch sampler or sampler, where there is one:
    the order of samples depends on the epoch alone, so a position is all that a checkpoint has to hold.

    Args:
        loader: any iterable of batches. Endless ones (a generator, a loader over ``TrainingSampler``) are fine.
        length: batches an epoch; by default ``len(loader)``, if it has one. An endless loader of known
            length has its epochs counted, and is not started over.
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
        self.length = length if length is not None else _length(loader)
        if self.length == 0:
            raise ValueError("the data loader is empty: it has no batches")
        # An endless stream is not started over: its epochs are only counted, its place is the batches read in all.
        sampler = _sampler(loader)
        self._endless = _length(loader) is None and (length is not None or sampler not in (None, loader))
        self._total = 0
        self.epoch = 0
        self.position = 0
        self.listener = listener
        self._prefetch_to = device if getattr(loader, "num_workers", 0) and device and device.type == "cuda" else None
        self._iterator: Iterator[Any] | None = None
        self._skipped = 0
        self._skipping = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Any:
        if self.ended:
            self._roll()
        self.prepare()
        try:
            batch = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            batch = self._start_over()
        self.position += 1
        self._total += 1
        return batch

    def prepare(self) -> None:
        """Create the loader's iterator, if there is none yet: this may draw random numbers and start workers."""
        if self._iterator is None:
            self._iterator = self._start()

    @property
    def ended(self) -> bool:
        """Whether the batch read last was the last of its epoch, as far as the length is known."""
        return self.position == self.length or self._skipping

    def skip_epoch(self) -> None:
        """Let the present epoch end here; the next batch is the first of the next one."""
        self._skipping = True

    def next_epoch(self) -> None:
        """Count the next epoch; the loader is started over when it runs out."""
        if self._skipping:
            self._skipping = False
            if not self._endless:
                self._iterator = None
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and the batches and samples (over all ranks) read in it."""
        epoch, position = (self.epoch + 1, 0) if self.ended else (self.epoch, self.position)
        state = {"epoch": epoch, "position": position}
        batch_size = getattr(_sampler(self.loader), "batch_size", None)
        if batch_size is not None:
            state["samples"] = (self._total if self._endless else position) * batch_size
        return state

    def load_state_dict(self, state: dict[str, int]) -> bool:
        """Go to a saved position. Nothing is replayed: the sampler starts where it left off.

        Returns:
            Whether the loader could be positioned; if not, its epoch starts from the beginning.
        """
        self._iterator = None
        self.epoch, self.position, self._skipped, self._total = state["epoch"], 0, 0, 0
        samples = state.get("samples", 0)
        if state["position"] == 0 and not samples:
            return True
        sampler = _sampler(self.loader)
        if not samples or not _takes_start(sampler):
            return False
        self._skipped = samples
        self._total = -(-samples // sampler.batch_size)
        self.position = state["position"] if self._endless else self._total
        return True

    def _start(self) -> Iterator[Any]:
        sampler = _sampler(self.loader)
        epoch = 0 if self._endless else self.epoch
        if self._skipped:
            sampler.set_epoch(epoch, start=self._skipped)
            self._skipped = 0
        elif sampler is not None:
            sampler.set_epoch(epoch)
        batches = iterate(self.loader)
        return batches if self._prefetch_to is None else CudaPrefetcher(batches, self._prefetch_to)

    def _roll(self) -> None:
        """The epoch turned out to have ended, in the middle of a step."""
        if self.listener is not None:
            self.listener.after_epoch()
        self.next_epoch()
        if self.listener is not None:
            self.listener.before_epoch()

    def _start_over(self) -> Any:
        """The loader ran out: begin the next pass and read its first batch."""
        self._endless = False
        if self.position:
            self._roll()
        self._iterator = self._start()
        try:
            return next(self._iterator)
        except StopIteration:
            raise RuntimeError(
                f"the data loader gave no batch when it was started over (epoch {self.epoch}): it is empty, "
                "or a generator that can be read only once; give a loader that can be read again"
            ) from None


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
