"""Writers of images, histograms and texts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..storage.event_storage import EventStorage, Row, get_event_storage, has_event_storage
from .base import RowWriter
from .groups import group_rows

__all__ = ["MediaWriter", "Medium"]


class Medium(NamedTuple):
    """An image, histogram or text.

    Attributes:
        kind: what it is.
        iteration: the iteration it is written for.
        name: its name.
        data: a tensor; for a histogram the arguments of ``SummaryWriter.add_histogram_raw``; or a text.
    """

    kind: Literal["image", "histogram", "text"]
    iteration: int
    name: str
    data: Any


class MediaWriter(RowWriter):
    """A writer of rows, images, histograms and texts. A subclass defines :meth:`job`.

    Images, histograms and texts that are not written yet are saved in checkpoints.

    Args:
        window_size: see :class:`RowWriter`.
        groups: name metrics by groups, see :func:`~hookline.hooks.writers.groups.group_rows`. False: as in
            ``metrics.json``.
    """

    # For subclasses that do not call __init__.
    _groups = True
    _waiting: Mapping[str, Any] = {}  # in the checkpoint, and not written

    def __init__(self, window_size: int = 20, groups: bool = True) -> None:
        super().__init__(window_size)
        self._groups = groups

    @abstractmethod
    def job(self, rows: list[Row], media: Sequence[Medium]) -> Callable[[], None]:
        """Return a function that writes; see :meth:`RowWriter.collect`."""

    def resume(self, start_iter: int) -> None:
        super().resume(start_iter)
        if self._waiting and has_event_storage():
            get_event_storage().restore_media(self._waiting)
        self._waiting = {}

    def state_dict(self) -> dict[str, Any]:
        storage = self._storage()
        waiting = self._waiting if storage is None else storage.media_state(self._seen)
        return {**super().state_dict(), "waiting": dict(waiting)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._waiting = state_dict.get("waiting", {})

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        self._use(storage)
        since, before = self._seen, self._last_write
        rows = self._new_rows(storage)
        media = [Medium("image", *entry) for entry in storage.images(since)]
        media += [Medium("histogram", it, data["tag"], data) for it, data in storage.histograms(since)]
        media += [Medium("text", *entry) for entry in storage.texts(since)]
        if not (rows or media):
            return None
        self._last_write = max([self._last_write, *(medium.iteration for medium in media)])
        # As with scalars, media of an iteration that is already written get the next one.
        media = [medium._replace(iteration=max(medium.iteration, before + 1)) for medium in media]
        return self.job(group_rows(rows, storage) if self._groups else rows, media)
