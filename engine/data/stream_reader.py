"""Reads one stream of samples from a position on."""

from itertools import islice
from typing import Any

from .generators import SAMPLE, seed_generators, stream_key
from .reading import note_sample
from .seeding import is_deterministic

__all__ = ["StreamReader", "has_state"]


def has_state(source: Any) -> bool:
    """Return whether a loader or a source saves its position by ``state_dict()`` and ``load_state_dict()``."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class StreamReader:
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
