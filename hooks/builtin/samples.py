"""``SamplePredictions``: pictures of test samples with what the model predicts for them."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ...config import ConfigError
from ...config.atomic import replace_file
from ..base import HOOK_REGISTRY, HookBase
from ..common import class_names_of, run_folder
from ..event_storage import has_event_storage

logger = logging.getLogger(__name__)

_SIZE, _TEXT = 112, 32  # pixels of an image, and of the label below it
_COLUMNS = 8
_COLORS = {True: "#15803d", False: "#b91c1c"}


@HOOK_REGISTRY.register()
class SamplePredictions(HookBase):
    """Draws one test image of each class with its prediction at each evaluation, correct ones green, wrong ones red.

    For models that return class scores (N, C) for images (N, 1 or 3, H, W). Writes
    ``OUTPUT_DIR/samples/iter_<iteration>.png``, and puts the picture as the image ``samples``. Rank 0 draws its
    samples. Needs Pillow.

    Args:
        num: number of images, at most: the first one of each class.
        class_names: names of the classes. Default: ``classes`` of the training data set, as of ``ImageFolder``, or
            their numbers.
        output_dir: where to make the folder. Default: the run's folder; a trainer without a config writes no files.
    """

    def __init__(
        self,
        num: int = 16,
        class_names: Sequence[str] = (),
        output_dir: str | None = None,
    ) -> None:
        try:
            import PIL.Image  # noqa: F401 (tried)
        except ImportError as error:
            raise ConfigError("SamplePredictions needs Pillow: pip install 'hookline[images]'") from error
        self._num = num
        self._names = list(class_names)
        self._output_dir = output_dir
        self._samples: dict[int, tuple[torch.Tensor, str, bool]] = {}
        self._warned = False

    def before_eval(self) -> None:
        self._samples = {}
        self._names = self._names or class_names_of(getattr(self.trainer, "data_loader", None))

    def after_eval_step(self, batch: Any, outputs: object) -> None:
        if len(self._samples) >= self._num or not self.trainer.comm.is_main_process():
            return
        adapter = getattr(self.trainer, "adapter", None)
        images = _first(batch, lambda one: one.dim() == 4 and one.shape[1] in (1, 3))
        scores = _first(outputs, lambda one: one.dim() == 2 and one.is_floating_point())
        targets: object = None
        if images is not None and scores is not None:
            targets = batch[1] if adapter is None else adapter.targets(batch)
        if images is None or scores is None or not isinstance(targets, torch.Tensor) or targets.dim() != 1:
            if not self._warned:
                logger.warning("SamplePredictions: needs images (N, 1 or 3, H, W), scores (N, C), classes (N)")
            self._warned = True
            return
        for image, shares, truth in zip(images, scores.float().softmax(1), map(int, targets), strict=True):
            if truth < 0 or truth in self._samples or len(self._samples) == self._num:
                continue
            share, found = shares.max(0)
            label = f"{self._name(int(found))} ({share:.0%})"
            if truth != found:
                label += f"\nis {self._name(truth)}"
            self._samples[truth] = image.float().cpu(), label, truth == int(found)

    def after_eval(self, results: Mapping[str, object]) -> None:
        if not self._samples:
            return
        picture = _draw([self._samples[truth] for truth in sorted(self._samples)])
        self._samples = {}
        if has_event_storage():
            self.trainer.storage.put_image("samples", torch.from_numpy(np.array(picture)).permute(2, 0, 1))
        output_dir = self._output_dir or run_folder(self.trainer)
        if output_dir is not None and not getattr(getattr(self.trainer, "cfg", None), "FAST_DEV_RUN", False):
            folder = os.path.join(output_dir, "samples")
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"iter_{self.trainer.finished_iter + 1:07d}.png")
            replace_file(path, lambda file: picture.save(file, format="png"))

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)


def _draw(samples: Sequence[tuple[torch.Tensor, str, bool]]) -> Any:
    """Return a picture of images with labels. Each image is scaled from its least value to its largest."""
    from PIL import Image, ImageDraw, ImageOps

    columns = min(len(samples), _COLUMNS)
    picture = Image.new("RGB", (columns * _SIZE, math.ceil(len(samples) / columns) * (_SIZE + _TEXT)), "white")
    for number, (image, label, correct) in enumerate(samples):
        row, column = divmod(number, columns)
        values = image.nan_to_num(0, 0, 0)
        values = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)
        array = (255 * values).byte().expand(3, -1, -1).permute(1, 2, 0).numpy()
        tile = Image.new("RGB", (_SIZE, _SIZE + _TEXT), "white")
        tile.paste(ImageOps.contain(Image.fromarray(array), (_SIZE - 4, _SIZE - 4), Image.Resampling.BOX))
        ImageDraw.Draw(tile).text((2, _SIZE), label, fill=_COLORS[correct])
        picture.paste(tile, (column * _SIZE, row * (_SIZE + _TEXT)))
    return picture


def _first(value: object, matches: Callable[[torch.Tensor], bool]) -> torch.Tensor | None:
    """Return the first tensor in a batch that matches."""
    return next((one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and matches(one)), None)
