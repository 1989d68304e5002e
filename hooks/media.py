"""The images, histograms and texts of an ``EventStorage``."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["MediaStorage"]

logger = logging.getLogger(__name__)


class MediaStorage:
    """Knows the iteration and the name scope, and keeps images, histograms and texts until writers have taken them.

    Args:
        start_iter: the first iteration.
    """

    def __init__(self, start_iter: int) -> None:
        self.iter = int(start_iter)
        """The current iteration. During a step it equals ``trainer.iter``."""
        self._prefix = ""
        # What no writer has taken yet, in detectron2's form and under its names.
        self._vis_data: deque[tuple[str, torch.Tensor, int]] = deque(maxlen=64)
        self._histograms: deque[dict[str, Any]] = deque(maxlen=64)
        self._texts: deque[tuple[str, str, int]] = deque(maxlen=4096)
        self.saves_media = False
        """Whether a writer takes images, histograms and texts. Those not taken yet are then part of the state."""

    @property
    def iteration(self) -> int:
        """Same as :attr:`iter`; its name in early detectron2."""
        return self.iter

    def step(self) -> None:
        """Increase :attr:`iter` by one, in a hand-written loop. A trainer sets :attr:`iter`."""
        self.iter += 1

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Add the prefix ``name/`` to every name put inside the block. Scopes nest."""
        outer = self._prefix
        self._prefix = outer + name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = outer

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Add an image: (3, H, W) RGB or (1, H, W); uint8 in [0, 255] or float in [0, 1]."""
        self._vis_data.append((self._prefix + img_name, torch.as_tensor(img_tensor).detach().clone(), self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Add a histogram of a tensor's values, with ``bins`` equal bins between the smallest and the largest.

        Values that are NaN or infinite are left out, with a warning. A tensor without other values has no histogram.
        """
        values = hist_tensor.detach().flatten().float()
        finite = values[values.isfinite()]
        if left_out := values.numel() - finite.numel():
            logger.warning("%s: %d of %d values are NaN or infinite", hist_name, left_out, values.numel())
        if not finite.numel():
            return
        low, high = finite.min().item(), finite.max().item()
        hist = {  # the arguments of SummaryWriter.add_histogram_raw
            "tag": self._prefix + hist_name,
            "min": low,
            "max": high,
            "num": finite.numel(),
            "sum": finite.sum().item(),
            "sum_squares": (finite**2).sum().item(),
            "bucket_limits": torch.linspace(low, high, steps=bins + 1)[1:].tolist(),
            "bucket_counts": torch.histc(finite, bins).tolist(),
            "global_step": self.iter,
        }
        self._histograms.append(hist)

    def put_text(self, name: str, text: str) -> None:
        """Add a text, for example a sample of a language model."""
        self._texts.append((self._prefix + name, text, self.iter))

    def clear_images(self) -> None:
        """Discard the images: they are written."""
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        """Discard the histograms: they are written."""
        self._histograms.clear()

    def clear_media(self) -> None:
        """Discard images, histograms and texts: they are written."""
        self._vis_data.clear()
        self._histograms.clear()
        self._texts.clear()

    def media_state(self) -> dict[str, Any]:
        """Return what writers have not taken yet; empty if none of them takes images, histograms and texts."""
        return {name: list(entries) for name, entries in self._media().items()} if self.saves_media else {}

    def load_media(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`media_state` returned."""
        for name, entries in self._media().items():
            entries.extend(state_dict.get(name, ()))

    def _media(self) -> dict[str, deque[Any]]:
        return {"images": self._vis_data, "histograms": self._histograms, "texts": self._texts}
