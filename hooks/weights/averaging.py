"""Hooks that train on, and keep an average of the weights beside."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..common.models import unwrap_model
from ..every import Every
from .weight_average import WeightAverage, has_shapes

__all__ = ["EMA", "EMAHook", "WeightAveraging"]

logger = logging.getLogger(__name__)


class WeightAveraging(HookBase):
    """What hooks that average weights have in common: when they act, how they are evaluated and saved.

    The average is updated after a step, wherever the hook stands: before another hook of that step evaluates or saves.
    An iteration whose update was skipped (``SOLVER.NONFINITE_LOSS: skip``, a float16 overflow) counts as any other;
    on a GPU nobody knows of it without waiting.

    From ``before_eval`` to ``on_eval_end``, and from ``before_predict`` to ``on_predict_end``, the model has the
    average for its weights, by copies into its own tensors; then its own again, also after an evaluation that failed
    or was interrupted. So the ``model`` in a checkpoint is always what training goes on with. The average is in the
    hook's state, as ``averaged_model``: a full state dict of the model, under plain names.

    Args:
        start: when averaging begins: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        every: how often the average is updated: a duration.
        device: where it is kept; None: beside the weights.
        evaluate: whether evaluations are of the average, once there is one.
    """

    def __init__(
        self,
        start: "Duration | int | float | str",
        every: "Duration | int | str",
        device: str | None,
        evaluate: bool,
    ) -> None:
        name = type(self).__name__
        self._fraction = start if isinstance(start, float) and 0 < start < 1 else None
        self._start_length = Duration(0) if self._fraction else Duration.parse_length(start)
        if not Duration.parse(every):
            raise ConfigError(f"{name}: every is {every!r}: give how often the average is updated, such as 1 or '1ep'")
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError:
            raise ConfigError(f'{name}: unknown device {device!r}; use None (beside the weights) or "cpu"') from None
        self._every = Every(every)
        self.evaluate = evaluate
        self.average: WeightAverage | None = None
        """The average, once there is one."""
        self.updates = 0
        """How often it was updated."""
        self._loaded: Mapping[str, torch.Tensor] | None = None
        # The last iteration that the average knows of; None while no training is going on.
        self._seen: int | None = None
        self._first = 0
        self._begun_at: int | None = None
        self._told = False
        self._lent = self._predicting = False

    # ------------------------------------------------------------------ for subclasses

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether a buffer has an average of its own, instead of the model's present value."""
        return False

    def step(self) -> None:
        """An iteration is done, ``every`` has come round, and averaging has begun: update the average."""
        raise NotImplementedError

    # ------------------------------------------------------------------ when it acts

    def on_registered(self) -> None:
        others = [hook for hook in self.trainer.find_hooks(WeightAveraging) if hook is not self and hook.evaluate]
        if self.evaluate and others:
            raise ConfigError(
                f"{type(others[0]).__name__} and {type(self).__name__} both want evaluations to be of their average; "
                "give one of them evaluate=False"
            )

    def before_train(self) -> None:
        # What has begun goes on, also if the run is made longer and a fraction of it now ends later.
        self._first = self._first_iteration() if self._begun_at is None else self._begun_at
        self._every.start()
        self._seen = self.trainer.start_iter - 1
        self._take_over()

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
        """Another hook looks at the average in a step whose end this one has not had yet."""
        if self._seen is not None and self.trainer.finished_iter == self.trainer.iter:
            self.after_step()

    def after_train(self) -> None:
        self._seen = None

    def _begin(self) -> None:
        if self._seen is not None:
            self._begun_at = self._first
        self.average = WeightAverage(self.trainer.model, self._device, self.averages_buffer, self._loaded)
        self._loaded = None

    def _take_over(self) -> None:
        """Make the average that was loaded, if one was."""
        if self._loaded is None:
            return
        try:
            self._begin()
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None

    # ------------------------------------------------------------------ evaluation

    def before_eval(self) -> None:
        self._catch_up()
        self._take_over()
        if self.average is None or not self.evaluate:
            return
        self._tell()
        self.average.put()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.info("%s: from here on evaluations are of the averaged weights", type(self).__name__)

    def on_eval_end(self) -> None:
        self._lent = False
        if self.average is not None:
            self.average.restore()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self.on_eval_end()  # for evaluations that do not emit that

    def on_exception(self, error: BaseException) -> None:
        self.on_eval_end()

    def before_predict(self) -> None:
        self.before_eval()
        self._predicting = True

    def before_step(self) -> None:
        if self._predicting:
            raise RuntimeError(
                f"{type(self).__name__}: a prediction has not ended, and the model has the averaged weights: take all "
                "outputs of trainer.predict(), or close() it, before training goes on"
            )

    def on_predict_end(self) -> None:
        self._predicting = False
        self.on_eval_end()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the model has the average for its weights, if there is one; afterwards its own again."""
        self._take_over()
        if self.average is None or self.average.is_in_use:
            yield
            return
        with self.average.in_use():
            yield

    # ------------------------------------------------------------------ checkpoints

    def before_save(self, path: str) -> None:
        self._catch_up()
        if self.average is not None and self.average.is_in_use:  # somebody saves in the middle of an evaluation
            self.average.restore()
            self._lent = True

    def after_save(self, path: str) -> None:
        if self.average is not None and self._lent:
            self.average.put()
        self._lent = False

    def state_dict(self) -> dict[str, Any]:
        weights = self._loaded if self.average is None else self.average.state_dict()
        if weights is None:
            return {}
        return {
            "averaged_model": dict(weights),
            "updates": self.updates,
            "start": self._begun_at,
            "evaluate": self.evaluate,  # for who loads the weights alone: which of the two the results are of
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        weights, start = state_dict["averaged_model"], state_dict["start"]
        if not isinstance(weights, Mapping) or not all(
            isinstance(one, torch.Tensor) or name.endswith("_extra_state") for name, one in weights.items()
        ):
            raise ConfigError("the averaged weights in the checkpoint are not tensors by name")
        self.average, self._loaded = None, weights
        self.updates, self._begun_at = int(state_dict["updates"]), None if start is None else int(start)

    def reset_state(self) -> None:
        self.average, self._loaded = None, None
        self.updates, self._begun_at = 0, None


@HOOK_REGISTRY.register()
class EMA(WeightAveraging):
    """Keeps an exponential moving average of the weights (Polyak averaging), and has it evaluated in their place.

    It begins with the weights as they are when iteration ``start`` begins. Update n (from 0) makes it
    ``average = d * average + (1 - d) * weights``, with ``d = min(decay, (1 + n) / (10 + n))`` while it warms up:
    then an average over few steps does not hang on to its first values. Saves ``averaged_model`` and ``updates``;
    after a resume ``decay`` is the config's.

    Acts in ``after_step``, or before that in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`.

    Args:
        decay: the weight of the past, from 0 to below 1. 0.999 averages over about the last thousand updates.
        warmup: whether to begin with a smaller decay, as above.
        every: update every so many iterations, or any other duration. ``decay`` is that of one update.
        start: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        buffers: of the average: "copy" the model's, which costs nothing, or "average" them like the weights. Either
            way buffers of whole numbers are the model's.
        device: where the average is kept, such as "cpu", which saves memory on a GPU at the cost of a copy an update;
            None: beside the weights.
        evaluate: whether evaluations are of the average.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); the warm-up is that
    of TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        warmup: bool = True,
        every: "Duration | int | str" = 1,
        start: "Duration | int | float | str" = 0,
        buffers: Literal["copy", "average"] = "copy",
        device: str | None = None,
        evaluate: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, not {decay!r}")
        if buffers not in ("copy", "average"):
            raise ConfigError(f'EMA: buffers must be "copy" or "average", not {buffers!r}')
        super().__init__(start, every, device, evaluate)
        self.decay = decay
        self.warmup = warmup
        self.buffers = buffers

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return self.buffers == "average"

    def before_train(self) -> None:
        super().before_train()
        trainer = self.trainer
        if self.average is None and trainer.start_iter >= self._first and has_shapes(unwrap_model(trainer.model)):
            if trainer.start_iter:
                logger.info("EMA: nothing averaged was loaded: the average begins with the model's present weights")
            self._begin()

    def after_step(self) -> None:
        super().after_step()
        if self.average is None and self.trainer.iter + 1 >= self._first:
            self._begin()

    def step(self) -> None:
        if self.average is None:
            return
        n = self.updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        self.average.update(1 - decay)
        self.updates = n + 1


EMAHook = HOOK_REGISTRY.register(EMA, name="EMAHook")
"""The name it has elsewhere."""
