"""``SamplePredictions``: pictures of test samples with what the model predicts for them."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...config import CfgNode
from ...runs.pictures import check_matplotlib, draw_samples, pixels, save_picture
from ..base import HOOK_REGISTRY, HookBase
from ..common.batches import convert
from ..storage.event_storage import has_event_storage

__all__ = ["SamplePredictions"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SamplePredictions(HookBase):
    """Draws the first test images with their predictions at each evaluation, correct ones green and wrong ones red.

    For models that return class scores (N, C) for images (N, 1 or 3, H, W). Writes
    ``OUTPUT_DIR/samples/iter_<iteration>.png``, and puts the picture as the image ``samples``. Rank 0 draws its
    samples. Needs matplotlib.

    Args:
        num: number of samples: the first ones of the first test set.
        class_names: names of the classes. Default: their numbers.
        output_dir: the run's folder. None: no files.
        cfg: the config; with its FAST_DEV_RUN no file is written.
    """

    def __init__(
        self,
        num: int = 16,
        class_names: Sequence[str] = (),
        output_dir: str | None = None,
        cfg: CfgNode | None = None,
    ) -> None:
        check_matplotlib("SamplePredictions")
        self._num = num
        self._names = list(class_names)
        self._folder = None if output_dir is None or (cfg and cfg.FAST_DEV_RUN) else os.path.join(output_dir, "samples")
        self._samples: list[tuple[Any, str, bool | None]] = []
        self._warned = False

    def before_eval(self) -> None:
        self._samples = []

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        missing = self._num - len(self._samples)
        if missing <= 0 or not self.trainer.comm.is_main_process():
            return
        images = _first(batch, lambda one: one.dim() == 4 and one.shape[1] in (1, 3))
        scores = _first(outputs, lambda one: one.dim() == 2 and one.is_floating_point())
        if images is None or scores is None or len(images) != len(scores):
            if not self._warned:
                logger.warning(
                    "SamplePredictions: needs images (N, 1 or 3, H, W) and class scores (N, C); nothing drawn"
                )
            self._warned = True
            return
        adapter = getattr(self.trainer, "adapter", None)
        targets = (
            adapter.targets(batch) if adapter is not None else batch[1] if isinstance(batch, tuple | list) else None
        )
        shares = scores[:missing].float().softmax(1).cpu()
        for i, share in enumerate(shares):
            found = int(share.argmax())
            truth = int(targets[i]) if isinstance(targets, torch.Tensor) and targets.dim() == 1 else None
            label = f"{self._name(found)} ({share[found]:.0%})"
            if truth is not None and truth != found:
                label += f"\nis {self._name(truth)}"
            image = images[i].float().cpu().permute(1, 2, 0).squeeze(2).numpy()
            self._samples.append((image, label, None if truth is None else truth == found))

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if not self._samples:
            return
        figure = draw_samples(*zip(*self._samples, strict=True))
        self._samples = []
        if has_event_storage():
            self.trainer.storage.put_image("samples", torch.from_numpy(pixels(figure)))
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            save_picture(figure, os.path.join(self._folder, f"iter_{self.trainer.finished_iter + 1:07d}.png"))

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)


def _first(value: Any, matches: Any) -> torch.Tensor | None:
    """Return the first tensor in a batch that matches."""
    found: list[torch.Tensor] = []
    convert(value, lambda one: found.append(one) if isinstance(one, torch.Tensor) and matches(one) else None)
    return found[0] if found else None
