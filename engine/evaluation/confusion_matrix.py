"""``ConfusionMatrix``: which classes a model takes for which."""

import csv
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...config import CfgNode, ConfigError
from ...config.files.atomic import replace_text
from ...config.files.run_folder import claim
from ...hooks.storage.event_storage import get_event_storage, has_event_storage
from ...runs.pictures import check_matplotlib, draw_matrix, pixels, save_picture
from .. import comm
from ..modeling.outputs import predictions_of
from .build import EVALUATOR_REGISTRY, MetricsEvaluator
from .metrics import Metric

__all__ = ["ConfusionMatrix"]

logger = logging.getLogger(__name__)


@EVALUATOR_REGISTRY.register()
class ConfusionMatrix(MetricsEvaluator):
    """Evaluates the metrics of ``TEST.METRICS``, and counts the predictions of each class.

    After each evaluation ``OUTPUT_DIR/inference/<set>/confusion_matrix.png`` and ``.csv`` are replaced, and in a run
    the picture is put as the image ``<set>/confusion_matrix``. In the table a row is a class of the targets. Needs
    matplotlib.

    Args:
        cfg: the whole config.
        dataset_name: name of the results.
        metrics: metrics by name.
        targets_of: returns the targets in a batch.
        class_names: names of the classes. Default: their numbers.

    Attributes:
        matrix: the counts of all ranks after an evaluation, ``matrix[target, prediction]``.
    """

    works_on_parts = False  # a trial before training writes no files

    def __init__(
        self,
        cfg: CfgNode,
        dataset_name: str,
        metrics: Mapping[str, Metric],
        targets_of: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        check_matplotlib("TEST.EVALUATOR.NAME: ConfusionMatrix")
        super().__init__(dataset_name, metrics, targets_of)
        self._folder = "" if cfg.FAST_DEV_RUN else os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
        self._names = [str(name) for name in class_names]
        self.matrix = torch.zeros(0, 0, dtype=torch.int64)
        self._counts: torch.Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self._counts = None

    def process(self, inputs: Any, outputs: Any) -> None:
        super().process(inputs, outputs)
        scores, targets = predictions_of(outputs), self._targets_of(inputs)
        if not isinstance(scores, torch.Tensor) or scores.dim() != targets.dim() + 1:
            shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ValueError(
                f"ConfusionMatrix needs scores (N, C, ...) for targets (N, ...); got {shape} for {tuple(targets.shape)}"
            )
        classes = scores.shape[1]
        if self._names and len(self._names) != classes:
            raise ConfigError(
                f"TEST.EVALUATOR.ARGS.class_names: has {len(self._names)} names, but the model has {classes} classes"
            )
        if self._counts is None:
            self._counts = torch.zeros(classes, classes, dtype=torch.int64, device=scores.device)
        counted = targets >= 0  # not those of ignore_index
        cells = targets[counted].long() * classes + scores.argmax(1)[counted]
        self._counts += torch.bincount(cells, minlength=classes**2).view(classes, classes)

    def evaluate(self, local: bool = False) -> dict[str, dict[str, Any]]:
        results = super().evaluate(local)
        if local:
            return results
        parts = comm.all_gather(None if self._counts is None else self._counts.cpu())
        counts = [part for part in parts if part is not None]
        if counts:
            self.matrix = torch.stack(counts).sum(0)
            if comm.is_main_process():
                self._report()
        return results

    def _report(self) -> None:
        names = self._names or [str(i) for i in range(len(self.matrix))]
        figure = draw_matrix(self.matrix.numpy(), names, self.dataset_name)
        if has_event_storage():
            get_event_storage().put_image(f"{self.dataset_name}/confusion_matrix", torch.from_numpy(pixels(figure)))
        if not self._folder:
            return
        os.makedirs(self._folder, exist_ok=True)
        stem = os.path.join(self._folder, "confusion_matrix")
        save_picture(figure, f"{stem}.png")
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["target", *names])
        writer.writerows([name, *row] for name, row in zip(names, self.matrix.tolist(), strict=True))
        claim(f"{stem}.csv")
        replace_text(f"{stem}.csv", table.getvalue())
        logger.debug("Wrote %s.png and .csv", stem)
