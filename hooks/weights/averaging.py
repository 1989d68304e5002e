"""What hooks that average weights have in common."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HookBase
from ..every import Every
from .weight_average import WeightAverage

__all__ = ["WeightAveraging"]

logger = logging.getLogger(__name__)


class WeightAveraging(HookBase):
    """Base class of hooks that average weights: when the average is updated, evaluated and saved.

    The average is updated after a step, before any other hook of the step evaluates or saves, wherever the hook
    stands in the list. Iterations whose update was skipped (``SOLVER.NONFINITE_LOSS: skip``, a float16 overflow)
    count: on a GPU the host learns of them later.

    From ``before_eval`` to ``on_eval_end``, and from ``before_predict`` to ``on_predict_end``, the model's tensors hold
    the average. Afterwards its own weights are restored, also after an error or interruption. So the ``model`` in a
    checkpoint always has the weights that training continues with. The hook's state has the average as
    ``averaged_model``: a full state dict of the model with plain names.

    Several such hooks each keep and save their own average. Evaluations use that of the first with ``evaluate``.

    Args:
        start: when averaging begins: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        every: how often the average is updated: a duration.
        device: the device of the average; None: that of the weights.
        evaluate: whether evaluations use the average.
    """

    def __init__(
        self,
        start: "Duration | int | float | str",
        every: "Duration | int | str",
        device: str | None,
        evaluate: bool,
    ) -> None:
        name = type(self).__name__
        self._fraction = Duration.fraction(start)
        self._start_length = Duration(0) if self._fraction else Duration.parse_length(start)
        if not Duration.parse(every):
            raise ConfigError(f"{name}: every must be a duration such as 1 or '1ep', not {every!r}")
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError:
            raise ConfigError(f'{name}: unknown device {device!r}; use None (that of the weights) or "cpu"') from None
        self._every = Every(every)
        self.evaluate = evaluate
        self.average: WeightAverage | None = None
        """The average; None before averaging begins."""
        self.updates = 0
        """The number of updates."""
        self._loaded: Mapping[str, torch.Tensor] | None = None
        # The last iteration handled; None outside training.
        self._seen: int | None = None
        self._first = 0
        self._begun_at: int | None = None
        self._logged = False
        self._put_back_after_save = self._predicting = False
        self._replaced = False

    # ------------------------------------------------------------------ for subclasses

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        """Return whether a buffer is averaged; otherwise the model's current value is used."""
        return False

    def step(self) -> None:
        """Update the average. Called every ``every`` iterations once averaging has begun."""
        raise NotImplementedError

    # ------------------------------------------------------------------ training

    def on_registered(self) -> None:
        first = next(hook for hook in self.trainer.find_hooks(WeightAveraging) if hook.evaluate or hook is self)
        if self.evaluate and first is not self:
            self.evaluate = False
            logger.warning(
                "Evaluations use the average of the first %s; that of another %s is only kept and saved",
                type(first).__name__,
                type(self).__name__,
            )

    def before_train(self) -> None:
        # Averaging that has begun continues, even if the run is extended and a fraction of it ends later.
        self._first = self._first_iteration() if self._begun_at is None else self._begun_at
        self._every.start()
        self._replaced = False
        self._seen = self.trainer.start_iter - 1
        self._create_loaded()

    def set_max_iter(self, max_iter: int) -> None:
        """The length of the run has changed. A fraction of it ends at another iteration, unless averaging has begun."""
        if self._begun_at is None:
            self._first = self._first_iteration()

    def _first_iteration(self) -> int:
        trainer = self.trainer
        if self._fraction:
            return round(self._fraction * trainer.max_iter)
        try:
            return self._start_length.iterations(trainer.iters_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: start: {error}") from None

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if self._seen != iteration:
            self._seen = iteration
            due = self._every(self.trainer)
            if due and iteration >= self._first:
                self.step()

    def _catch_up(self) -> None:
        """Update for the current step if another hook needs the average before this hook's ``after_step``."""
        if self._seen is not None and self.trainer.finished_iter == self.trainer.iter:
            self.after_step()

    def after_train(self) -> None:
        self._seen = None

    def _begin(self) -> None:
        if self._seen is not None:
            self._begun_at = self._first
        self.average = WeightAverage(self.trainer.model, self._device, self.averages_buffer, self._loaded)
        self._loaded = None

    def _create_loaded(self) -> None:
        """Create the average from a loaded state, if there is one."""
        if self._loaded is None:
            return
        try:
            self._begin()
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None

    # ------------------------------------------------------------------ evaluation

    def before_eval(self) -> None:
        self._catch_up()
        self._create_loaded()
        if self.average is None or not self.evaluate or self._replaced:
            return
        self._log_once()
        self.average.put()

    def _log_once(self) -> None:
        if not self._logged:
            self._logged = True
            logger.info("%s: evaluations use the averaged weights from now on", type(self).__name__)

    def on_eval_end(self) -> None:
        self._put_back_after_save = False
        if self.average is not None:
            self.average.restore()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self.on_eval_end()  # for evaluations that do not emit on_eval_end

    def on_exception(self, error: BaseException) -> None:
        self.on_eval_end()

    def after_load_best(self) -> None:
        """The model has the best weights, perhaps averaged ones: evaluate those, and not the last average."""
        self._replaced = True

    def before_predict(self) -> None:
        self.before_eval()
        self._predicting = True

    def before_step(self) -> None:
        if self._predicting:
            raise RuntimeError(
                f"{type(self).__name__}: a prediction has not ended, and the model has the averaged weights: read all "
                "outputs of trainer.predict(), or close() it, before training"
            )

    def on_predict_end(self) -> None:
        self._predicting = False
        self.on_eval_end()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights within the context, if there are any."""
        self._create_loaded()
        if self.average is None or self.average.is_in_use:
            yield
            return
        with self.average.in_use():
            yield

    # ------------------------------------------------------------------ checkpoints

    def before_save(self, path: str) -> None:
        self._catch_up()
        if self.average is not None and self.average.is_in_use:  # a save during an evaluation
            self.average.restore()
            self._put_back_after_save = True

    def after_save(self, path: str) -> None:
        if self.average is not None and self._put_back_after_save:
            self.average.put()
        self._put_back_after_save = False

    def state_dict(self) -> dict[str, Any]:
        weights = self._loaded if self.average is None else self.average.state_dict()
        if weights is None:
            return {}
        return {
            "averaged_model": dict(weights),
            "updates": self.updates,
            "start": self._begun_at,
            "evaluate": self.evaluate,  # tells which weights the results belong to
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        weights, start = state_dict["averaged_model"], state_dict["start"]
        if not isinstance(weights, Mapping) or not all(
            isinstance(one, torch.Tensor) or name.endswith("_extra_state") for name, one in weights.items()
        ):
            raise ConfigError("the averaged weights in the checkpoint are not a dict of tensors")
        self.average, self._loaded, self._replaced = None, weights, False
        self.updates, self._begun_at = int(state_dict["updates"]), None if start is None else int(start)

    def reset_state(self) -> None:
        self.average, self._loaded = None, None
        self.updates, self._begun_at = 0, None
