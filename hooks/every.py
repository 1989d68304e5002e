"""Periods: ``Every("2ep")`` says at which steps a hook acts."""

from typing import Any

from ..config import ConfigError, Duration

__all__ = ["Every", "Period"]


class Every:
    """Returns at the end of a step whether the step ends a period. Call it once in each step.

    Args:
        period: a duration: ``20``, ``"500it"``, ``"2ep"``, ``"30min"``. 0 never ends. If the loader has no length, the
            end of an epoch is seen one step late.
        at_end: whether the run's last step ends a period too.
    """

    def __init__(self, period: "Duration | int | str | None", at_end: bool = False) -> None:
        self.period = Duration.parse(period)
        self.at_end = at_end
        # Several hooks ask in every step, so the usual cases (iterations, never) are fast.
        self._iters = int(self.period.value) if self.period and self.period.unit == "it" else 0
        self._other = bool(self.period) and not self._iters
        self.start()

    def start(self) -> None:
        """Forget an earlier run. Call it in ``before_train``."""
        self._last: float | None = None
        self._epoch: int | None = None

    def __call__(self, trainer: Any) -> bool:
        """Return whether the current step ends a period."""
        done = trainer.iter + 1
        iters = self._iters
        if iters and done % iters == 0:
            return True
        if self.at_end and done >= trainer.max_iter:
            return True
        if iters or not self._other:
            return False
        period = self.period
        if period.unit == "ep":
            return self._epochs_ended(trainer, period.value)
        # A trainer's clock gives all ranks the same time, so they act at the same step.
        now = trainer.clock()
        if self._last is None:
            self._last = now if trainer.iter > trainer.start_iter else 0.0  # a hook that joins later counts from now on
        elif now < self._last:  # another run
            self._last = 0.0
        if now - self._last < period.value:
            return False
        self._last = now
        return True

    def _epochs_ended(self, trainer: Any, epochs: float) -> bool:
        if epochs == int(epochs) and trainer.iters_per_epoch:
            return trainer.epoch_ended and (trainer.epoch + 1) % epochs == 0
        if epochs == int(epochs):  # without a length, the end of an epoch is seen when the next one has begun
            before, self._epoch = self._epoch, trainer.epoch
            return before is not None and trainer.epoch // epochs > before // epochs
        if not trainer.iters_per_epoch:
            raise ConfigError(f"a period of {epochs} epochs needs a data loader with a length")
        steps = epochs * trainer.iters_per_epoch
        return (trainer.iter + 1) // steps > trainer.iter // steps


class Period:
    """An attribute of a hook: the period of its ``_every``, which ported code reads and sets, as ``hook._period = 50``.

    Its value is a number of iterations, 0 for never, or the Duration if the period is not in iterations.

    Args:
        at_end: as for :class:`Every`, for hooks that have none yet.
    """

    def __init__(self, at_end: bool = False) -> None:
        self._at_end = at_end

    def __get__(self, hook: Any, owner: Any = None) -> Any:
        if hook is None:
            return self
        period = hook._every.period
        return period if period and period.unit != "it" else int(period.value) if period else 0

    def __set__(self, hook: Any, period: "Duration | int | str | None") -> None:
        every = vars(hook).get("_every")
        hook._every = Every(period, self._at_end if every is None else every.at_end)
