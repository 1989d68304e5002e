"""What a hook is: the events of a run, and who listens to them."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import ConfigError, Duration, Registry, suggest

__all__ = ["EVENTS", "HOOK_REGISTRY", "STEP_EVENTS", "CallbackHook", "Every", "HookBase", "StopTraining"]


class StopTraining(Exception):
    """Raised anywhere in a run, ends it in good order: the same as ``trainer.request_stop(reason)``.

    In the model or ``run_step``, of several ranks all must raise it in the same step.
    """


class HookBase:
    """Something that happens around the steps of training. Subclass it and override the events you need::

        before_train()
        while trainer.iter < trainer.max_iter:
            before_epoch()                        # the loader starts over
            before_step()
            trainer.run_step():
                before_fetch(); after_fetch(batch)
                before_forward(batch); after_forward(batch, outputs)
                before_backward(losses); after_backward()
                before_optimizer_step(); after_optimizer_step()
                before_zero_grad(); after_zero_grad()
            after_step()
            after_epoch()                         # the loader ended with this step
        on_exception(error)                       # if one was raised
        after_train()                             # always
        after_run()                               # always, when metrics and the last checkpoint are written, too

    Evaluation, prediction and checkpoints have events of their own, and ``trainer.emit("name", ...)`` calls the
    method ``name`` of every hook that has it. An event that no hook overrides costs nothing.

    Put heavy work into ``after_step``, so that ``before_step`` to ``after_step`` is the time of a step.

    Attributes:
        trainer: a weak reference to the trainer, set when the hook is registered. What a hook may use of it:
            ``iter``, ``epoch``, ``max_iter``, ``start_iter``, ``storage``, ``model``, ``optimizer``,
            ``data_loader``, ``comm``, ``request_stop(reason)``, ``request_save()``, ``request_write()``, ``emit``.
        after: hook classes (or their names) that must stand earlier in the trainer's list, where they are there.
        before: such that must stand later.
        single: whether a trainer may have only one hook of this very class.
        state_key: the name its state is saved under; by default the class's, numbered from the second one on.
    """

    # Of no class that is known here: hooks stand below the engine.
    trainer: Any = None
    after: tuple[type | str, ...] = ()
    before: tuple[type | str, ...] = ()
    single: bool = False
    state_key: str | None = None

    def on_registered(self) -> None:
        """The hook has joined ``self.trainer``."""

    def before_train(self) -> None:
        """Once, before the first step; ``trainer.iter == trainer.start_iter``."""

    def after_train(self) -> None:
        """Once, at the end, also after an error. After a complete run ``trainer.iter == trainer.max_iter``."""

    def before_epoch(self) -> None:
        """Before the first step of each pass over the data, and when a resumed run goes on in the middle of one."""

    def after_epoch(self) -> None:
        """After the last step of each pass over the data."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_step(self) -> None:
        """After each iteration: one optimizer update."""

    def before_fetch(self) -> None:
        """Before a batch is read."""

    def after_fetch(self, batch: Any) -> None:
        """A batch was read; it may be changed in place."""

    def before_forward(self, batch: Any) -> None:
        """Before the forward pass of each micro-batch."""

    def after_forward(self, batch: Any, outputs: Any) -> None:
        """After the forward pass of each micro-batch; ``outputs`` is the dict of losses."""

    def before_backward(self, losses: Any) -> None:
        """Before the backward pass of each micro-batch; ``losses`` is the scalar tensor to be differentiated."""

    def after_backward(self) -> None:
        """After the backward pass of each micro-batch: gradients are there, not yet clipped."""

    def before_optimizer_step(self) -> None:
        """Gradients are final: accumulated, unscaled, clipped."""

    def after_optimizer_step(self) -> None:
        """Weights have been updated."""

    def before_zero_grad(self) -> None:
        """Before gradients are cleared."""

    def after_zero_grad(self) -> None:
        """Gradients have been cleared."""

    def before_eval(self) -> None:
        """Before an evaluation over the test sets."""

    def before_eval_step(self, batch: Any) -> None:
        """Before each batch of an evaluation."""

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        """After each batch of an evaluation."""

    def on_eval_end(self) -> None:
        """The test sets are done, or the evaluation failed: what ``before_eval`` changed is put back. Always comes."""

    def after_eval(self, results: Mapping[str, Any]) -> None:
        """After an evaluation, with its results by test set and metric."""

    def before_predict(self) -> None:
        """Before predictions are made."""

    def on_predict_end(self) -> None:
        """Predictions have been made, were given up, or failed: what ``before_predict`` changed is put back."""

    def after_predict(self, results: Any) -> None:
        """Predictions have been made."""

    def before_sanity_check(self) -> None:
        """Before the few test batches that are tried ahead of training."""

    def after_sanity_check(self, results: Any) -> None:
        """After them."""

    def before_save(self, path: str) -> None:
        """Before a checkpoint is written to ``path``."""

    def after_save(self, path: str) -> None:
        """A checkpoint stands at ``path``."""

    def after_load(self, path: str) -> None:
        """The run's state was loaded from ``path``."""

    def after_write(self, metrics: Mapping[str, float]) -> None:
        """Metrics have been handed to the writers."""

    def on_exception(self, error: BaseException) -> None:
        """Training ends with ``error`` (KeyboardInterrupt included); ``after_train`` follows."""

    def on_eval(self) -> None:
        """An evaluation was requested: :class:`EvalHook` acts. Comes at the end of a step, after all other events."""

    def before_write(self) -> None:
        """Metrics are about to be written: the place to put what is computed only then. Comes after ``on_eval``."""

    def on_write(self) -> None:
        """Metrics are due: :class:`PeriodicWriter` acts."""

    def on_save(self) -> None:
        """A checkpoint is due: :class:`PeriodicCheckpointer` acts. Comes after ``on_write``, last of a step."""

    def after_run(self) -> None:
        """Once, when all is over: every hook had its ``after_train``, metrics and the last checkpoint are written."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for the hook to go on after a resume: plain data and tensors. Empty: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned in an earlier run."""

    def reset_state(self) -> None:
        """Forget what :meth:`state_dict` would return: the trainer trains again, and not from where it was.

        Comes before ``before_train``, when ``train(start_iter, max_iter)`` is called a second time with a
        ``start_iter`` that does not follow the last finished iteration.
        """


EVENTS: tuple[str, ...] = tuple(
    name
    for name, member in vars(HookBase).items()
    if callable(member) and not name.startswith("_") and not name.endswith(("state_dict", "reset_state"))
)
"""The name of every event, in the order of a run."""

STEP_EVENTS: tuple[str, ...] = EVENTS[EVENTS.index("before_fetch") : EVENTS.index("after_zero_grad") + 1]
"""Those that ``run_step`` emits."""


HOOK_REGISTRY: Registry = Registry("HOOK", HookBase)
"""Hooks that a config's ``HOOKS`` list may name. Their arguments come from ``ARGS``."""


def overrides(hook: HookBase, event: str) -> bool:
    """Whether the hook does something at ``event``."""
    return event in hook.__dict__ or getattr(type(hook), event, None) is not getattr(HookBase, event, None)


class CallbackHook(HookBase):
    """A hook made of functions.

    Args:
        custom: functions for events of one's own (see ``trainer.emit``), by event.
        **callbacks: functions for the events of :class:`HookBase`, each called as
            ``function(trainer, *what the event passes)``. None is allowed.

    Raises:
        ConfigError: a name is no event.

    Example: ``CallbackHook(after_step=lambda trainer: print(trainer.iter))``
    """

    def __init__(
        self,
        *,
        custom: Mapping[str, Callable[..., None]] | None = None,
        **callbacks: Callable[..., None] | None,
    ) -> None:
        for event in callbacks:
            if event not in EVENTS:
                raise ConfigError(f"CallbackHook: there is no event {event!r}{suggest(event, EVENTS)}")
        for event, function in {**callbacks, **(custom or {})}.items():
            if function is not None:
                setattr(self, event, self._bind(function))

    def _bind(self, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: function(self.trainer, *args, **kwargs)


class Every:
    """Tells at the end of a step whether a period ended with it: the one place where periods are counted.

    Args:
        period: a duration: ``20``, ``"500it"``, ``"2ep"``, ``"30min"``; 0 never ends. The end of an epoch of a loader
            without a length is seen one step late.
        at_end: also say yes at the last step of the run.
    """

    def __init__(self, period: "Duration | int | str | None", at_end: bool = False) -> None:
        self.period = Duration.parse(period)
        self.at_end = at_end
        # The usual cases, asked in every step by several hooks, do without the rest: iterations, and never.
        self._iters = int(self.period.value) if self.period and self.period.unit == "it" else 0
        self._other = bool(self.period) and not self._iters
        self.start()

    def start(self) -> None:
        """Training starts: so does the clock of a period in seconds."""
        self._started = time.monotonic()
        self._last: float | None = None
        self._epoch: int | None = None

    def __call__(self, trainer: Any) -> bool:
        """Whether the step that ends now ends a period. To be asked once a step."""
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
        # A trainer's clock tells all ranks the same time, so that they act at the same step.
        now = trainer.clock() if hasattr(trainer, "clock") else time.monotonic() - self._started
        if self._last is None:
            self._last = now if trainer.iter > trainer.start_iter else 0.0  # in a run that goes on already: from now on
        elif now < self._last:  # another run
            self._last = 0.0
        if now - self._last < period.value:
            return False
        self._last = now
        return True

    def _epochs_ended(self, trainer: Any, epochs: float) -> bool:
        if epochs == int(epochs) and trainer.iters_per_epoch:
            return trainer.epoch_ended and (trainer.epoch + 1) % epochs == 0
        if epochs == int(epochs):  # of a loader without a length the end is seen when the next epoch has begun
            before, self._epoch = self._epoch, trainer.epoch
            return before is not None and trainer.epoch // epochs > before // epochs
        if not trainer.iters_per_epoch:
            raise ConfigError(f"a period of {epochs} epochs needs a data loader with a length")
        steps = epochs * trainer.iters_per_epoch
        return (trainer.iter + 1) // steps > trainer.iter // steps
