"""Stochastic weight averaging."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY
from .averaging import WeightAveraging
from .precise_bn import Loader, StatisticsData, batch_norms, precise_statistics

__all__ = ["SWA"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SWA(WeightAveraging):
    """Averages the weights at the end of each epoch from ``start`` on, and ends with the average in the model.

    From ``start`` on, learning rates change from the schedule's to ``swa_lr`` within ``anneal``, and stay there; the
    schedule steps on without effect. Before the average is evaluated, batch norm statistics are computed for it in a
    pass over the training data, which does not affect training.

    After the last iteration the model keeps the average (``final="average"``): the last evaluation uses it, and it is
    the ``model`` in ``model_final``. Such a run cannot be extended with a larger MAX_ITER. A run that failed or was
    stopped keeps its own weights.

    Acts in ``after_step``, or earlier in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`. Saves
    ``averaged_model``, ``updates`` and the initial learning rates.

    Args:
        start: a fraction of the run between 0 and 1, or a duration in iterations or epochs.
        every: how often the weights are added to the average: a duration.
        swa_lr: the learning rate while averaging, or one for each parameter group; None: the schedule's.
        anneal: how long the change to ``swa_lr`` takes: a duration in iterations or epochs.
        anneal_strategy: "cos" or "linear".
        update_bn: whether to compute batch norm statistics for the average; otherwise the model's are used.
        bn_batches: number of batches for the statistics; None: a pass over the data.
        data_loader: training batches, or a function that makes the loader. No other code may read it. None: a new
            loader from the trainer's ``build_train_loader``.
        device: the device of the average, such as "cpu"; None: that of the weights.
        evaluate: whether evaluations before the last use the average.
        final: the weights of the model after training: "average" or "last".

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (arXiv:1803.05407);
    learning rates as in ``torch.optim.swa_utils.SWALR``.
    """

    after = ("LRScheduler",)

    def __init__(
        self,
        start: "Duration | int | float | str" = 0.75,
        every: "Duration | int | str" = "1ep",
        swa_lr: float | Sequence[float] | None = None,
        anneal: "Duration | int | str" = "10ep",
        anneal_strategy: Literal["cos", "linear"] = "cos",
        update_bn: bool = True,
        bn_batches: int | None = None,
        data_loader: Loader | None = None,
        device: str | None = None,
        evaluate: bool = True,
        final: Literal["average", "last"] = "average",
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f'SWA: anneal_strategy must be "cos" or "linear", not {anneal_strategy!r}')
        if final not in ("average", "last"):
            raise ConfigError(f'SWA: final must be "average" or "last", not {final!r}')
        if bn_batches is not None and bn_batches < 1:
            raise ConfigError(f"SWA: bn_batches must be at least 1, or None for a whole pass; not {bn_batches}")
        super().__init__(start, every, device, evaluate)
        self.swa_lr = swa_lr
        self._anneal_length = Duration.parse_length(anneal)
        self._cosine = anneal_strategy == "cos"
        self.update_bn = update_bn
        self._bn_batches = bn_batches
        self._data = None if data_loader is None else StatisticsData(data_loader)
        self.final = final
        self._initial_lrs: list[float] | None = None
        # The number of updates when the average's statistics were computed.
        self._statistics_of = 0
        self._model_has_average = False

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return name in ("running_mean", "running_var") and isinstance(module, nn.modules.batchnorm._BatchNorm)

    # ------------------------------------------------------------------ training

    def before_train(self) -> None:
        trainer = self.trainer
        if self._model_has_average and trainer.start_iter < trainer.max_iter:
            raise ConfigError(
                "SWA: the run has ended, and its model has the averaged weights. To train longer, resume a copy of the "
                'run without its last checkpoint, begin a new run with these MODEL.WEIGHTS, or set final="last"'
            )
        super().before_train()
        try:
            self._anneal_iters = self._anneal_length.iterations(trainer.iters_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"SWA: anneal: {error}") from None
        if isinstance(self.swa_lr, Sequence) and len(self.swa_lr) != len(trainer.optimizer.param_groups):
            raise ConfigError(
                f"SWA: swa_lr has {len(self.swa_lr)} values, but the optimizer "
                f"{len(trainer.optimizer.param_groups)} parameter groups"
            )
        self._find_data()
        self._set_rates(trainer.start_iter)

    def _find_data(self) -> None:
        trainer = self.trainer
        if self._data is not None or not self.update_bn or not batch_norms(trainer.model):
            return
        if not hasattr(trainer, "build_train_loader"):
            raise ConfigError(
                "SWA: the model has batch norms: give a data_loader for their statistics, or update_bn=False"
            )
        self._data = StatisticsData(lambda: trainer.build_train_loader(trainer.cfg))

    def after_step(self) -> None:
        super().after_step()
        # Here, not in step(): by now the schedule has set the next step's learning rates.
        self._set_rates(self.trainer.iter + 1)

    def step(self) -> None:
        if self.average is None:
            self._begin()
            self.updates = 0
        assert self.average is not None
        self.average.update(get_swa_multi_avg_fn(), self.updates)
        self.average.copy_buffers()
        self.updates += 1

    def _set_rates(self, iteration: int) -> None:
        """Set the learning rates for an iteration, if averaging has begun."""
        if self.swa_lr is None or iteration < self._first:
            return
        groups = self.trainer.optimizer.param_groups
        if self._initial_lrs is None:
            self._begun_at = self._first
            self._initial_lrs = [float(group["lr"]) for group in groups]
        done = min(1.0, (iteration - self._first) / self._anneal_iters) if self._anneal_iters else 1.0
        share = (1 - math.cos(math.pi * done)) / 2 if self._cosine else done
        targets = self.swa_lr if isinstance(self.swa_lr, Sequence) else [self.swa_lr] * len(groups)
        for group, lr, target in zip(groups, self._initial_lrs, targets, strict=True):
            rate = target * share + lr * (1 - share)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # ------------------------------------------------------------------ evaluation and the end of training

    def before_eval(self) -> None:
        self._catch_up()
        self._create_loaded()
        last = self._seen is not None and self.trainer.completed
        if self.average is None or self._model_has_average or not (self.evaluate or last):
            return
        self._put()

    def _put(self) -> None:
        """Give the model the average, and compute batch norm statistics for it if they are missing."""
        average = self.average
        assert average is not None
        average.put()
        if self._data is None or self._statistics_of == self.updates or self._seen is None:
            return
        trainer = self.trainer
        with self._data.batches(trainer, number=0, at_most=self._bn_batches) as (batches, count):
            precise_statistics(trainer, trainer.model, batches, count)
        logger.info("SWA: computed batch norm statistics for the average from %d batches", count)
        average.copy_buffers()
        self._statistics_of = self.updates

    def on_eval_end(self) -> None:
        if not self._model_has_average:
            super().on_eval_end()

    def before_save(self, path: str) -> None:
        if not self._model_has_average:
            super().before_save(path)

    def after_train(self) -> None:
        trainer = self.trainer
        if trainer.completed and self.average is None:
            logger.warning(
                "SWA: training ended before the first average: it is due every %s from iteration %d on",
                self._every.period,
                self._first,
            )
        elif trainer.completed and self.final == "average":
            try:
                self._put()
            except BaseException:
                self.on_eval_end()
                raise
            self._model_has_average = True
            logger.info("SWA: the model now has the average of %d sets of weights", self.updates)
        super().after_train()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._initial_lrs is not None:
            state |= {"initial_lrs": self._initial_lrs, "start": self._begun_at}
        if state:
            state["statistics_of"] = self._statistics_of
        if self._model_has_average:
            state["final"] = True
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "averaged_model" in state_dict:
            super().load_state_dict(state_dict)
        self._begun_at = state_dict.get("start")
        self._initial_lrs = state_dict.get("initial_lrs")
        self._statistics_of = state_dict.get("statistics_of", 0)
        self._model_has_average = state_dict.get("final", False)

    def reset_state(self) -> None:
        super().reset_state()
        self._initial_lrs, self._statistics_of, self._model_has_average = None, 0, False
