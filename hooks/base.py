"""``HookBase``: the events of a run, and what a hook may use of the trainer. ``Every``: periods of hooks."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..config import ConfigError, Duration, Registry, suggest
from .protocol import TrainerProtocol

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class StopTraining(Exception):
    """Raise it in a hook to stop after the current step, as ``trainer.request_stop(reason)`` does.

    The step is finished and counts, also if the event is in the middle of it. Raised in the model or ``run_step``,
    StopTraining discards the step and stops training at once. Then all ranks must raise it in the same step.
    """


class HookBase:
    """Base class of hooks. Override the events you need::

        before_train()
        while trainer.iter < trainer.max_iter:
            before_epoch()                        # at the first step of an epoch
            before_step()
            trainer.run_step():
                before_fetch(); after_fetch(batch)
                before_forward(batch); after_forward(batch, outputs)    # these two lines
                before_backward(losses); after_backward()               # for each micro-batch
                before_optimizer_step(); after_optimizer_step()
                before_zero_grad(); after_zero_grad()
            after_step()
            after_epoch()                         # at the last step of an epoch
            on_eval()                             # if an evaluation was requested
            on_write(); on_save()                 # if it is due or requested
        on_exception(error)                       # if a step or a hook raised one
        after_train()                             # always
        before_write(); on_write()                # always: also metrics of after_train
        on_save()                                 # the last checkpoint, unless a step failed
        after_run()                               # always

    Evaluation, prediction and checkpoints have events too. ``trainer.emit("name", ...)`` calls the method ``name`` of
    every hook that has it. An event that no hook overrides costs nothing. Do heavy work in ``after_step``: the time
    from ``before_step`` to ``after_step`` is logged as the step's time.

    Attributes:
        trainer: a weak reference to the trainer, set at registration.
        after, before: hook classes (or their names) that must be earlier, or later, in the trainer's list.
        single: whether a trainer may have only one hook of this class.
        uses_outputs: whether the hook reads ``trainer.batch`` and ``trainer.outputs``, which are kept only then.
        uses_indices: the same for ``trainer.sample_indices``.
        state_key: the key of the hook's state in a checkpoint. Default: the class name, then ``Name#2``, ``Name#3``.
    """

    trainer: TrainerProtocol = None  # type: ignore[assignment]  # until it is registered
    after: tuple[type | str, ...] = ()
    before: tuple[type | str, ...] = ()
    single: bool = False
    uses_outputs: bool = False
    uses_indices: bool = False
    state_key: str | None = None

    def on_registered(self) -> None:
        """After the hook was added to ``self.trainer``."""

    def before_train(self) -> None:
        """Once, before the first step. ``trainer.iter == trainer.start_iter``."""

    def after_train(self) -> None:
        """Once, after the last step, also after an error. After a complete run ``trainer.iter == trainer.max_iter``."""

    def before_epoch(self) -> None:
        """Before the first step of each epoch, and before the first step of a resumed run."""

    def after_epoch(self) -> None:
        """After the last step of each epoch."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_step(self) -> None:
        """After each iteration, which is one optimizer update."""

    def before_fetch(self) -> None:
        """Before a batch, or with accumulation a micro-batch, is read."""

    def after_fetch(self, batch: Any) -> None:
        """After a batch, or with accumulation a micro-batch, was read. It may be changed in place."""

    def before_forward(self, batch: Any) -> None:
        """Before the forward pass of each micro-batch."""

    def after_forward(self, batch: Any, outputs: Any) -> None:
        """After the forward pass of each micro-batch; ``outputs`` is the dict of losses."""

    def before_backward(self, losses: Any) -> None:
        """Before the backward pass of each micro-batch; ``losses`` is the scalar tensor that is differentiated."""

    def after_backward(self) -> None:
        """After each backward pass, before unscaling and clipping. The last one of a step exchanges gradients."""

    def before_optimizer_step(self) -> None:
        """Before the optimizer's step. Gradients are accumulated, unscaled and clipped."""

    def after_optimizer_step(self) -> None:
        """After the weights were updated."""

    def before_zero_grad(self) -> None:
        """Before gradients are cleared."""

    def after_zero_grad(self) -> None:
        """After gradients were cleared."""

    def before_eval(self) -> None:
        """Before an evaluation of the test sets."""

    def before_eval_step(self, batch: Any) -> None:
        """Before each batch of an evaluation."""

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        """After each batch of an evaluation."""

    def on_eval_end(self) -> None:
        """After the last batch of an evaluation, also if it failed: restore what ``before_eval`` changed."""

    def after_eval(self, results: Mapping[str, Any]) -> None:
        """After an evaluation, with its results by full name, such as ``results["test/accuracy"]``."""

    def before_predict(self) -> None:
        """Before predictions are made."""

    def on_predict_end(self) -> None:
        """After the last prediction, also if one failed: restore what ``before_predict`` changed."""

    def after_predict(self, results: Any) -> None:
        """After all predictions were made."""

    def before_sanity_check(self) -> None:
        """Before a few test batches are tried, ahead of training."""

    def after_sanity_check(self, results: Any) -> None:
        """After a few test batches were tried."""

    def before_save(self, path: str) -> None:
        """Before a checkpoint is written to ``path``."""

    def after_save(self, path: str) -> None:
        """After a checkpoint was written to ``path``."""

    def after_load(self, path: str) -> None:
        """After the run's state was loaded from ``path``."""

    def after_write(self, metrics: Mapping[str, float]) -> None:
        """After metrics were passed to the writers."""

    def on_exception(self, error: BaseException) -> None:
        """Training ends with ``error`` (KeyboardInterrupt included). ``after_train`` follows."""

    def on_eval(self) -> None:
        """At the end of a step in which an evaluation was requested: :class:`EvalHook` evaluates."""

    def before_write(self) -> None:
        """Before metrics are written: put metrics that are computed only then."""

    def on_write(self) -> None:
        """After ``on_eval``, and after ``after_train``: :class:`PeriodicWriter` writes metrics if it is due."""

    def on_save(self) -> None:
        """After ``on_write``, unless a step failed: :class:`PeriodicCheckpointer` saves if it is due."""

    def after_run(self) -> None:
        """Once, at the very end: metrics and the last checkpoint are written."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs after a resume: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def reset_state(self) -> None:
        """Forget what :meth:`state_dict` returns: another trainer has the hook now, or ``train()`` starts over."""


EVENTS: tuple[str, ...] = tuple(name for name in vars(HookBase) if name.startswith(("before_", "after_", "on_")))
"""All events: the methods of :class:`HookBase` that a trainer calls."""

STEP_EVENTS: tuple[str, ...] = EVENTS[EVENTS.index("before_fetch") : EVENTS.index("after_zero_grad") + 1]
"""The events that ``run_step`` emits."""

HOOK_REGISTRY: Registry = Registry("HOOK", HookBase)
"""Hooks that a config's ``HOOKS`` list can name."""


# ---------------------------------------------------------------------- the order that classes declare


class HookOrderError(ConfigError):
    """Hooks are in an invalid order, or a hook is registered twice."""


def check_hooks(hooks: Sequence[HookBase]) -> None:
    """Check ``after``, ``before``, ``single`` and ``state_key`` of a list of hooks.

    Raises:
        HookOrderError: two hooks are in the wrong order, a ``single`` class has two hooks, or two hooks have the same
            ``state_key``.
    """
    for index, hook in enumerate(hooks):
        name = type(hook).__name__
        for number, earlier in enumerate(hooks[:index]):
            other = type(earlier).__name__
            if earlier is hook:
                raise HookOrderError(f"hook {hook!r} is registered twice; create a second one")
            if hook.single and type(earlier) is type(hook):
                raise HookOrderError(
                    f"there is a {name} already, and there can be only one: remove it first "
                    f"(trainer.remove_hook({name})), or do not register the second"
                )
            if hook.state_key and hook.state_key == earlier.state_key:
                raise HookOrderError(
                    f"hooks {other} and {name} have the same state_key, {hook.state_key!r}: a checkpoint can hold only "
                    "one of their states"
                )
            if any(is_a(hook, one) for one in earlier.after):
                declared = f"{other}.after"
            elif any(is_a(earlier, one) for one in hook.before):
                declared = f"{name}.before"
            else:
                continue
            raise HookOrderError(
                f"hook {name} (number {index}) must be registered before {other} (number {number}), as "
                f"{declared} declares"
            )


def warn_of_no_events(hooks: Sequence[HookBase]) -> None:
    """Warn of methods that have the name of an event and are none, such as ``after_stpe``."""
    for hook in hooks:
        for name in dir(type(hook)):
            looks_like_one = name.startswith(("before_", "after_", "on_")) and callable(getattr(type(hook), name, None))
            if looks_like_one and name not in (*EVENTS, "after_load_best"):
                logger.warning(
                    "Hook %s has a method %s, which is no event: only trainer.emit(%r) calls it%s",
                    *(type(hook).__name__, name, name, suggest(name, EVENTS)),
                )


def is_a(hook: HookBase, name: type | str) -> bool:
    """Return whether a hook is an instance of a class, given as a class or by name."""
    if isinstance(name, str):
        return any(cls.__name__ == name for cls in type(hook).__mro__)
    return isinstance(hook, name)


# ---------------------------------------------------------------------- periods


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
        self._epochs = int(self.period.value) if self.period.unit == "ep" and self.period.value % 1 == 0 else 0
        self._never = not self.period
        self.start()

    def start(self) -> None:
        """Forget an earlier run. Call it in ``before_train``."""
        self._last: float | None = None
        self._epoch: int | None = None

    def __call__(self, trainer: TrainerProtocol) -> bool:
        """Return whether the current step ends a period."""
        done, period = trainer.iter + 1, self.period
        if self.at_end and done >= trainer.max_iter:
            return True
        if self._iters:
            return done % self._iters == 0
        if self._never:
            return False
        if period.unit == "ep":
            if self._epochs and trainer.iters_per_epoch:
                return trainer.epoch_ended and (trainer.epoch + 1) % self._epochs == 0
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

    def left(self, trainer: TrainerProtocol, at_end: bool = False) -> int:
        """Return how many periods end after the current step.

        With ``at_end``, the end of the run ends a period. Periods in time are not counted.
        """
        period, done, length = self.period, trainer.iter + 1, trainer.iters_per_epoch
        if not done < trainer.max_iter < math.inf:
            return 0
        if not period or period.unit == "s" or (period.unit == "ep" and not length):
            return int(at_end)
        steps = period.value * length if period.unit == "ep" and length else period.value
        return (math.ceil if at_end else math.floor)(trainer.max_iter / steps) - int(done // steps)

    def _epochs_ended(self, trainer: TrainerProtocol, epochs: float) -> bool:
        if self._epochs:  # without a length, the end of an epoch is seen when the next one has begun
            before, self._epoch = self._epoch, trainer.epoch
            return before is not None and trainer.epoch // epochs > before // epochs
        if not trainer.iters_per_epoch:
            raise ConfigError(f"a period of {epochs} epochs needs a data loader with a length")
        steps = epochs * trainer.iters_per_epoch
        return (trainer.iter + 1) // steps > trainer.iter // steps


def for_subclasses(method: F) -> F:
    """Decorate a hook's method for an event that the trainer does not call, but overrides of subclasses may."""
    method.is_for_subclasses = True  # type: ignore[attr-defined]
    return method


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
