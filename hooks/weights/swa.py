"""Stochastic weight averaging."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY
from .averaging import WeightAveraging
from .precise_bn import Loader, StatisticsData, batch_norms, cumulative_statistics
from .weight_average import load_plain_weights

__all__ = ["SWA"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SWA(WeightAveraging):
    """Averages the weights at the end of each epoch from ``start`` on, each counting the same; they stay at the end.

    From ``start`` on learning rates go from where the schedule has brought them to ``swa_lr`` within ``anneal``, and
    stay there; the schedule steps on, and has no say. Before the average is evaluated, batch norm's statistics are
    computed for it, by a pass over the training data that training does not notice.

    When all iterations are done the model keeps the average (``final="average"``): it is what ``train()`` leaves
    behind, what the last evaluation was of, and the ``model`` in ``model_final``. The last weights of training are
    then in the hook's state as ``last_model``: a run that is resumed with a larger MAX_ITER goes on with them. A run
    that failed or was stopped keeps its own weights.

    Acts in ``after_step``, or before that in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`. Saves
    ``averaged_model``, ``updates`` and the learning rates that it began with.

    Args:
        start: a fraction of the run between 0 and 1, or a duration in iterations or epochs.
        every: how often a snapshot goes into the average: a duration.
        swa_lr: the learning rate while averaging, or one for each parameter group; None: as the schedule has it.
        anneal: how long the learning rate takes to get there: a duration in iterations or epochs.
        anneal_strategy: "cos" or "linear".
        update_bn: whether batch norm's statistics are computed for the average. Without that they are the model's.
        bn_batches: use so many batches for that; None: a pass over the data.
        data_loader: training batches that nobody else reads, or a function that makes the loader. By default a
            second one from the trainer's ``build_train_loader``.
        device: where the average is kept, such as "cpu"; None: beside the weights.
        evaluate: whether evaluations before the last are of the average.
        final: what the model has when training is completed: the "average", or the "last" weights.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (arXiv:1803.05407);
    learning rates as by ``torch.optim.swa_utils.SWALR``.
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
        # How many updates the statistics that the average has were computed after.
        self._statistics_of = 0
        self._stays = False
        self._last_model: dict[str, torch.Tensor] | None = None

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return name in ("running_mean", "running_var") and isinstance(module, nn.modules.batchnorm._BatchNorm)

    # ------------------------------------------------------------------ training

    def before_train(self) -> None:
        self._leave_the_average()
        super().before_train()
        trainer = self.trainer
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
        # Wherever the average was brought up to date: the schedule has set the next step's rates by now.
        self._set_rates(self.trainer.iter + 1)

    def step(self) -> None:
        if self.average is None:
            self._begin()
            self.updates = 0
        assert self.average is not None
        self.average.update(1 / (self.updates + 1))
        self.average.copy_buffers()
        self.updates += 1

    def _set_rates(self, iteration: int) -> None:
        """Set the learning rates for an iteration that averaging has begun with or before."""
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

    # ------------------------------------------------------------------ evaluation, and the end

    def before_eval(self) -> None:
        self._catch_up()
        self._take_over()
        last = self._seen is not None and self.trainer.completed
        if self.average is None or self._stays or not (self.evaluate or last):
            return
        self._tell()
        self._put()

    def _put(self) -> None:
        """Give the model the average, and the average batch norm's statistics if it has none of its own."""
        average = self.average
        assert average is not None
        average.put()
        if self._data is None or self._statistics_of == self.updates or self._seen is None:
            return
        trainer = self.trainer
        with self._data.batches(trainer, number=0, at_most=self._bn_batches) as (batches, count):
            cumulative_statistics(trainer, trainer.model, batches)
        logger.info("SWA: computed batch norm's statistics for the average, from %d batches", count)
        average.copy_buffers()
        self._statistics_of = self.updates

    def on_eval_end(self) -> None:
        if not self._stays:
            super().on_eval_end()

    def before_save(self, path: str) -> None:
        if not self._stays:
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
            self._stays = True
            logger.info("SWA: the model has the average of the weights at %d moments now", self.updates)
        super().after_train()

    def _leave_the_average(self) -> None:
        """Training goes on after it was completed: with its own weights."""
        if self._stays and self.average is not None:
            self.average.restore()
        elif self._last_model is not None:
            load_plain_weights(self.trainer.model, self._last_model)
            logger.info("SWA: training goes on with the weights that it had ended with, not with their average")
        self._stays, self._last_model = False, None

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._initial_lrs is not None:
            state |= {"initial_lrs": self._initial_lrs, "start": self._begun_at}
        if state:
            state["statistics_of"] = self._statistics_of
        if self._stays and self.average is not None:
            state["last_model"] = self.average.own_state_dict()
        elif self._last_model is not None:
            state["last_model"] = self._last_model
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "averaged_model" in state_dict:
            super().load_state_dict(state_dict)
        self._begun_at = state_dict.get("start")
        self._initial_lrs = state_dict.get("initial_lrs")
        self._statistics_of = state_dict.get("statistics_of", 0)
        self._stays, self._last_model = False, state_dict.get("last_model")

    def reset_state(self) -> None:
        self._leave_the_average()
        super().reset_state()
        self._initial_lrs, self._statistics_of = None, 0
