"""Plain functions as hooks: ``@trainer.on("after_step", every="100it")``."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..config import ConfigError, Duration, suggest
from ..config.registry import is_again
from .base import EVENTS, Every, HookBase
from .protocol import TrainerProtocol

F = TypeVar("F", bound=Callable[..., Any])

# The events of a step. At them a period is one of steps.
_PERIODIC = EVENTS[EVENTS.index("before_epoch") : EVENTS.index("after_zero_grad") + 1]


class CallbackHook(HookBase):
    """A hook made of functions, which are called as ``function(trainer, *event_arguments)``.

    Args:
        **callbacks: functions for events of :class:`HookBase`. None is skipped.

    Raises:
        ConfigError: a name is not an event, or a function does not take its arguments.

    Example: ``CallbackHook(after_step=lambda trainer: print(trainer.iter))``
    """

    def __init__(self, **callbacks: Callable[..., None] | None) -> None:
        for event, function in callbacks.items():
            if function is not None:
                check_arguments(function, event)
                setattr(self, event, self._bind(function))

    def _bind(self, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: function(self.trainer, *args, **kwargs)


class FunctionHook(HookBase):
    """Calls ``function(trainer, *event_arguments)`` at one event. With ``once`` it saves whether it has been called.

    Args:
        function: the function.
        event: an event of :class:`HookBase`.
        every: a duration: call the function only in steps that end such a period. At an event that is not one of a
            step, such as ``after_eval``, a number without a unit counts its calls: 2 is every second one.
        once: call the function only the first time.
        when: call the function only if ``when(trainer)`` is true.
        uses_outputs: whether the function reads ``trainer.batch`` and ``trainer.outputs``.
        uses_indices: whether it reads ``trainer.sample_indices``.

    Raises:
        ConfigError: there is no such event, or the function does not take its arguments.
    """

    def __init__(
        self,
        function: Callable[..., object],
        event: str,
        *,
        every: "Duration | int | str | None" = None,
        once: bool = False,
        when: Callable[[TrainerProtocol], bool] | None = None,
        uses_outputs: bool = False,
        uses_indices: bool = False,
    ) -> None:
        check_arguments(function, event)
        self.function = function
        self.event = event
        self.display_name = f"@on({event}) {getattr(function, '__qualname__', repr(function))}"
        self._every = None if every is None else Every(every)
        self._counts = event not in _PERIODIC and str(every).isdecimal()
        self._calls = 0
        self._once = once
        self._when = when
        self._done = False
        self.uses_outputs = uses_outputs
        self.uses_indices = uses_indices
        setattr(self, event, self._call)

    def _call(self, *args: object, **kwargs: object) -> None:
        trainer, every = self.trainer, self._every
        if self._once and self._done:
            return
        if every is None:
            due = True
        elif self._counts:
            self._calls += 1
            due = bool(every.period) and self._calls % every.period.value == 0
        elif self.event == "before_epoch" and every.period.unit == "ep":  # counted where epochs begin
            due = trainer.epoch % every.period.value == 0
        else:
            due = every(trainer)
        if due and (self._when is None or self._when(trainer)):
            self._done = True
            self.function(trainer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state = {"done": self._done} if self._once else {}
        return {**state, "calls": self._calls} if self._counts else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done, self._calls = state_dict.get("done", False), state_dict.get("calls", 0)

    def reset_state(self) -> None:
        self._done, self._calls = False, 0


def check_arguments(function: Callable[..., object], event: str) -> None:
    """Check that a function takes the trainer and the arguments of an event.

    Raises:
        ConfigError: it does not, or there is no such event.
    """
    if event not in EVENTS:
        raise ConfigError(
            f"there is no event {event!r}{suggest(event, EVENTS)} (For an event of your own, write a HookBase with a "
            "method of that name)"
        )
    names = ["trainer", *list(inspect.signature(getattr(HookBase, event)).parameters)[1:]]
    try:
        inspect.signature(function).bind(*names)
    except ValueError:  # the signature is unknown, as of some builtins
        return
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(f"{event} calls a function as f({', '.join(names)}), which {name} is not: {error}") from None


def on_event(trainer: TrainerProtocol, event: str, **options: Any) -> Callable[[F], F]:
    """Decorate a function to be called at an event of this trainer: ``@trainer.on("after_step", every="100it")``.

    Args:
        event: an event of :class:`HookBase`.
        **options: ``every``, ``once``, ``when``, ``uses_outputs``, ``uses_indices``; see :class:`FunctionHook`.

    Returns:
        A decorator that returns the function unchanged. A function of the same module, name and event replaces the
        earlier one, so a notebook's cell can run again.
    """

    def decorate(function: F) -> F:
        for old in trainer.find_hooks(FunctionHook):
            if old.event == event and is_again(old.function, function):
                trainer.remove_hook(old)
        trainer.register_hooks([FunctionHook(function, event, **options)])
        return function

    return decorate


def on(event: str, *, trainer: TrainerProtocol | None = None, **options: Any) -> Callable[[F], F]:
    """Decorate a function to be called at an event of a trainer; see :func:`on_event`.

    Raises:
        ConfigError: no trainer is given.
    """
    if trainer is None:
        raise ConfigError(
            f'@on("{event}"): of which trainer? Write @trainer.on("{event}") when there is one, or name a hook in HOOKS'
        )
    return on_event(trainer, event, **options)
