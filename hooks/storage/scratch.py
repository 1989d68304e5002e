"""A storage for hooks that are called outside of training."""

from collections.abc import Iterator
from contextlib import contextmanager

from .event_storage import EventStorage, has_event_storage

__all__ = ["scratch_storage"]


class _Scratch(EventStorage):
    of_run = False


@contextmanager
def scratch_storage(iteration: int) -> Iterator[None]:
    """Open a storage at an iteration if none is open. What hooks put into it is discarded."""
    if has_event_storage():
        yield
        return
    with _Scratch(iteration):
        yield
