"""Plain functions as hooks: ``@on("after_step", every="100it")``."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..config import ConfigError, Duration, suggest
from ..config.registry import is_again
from .base import EVENTS, HookBase
from .every import Every

__all__ = ["CallbackHook", "FunctionHook", "off", "on"]

F = TypeVar("F", bound=Callable[..., Any])

# Events that come once in a run, and those at which a period may end: the events of a step.
_ONCE = ("on_registered", "before_train", "after_train", "on_exception", "after_run")
_PERIODIC = EVENTS[EVENTS.index("before_epoch") : EVENTS.index("after_zero_grad") + 1]


class CallbackHook(HookBase):
    """A hook made of functions, which are called as ``function(trainer, *event_arguments)``.

    Args:
        custom: functions for custom events (see ``trainer.emit``), by event.
        **callbacks: functions for events of :class:`HookBase`. None is skipped.

    Raises:
        ConfigError: a name is not an event, or a function does not take its arguments.

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
                check_arguments(function, event)
                setattr(self, event, self._bind(function))

    def _bind(self, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: function(self.trainer, *args, **kwargs)


class FunctionHook(HookBase):
    """Calls ``function(trainer, *event_arguments)`` at one event. With ``once`` it saves whether it has been called.

    Args:
        function: the function.
        event: an event of :class:`HookBase`; with ``custom``, any name (see ``trainer.emit``).
        every: a duration. Call the function only in steps that end such a period. For events outside of steps, such as
            ``after_eval``, ``after_save`` or a custom event, a number: call it every so many times. It saves the count.
        once: call the function only the first time.
        when: call the function only if ``when(trainer)`` is true.
        custom: whether the event is a custom one.
        uses_outputs: whether the function reads ``trainer.batch`` and ``trainer.outputs``.
        uses_indices: whether it reads ``trainer.sample_indices``.

    Raises:
        ConfigError: there is no such event, ``every`` cannot be used with it, or the function does not take its
            arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        event: str,
        *,
        every: "Duration | int | str | None" = None,
        once: bool = False,
        when: Callable[[Any], bool] | None = None,
        custom: bool = False,
        uses_outputs: bool = False,
        uses_indices: bool = False,
    ) -> None:
        if event not in EVENTS and not custom:
            raise ConfigError(
                f"there is no event {event!r}{suggest(event, EVENTS)}. For a custom event pass custom=True"
            )
        check_arguments(function, event)
        counts = event not in _PERIODIC
        if every is not None and event in _ONCE:
            raise ConfigError(f"every={every!r} cannot be used with {event}, which comes once in a run")
        if every is not None and counts and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ConfigError(
                f"every={every!r} cannot be used with {event}, which is not an event of a step: give the number of "
                f"times, such as every=2. Durations work with {', '.join(_PERIODIC)}"
            )
        self.function = function
        self.event = event
        self.display_name = f"@on({event}) {getattr(function, '__qualname__', repr(function))}"
        self._every = None if every is None or counts else Every(every)
        self._times = int(every) if counts and isinstance(every, int) else 0  # every so many calls of the event
        self._count = 0
        self._once = once
        self._when = when
        self._done = False
        self.uses_outputs = uses_outputs
        self.uses_indices = uses_indices
        setattr(self, event, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if self._once and self._done:
            return
        if self._every is not None and not self._due(trainer):
            return
        if self._times:
            self._count += 1
            if self._count % self._times:
                return
        if self._when is not None and not self._when(trainer):
            return
        self._done = True
        self.function(trainer, *args, **kwargs)

    def _due(self, trainer: Any) -> bool:
        every = self._every
        assert every is not None
        if self.event == "before_epoch" and every.period.unit == "ep":  # counted where epochs begin
            return trainer.epoch % every.period.value == 0
        return every(trainer)

    def state_dict(self) -> dict[str, Any]:
        return ({"done": self._done} if self._once else {}) | ({"count": self._count} if self._times else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done = state_dict.get("done", False)
        self._count = state_dict.get("count", 0)

    def reset_state(self) -> None:
        self._done, self._count = False, 0


def check_arguments(function: Callable[..., Any], event: str) -> None:
    """Check that a function takes the trainer and the arguments of an event. Those of a custom event are not known.

    Raises:
        ConfigError: it does not.
    """
    method = getattr(HookBase, event, None)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # unknown, as of some builtins
        return
    if method is None:
        return
    names = ["trainer", *list(inspect.signature(method).parameters)[1:]]
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"{event} calls a function as f({', '.join(names)}), but {name}{signature}: {error}"
        ) from None


class _Waiting:
    """A decorated function that trainers register when training starts."""

    def __init__(self, trainer: str | None, make: Callable[[], FunctionHook]) -> None:
        self.trainer = trainer
        self.make = make
        self.hook = make()  # created now, so that a wrong argument fails at the decorator
        self.function = self.hook.function


_WAITING: list[_Waiting] = []


def on(
    event: str,
    *,
    every: "Duration | int | str | None" = None,
    once: bool = False,
    when: Callable[[Any], bool] | None = None,
    trainer: Any = None,
    custom: bool = False,
    uses_outputs: bool = False,
    uses_indices: bool = False,
) -> Callable[[F], F]:
    """Decorate a function to be called at an event.

    Args:
        event, every, once, when, custom, uses_outputs, uses_indices: see :class:`FunctionHook`.
        trainer: a trainer, or the name of one (its ``name`` or its class). None: every trainer of this process that
            starts training from now on, until :func:`off`.

    Returns:
        A decorator that returns the function unchanged. A function of the same module, name and event replaces the
        earlier one, so a notebook's cell can run again.

    Example::

        @on("after_step", every="100it")
        def report(trainer):
            print(trainer.iter, trainer.storage.latest()["total_loss"])
    """

    def decorate(function: F) -> F:
        def make() -> FunctionHook:
            options: dict[str, Any] = {"every": every, "once": once, "when": when, "custom": custom}
            uses: dict[str, Any] = {"uses_outputs": uses_outputs, "uses_indices": uses_indices}
            return FunctionHook(function, event, **uses, **options)

        if trainer is None or isinstance(trainer, str):
            new = _Waiting(trainer, make)
            _WAITING[:] = [waiting for waiting in _WAITING if not replaces(new.hook, waiting.hook)]
            _WAITING.append(new)
        else:
            trainer.register_hooks([make()])
        return function

    return decorate


def off(function: Callable[..., Any]) -> None:
    """Undo :func:`on` without a trainer or with a name. Trainers that have registered the function keep it."""
    _WAITING[:] = [waiting for waiting in _WAITING if waiting.function is not function]


def replaces(new: HookBase, hook: HookBase) -> bool:
    """Return whether a hook's function is that of another hook, defined again, at the same event."""
    if not isinstance(new, FunctionHook) or not isinstance(hook, FunctionHook) or new is hook:
        return False
    return new.event == hook.event and is_again(hook.function, new.function)


def functions_for(names: Iterable[str], present: Iterable[HookBase]) -> list[HookBase]:
    """Return new hooks for functions decorated for a trainer with one of ``names``, unless they are in ``present``."""
    origins = {id(getattr(hook, "origin", None)) for hook in present}
    hooks: list[HookBase] = []
    for waiting in _WAITING:
        if (waiting.trainer is None or waiting.trainer in names) and id(waiting) not in origins:
            hook = waiting.make()
            hook.origin = waiting  # type: ignore[attr-defined]
            hooks.append(hook)
    return hooks
