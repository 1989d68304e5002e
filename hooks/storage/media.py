"""The part of ``EventStorage`` beside scalars: iteration and name scope; images, histograms and texts."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["MediaStorage"]

logger = logging.getLogger(__name__)

_MAX_IMAGES = 64
_MAX_TEXTS = 4096


class MediaStorage:
    """Knows the iteration and the name scope, and keeps the most recent images, histograms and texts for writers."""

    def __init__(self, start_iter: int) -> None:
        self._iter = int(start_iter)
        self._prefix = ""
        # Every value put gets a number. A reader passes the last number it has seen, and gets what is newer.
        self._seq = 0
        # Each entry begins with its number and its iteration.
        self._images: deque[tuple[int, int, str, torch.Tensor]] = deque(maxlen=_MAX_IMAGES)
        self._histogram_entries: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=_MAX_IMAGES)
        self._texts: deque[tuple[int, int, str, str]] = deque(maxlen=_MAX_TEXTS)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Add the prefix ``name/`` to every name put inside the block. Scopes nest."""
        outer = self._prefix
        self._prefix = outer + name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = outer

    @property
    def iter(self) -> int:
        """The current iteration. During a step it equals ``trainer.iter``."""
        return self._iter

    @iter.setter
    def iter(self, value: int) -> None:
        self._iter = int(value)

    @property
    def iteration(self) -> int:
        """Same as :attr:`iter`; its name in early detectron2."""
        return self._iter

    def step(self) -> None:
        """Increase :attr:`iter` by one, in a hand-written loop. A trainer sets :attr:`iter`."""
        self._iter += 1

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Add an image: (3, H, W) RGB or (1, H, W); uint8 in [0, 255] or float in [0, 1]."""
        image = torch.as_tensor(img_tensor).detach().clone()
        self._images.append((self._next_seq(), self._iter, self._prefix + img_name, image))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Add a histogram of a tensor's values, with ``bins`` equal bins between the smallest and the largest.

        Values that are NaN or infinite are left out, with a warning. A tensor without other values has no histogram.
        """
        values = hist_tensor.detach().flatten().float()
        finite = values[values.isfinite()]
        if left_out := values.numel() - finite.numel():
            logger.warning("%s: %d of %d values are NaN or infinite", hist_name, left_out, values.numel())
        values = finite
        if not values.numel():
            return
        low, high = values.min().item(), values.max().item()
        counts = torch.histc(values, bins)
        edges = torch.linspace(low, high, steps=bins + 1)
        hist = {
            "tag": self._prefix + hist_name,
            "min": low,
            "max": high,
            "num": values.numel(),
            "sum": values.sum().item(),
            "sum_squares": (values**2).sum().item(),
            "bucket_limits": edges[1:].tolist(),
            "bucket_counts": counts.tolist(),
            "global_step": self._iter,
        }
        self._histogram_entries.append((self._next_seq(), self._iter, hist))

    def put_text(self, name: str, text: str) -> None:
        """Add a text, for example a sample of a language model."""
        self._texts.append((self._next_seq(), self._iter, self._prefix + name, text))

    def images(self, since: int = 0) -> list[tuple[int, str, torch.Tensor]]:
        """Return (iteration, name, image) of the images after number ``since``; see :meth:`EventStorage.rows`."""
        return [entry[1:] for entry in self._images if entry[0] > since]

    def histograms(self, since: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """Return (iteration, arguments of ``SummaryWriter.add_histogram_raw``) after number ``since``."""
        return [entry[1:] for entry in self._histogram_entries if entry[0] > since]

    def texts(self, since: int = 0) -> list[tuple[int, str, str]]:
        """Return (iteration, name, text) of the texts after number ``since``."""
        return [entry[1:] for entry in self._texts if entry[0] > since]

    def media_state(self, since: int) -> dict[str, Any]:
        """Return the entries after number ``since`` as plain data, for a writer's state."""
        return {kind: [list(one) for one in entries if one[0] > since] for kind, entries in self._media().items()}

    def restore_media(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`media_state` returned. Entries that another writer has restored are skipped."""
        for kind, entries in self._media().items():
            known = {entry[0] for entry in entries}
            restored = [tuple(one) for one in state.get(kind, ()) if one[0] not in known]
            merged = sorted([*entries, *restored], key=lambda entry: entry[0])
            entries.clear()
            entries.extend(merged)

    def _media(self) -> dict[str, deque[Any]]:
        return {"images": self._images, "histograms": self._histogram_entries, "texts": self._texts}

    # Writers made for detectron2 use these four. hookline's writers keep the number of the last entry they wrote.

    def clear_images(self) -> None:
        """Discard all images."""
        self._images.clear()

    def clear_histograms(self) -> None:
        """Discard all histograms."""
        self._histogram_entries.clear()

    @property
    def _vis_data(self) -> list[tuple[str, torch.Tensor, int]]:
        return [(name, image, iteration) for _, iteration, name, image in self._images]

    @property
    def _histograms(self) -> list[dict[str, Any]]:
        return [arguments for _, _, arguments in self._histogram_entries]
