"""Stochastic weight averaging."""

import logging
from typing import Any

from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY
from .averaging import WeightAveraging
from .precise_bn import Loader, StatisticsData, batch_norms, precise_statistics

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SWA(WeightAveraging):
    """Averages the weights at the end of each epoch from ``start`` on, and ends with the average in the model.

    Learning rates are those of the schedule. Before the average is evaluated, batch norm statistics are computed for
    it in a pass over the training data, which does not affect training.

    After the last iteration the model keeps the average: the last evaluation uses it, and it is the ``model`` in
    ``model_final``, unless evaluations use another hook's average. Such a run cannot be extended with a larger
    MAX_ITER. A run that failed or was stopped keeps its own weights.

    Acts in ``after_step``, or earlier in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`. Saves
    ``averaged_model`` and ``updates``.

    Args:
        start: a fraction of the run between 0 and 1, or a duration in iterations or epochs.
        every: how often the weights are added to the average: a duration.
        data_loader: training batches, or a function that makes the loader. No other code may read it. None: a new
            loader from the trainer's ``build_train_loader``.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (arXiv:1803.05407).
    """

    def __init__(
        self,
        start: "Duration | int | float | str" = 0.75,
        every: "Duration | int | str" = "1ep",
        data_loader: Loader | None = None,
    ) -> None:
        super().__init__(start, every)
        self._data = None if data_loader is None else StatisticsData(data_loader)
        self._statistics_of = 0  # the number of updates when the average's statistics were computed
        self.is_in_model = False

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return name in ("running_mean", "running_var") and isinstance(module, nn.modules.batchnorm._BatchNorm)

    def before_train(self) -> None:
        trainer = self.trainer
        if self.is_in_model and trainer.start_iter < trainer.max_iter:
            raise ConfigError(
                "SWA: the run has ended, and its model has the averaged weights. To train longer, resume a copy of the "
                "run without its last checkpoint, or begin a new run with these MODEL.WEIGHTS"
            )
        super().before_train()
        if self._data is None and batch_norms(trainer.model):
            if not hasattr(trainer, "build_train_loader"):
                raise ConfigError("SWA: the model has batch norms: give a data_loader for their statistics")
            self._data = StatisticsData(lambda: trainer.build_train_loader(trainer.cfg))

    def step(self) -> None:
        if self.average is None:
            self._begin()
            self.updates = 0
        assert self.average is not None
        self.average.update(get_swa_multi_avg_fn(), self.updates)
        self.average.copy_buffers()
        self.updates += 1

    def put(self) -> None:
        """Give the model the average, and compute batch norm statistics for it if they are missing."""
        average = self.average
        assert average is not None
        average.put()
        if self._data is None or self._statistics_of == self.updates or self._seen is None:
            return
        trainer = self.trainer
        with self._data.batches(trainer, number=0) as (batches, count):
            precise_statistics(trainer, trainer.model, batches, count)
        logger.info("SWA: computed batch norm statistics for the average from %d batches", count)
        average.copy_buffers()
        self._statistics_of = self.updates

    def after_train(self) -> None:
        if self.trainer.completed and self.average is not None and self.is_evaluated:
            self.put()
            self.average.keep()
            self.is_in_model = True
            logger.info("SWA: the model now has the average of %d sets of weights", self.updates)
        super().after_train()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "statistics_of": self._statistics_of, "final": self.is_in_model} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._statistics_of = state_dict.get("statistics_of", 0)
        self.is_in_model = state_dict.get("final", False)

    def reset_state(self) -> None:
        super().reset_state()
        self._statistics_of, self.is_in_model = 0, False
