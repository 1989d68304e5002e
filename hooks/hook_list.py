"""``HookCaller``: a trainer's hooks, in their order, and the one way to call them."""

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..config import ConfigError
from ..config.errors import loading
from .base import EVENTS, STEP_EVENTS, HookBase, HookOrderError, StopTraining, check_hooks
from .common import check_numbers
from .functions import WAITING, functions_for, replaces

__all__ = ["HookCaller", "HookOrderError", "check_hooks", "hook_name", "overrides"]

logger = logging.getLogger(__name__)

# A hook's method for an event, its cost so far as [seconds, calls], and the hook.
Listener = tuple[Callable[..., None], list[float], HookBase]


class HookCaller:
    """The part of a trainer that holds its hooks, and calls at each event those that override it.

    The table of the methods to call is built when hooks are registered or removed, and when training starts. Each call
    is timed, which takes less than 0.1 µs. The list ``_hooks`` may be edited before training.
    """

    name = ""

    def __init__(self) -> None:
        self._hook_proxy: Any = weakref.proxy(self)  # for hooks: a cycle with them would keep GPU memory in use
        self._hooks: list[HookBase] = []
        # The methods to call, by event. A step looks here whether any hook has an event.
        self._listeners: dict[str, tuple[Listener, ...]] = dict.fromkeys(EVENTS, ())
        self._running = False  # hooks then get before_train and after_train as they join and leave
        # By identity, since hooks may define equality and need not be hashable.
        self._hook_costs: dict[tuple[int, str], tuple[HookBase, list[float]]] = {}
        self._hooks_warned: set[str] = set()

    # ------------------------------------------------------------------ registration

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks. At each event hooks are called in the order of registration.

        While training, new hooks get ``before_train`` at once, and take part from then on.

        Args:
            hooks: the hooks. None is skipped.

        Raises:
            TypeError: one is not a HookBase.
            HookOrderError: the order violates a hook's ``after`` or ``before``; the message names both.
        """
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must be a HookBase, not {hook!r}")
        for hook in new:
            for old in [old for old in self._hooks if replaces(hook, old)]:  # a notebook's cell ran again
                self.remove_hook(old)
        check_hooks([*self._hooks, *new])
        self._adopt_hooks(new)
        before = list(self._hooks)
        self._hooks.extend(new)
        self._bind_hooks()
        try:
            self._call_hooks("on_registered", hooks=new)
        except BaseException:
            self._hooks[:] = before
            self._bind_hooks()
            raise
        if self._running:
            self._call_hooks("before_train", hooks=new)

    def _adopt_hooks(self, hooks: Iterable[HookBase]) -> None:
        """Become the trainer of ``hooks``. Reset the state of those that were another trainer's."""
        for hook in hooks:
            former, hook.trainer = hook.trainer, self._hook_proxy
            if former is not None and former is not self._hook_proxy:
                with suppress(ReferenceError):  # the former trainer is gone
                    if getattr(former, "_running", False):
                        hook.trainer = former
                        raise ConfigError(
                            f"hook {hook_name(hook)} belongs to a trainer that is training now: create another one for "
                            "this trainer, or wait until that one has trained"
                        )
                hook.reset_state()

    def remove_hook(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove a hook, or all hooks of a class, and return them.

        While training, they get ``after_train`` and ``after_run`` at once, and no event that begins later.
        """
        found = [h for h in self._hooks if h is hook or (isinstance(hook, type) and isinstance(h, hook))]
        removed = set(map(id, found))
        self._hooks[:] = [h for h in self._hooks if id(h) not in removed]
        self._bind_hooks()
        if self._running:
            self._call_hooks("after_train", hooks=found)
            self._call_hooks("after_run", hooks=found)
        return found

    def find_hook(self, cls: type | str) -> Any:
        """Return the first hook of a class, given as a class or by name; None if there is none."""
        return next(iter(self.find_hooks(cls)), None)

    def find_hooks(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""
        if isinstance(cls, str):
            return [hook for hook in self._hooks if any(base.__name__ == cls for base in type(hook).__mro__)]
        return [hook for hook in self._hooks if isinstance(hook, cls)]

    def describe_hooks(self) -> str:
        """Return a text with the hooks in their order, and the events that each overrides."""
        lines = [
            f"  {number:>2}  {hook_name(hook):<24} {', '.join(event for event in EVENTS if overrides(hook, event))}"
            for number, hook in enumerate(self._hooks)
        ]
        return "\n".join(lines) or "  none"

    # ------------------------------------------------------------------ calls

    def listens(self, event: str) -> bool:
        """Return whether any hook has the method ``event``, so that its arguments need not be computed if not."""
        return bool(self._listeners[event]) if event in self._listeners else any(hasattr(h, event) for h in self._hooks)

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every hook that has it. The event need not be declared.

        Example: ``trainer.emit("verify_batch", batch)``
        """
        self._call_hooks(event, args, kwargs)

    def _call_hooks(
        self,
        event: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        hooks: Iterable[HookBase] | None = None,
        on_error: Callable[[BaseException], Any] | None = None,
    ) -> None:
        """Call hooks' method for an event.

        Args:
            event: the name of the method.
            args, kwargs: its arguments.
            hooks: those to call. Default: all that have the method.
            on_error: called with a hook's error; the next hook is called then. Default: the error is raised.
        """
        listeners: Iterable[Listener] | None = None if hooks is not None else self._listeners.get(event)
        if listeners is None:  # the event is not declared, or is for some hooks only
            some = self._hooks if hooks is None else hooks
            listeners = [self._hook_entry(hook, event) for hook in some if hasattr(hook, event)]
        clock = time.perf_counter
        start = clock()
        for call, cost, hook in listeners:
            try:
                if kwargs:
                    call(*args, **kwargs)
                else:
                    call(*args)
            except StopTraining as stop:
                self._hook_proxy.request_stop(str(stop))
            except BaseException as error:
                error.add_note(f"(in hook {hook_name(hook)}.{event}, at iteration {self._hook_proxy.iter})")
                if on_error is None:
                    raise
                on_error(error)
            end = clock()
            cost[0] += end - start
            cost[1] += 1
            start = end

    def _bind_hooks(self) -> None:
        """Build the table of the methods to call for each event."""
        for event in EVENTS:
            self._listeners[event] = tuple(self._hook_entry(h, event) for h in self._hooks if overrides(h, event))
        self._hook_proxy._hooks_changed()

    def _hooks_changed(self) -> None:
        """Called when the table was built."""

    def _hook_entry(self, hook: HookBase, event: str) -> Listener:
        """Return a hook's entry in the table."""
        _, cost = self._hook_costs.setdefault((id(hook), event), (hook, [0.0, 0]))
        return getattr(hook, event), cost, hook

    def hook_costs(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of calls of each hook in the current or last run, most expensive first."""
        totals: dict[int, tuple[str, float, int]] = {}
        for hook, (seconds, calls) in self._hook_costs.values():
            name, before, count = totals.get(id(hook), (hook_name(hook), 0.0, 0))
            totals[id(hook)] = (name, before + seconds, count + int(calls))
        ordered = sorted(totals.values(), key=lambda item: -item[1])
        return _numbered((name, (seconds, calls)) for name, seconds, calls in ordered)

    # ------------------------------------------------------------------ during a run

    def _join_hooks(self) -> None:
        """Add functions of ``@on``, and hooks that were put into the list by hand."""
        if WAITING:
            names = {self.name, *(cls.__name__ for cls in type(self).__mro__)}
            self.register_hooks(functions_for(names, self._hooks))
        self._adopt_hooks(self._hooks)

    def _start_hooks(self) -> None:
        """Prepare for a run."""
        self._join_hooks()
        check_hooks(self._hooks)
        self._hook_costs.clear()
        self._bind_hooks()
        self._running = True

    def _first_step_done(self) -> None:
        """Warn if hooks override events that this trainer's step does not emit."""
        for event in STEP_EVENTS:
            silent = [hook for _, cost, hook in self._listeners[event] if not cost[1]]
            if silent and event not in self._hooks_warned:
                self._hooks_warned.add(event)
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(map(hook_name, silent)),
                    event,
                    type(self).__name__,
                    event,
                )

    # ------------------------------------------------------------------ state

    def _hooks_by_key(self) -> dict[str, HookBase]:
        """Return the hooks by the keys of their states."""
        return _numbered((hook.state_key or hook_name(hook), hook) for hook in self._hooks)

    def _hook_states(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by key."""
        states = {key: hook.state_dict() for key, hook in self._hooks_by_key().items()}
        return {key: state for key, state in states.items() if state}

    def _load_hook_states(self, states: Mapping[str, Any]) -> None:
        self._join_hooks()
        hooks = self._hooks_by_key()
        for key, state in states.items():
            if key in hooks:
                with loading(f"the state of the hook {key} in the checkpoint"):
                    if type(hooks[key]).__module__.startswith("hookline."):
                        check_numbers(state, hooks[key].state_dict(), f"the state of the hook {key} in the checkpoint")
                    hooks[key].load_state_dict(state)
            else:
                logger.warning("The checkpoint holds the state of a hook %r, which this run does not have", key)
        for key, hook in hooks.items():
            if key not in states and hook.state_dict():
                logger.info("The checkpoint holds no state of hook %s: it starts fresh", key)


def _numbered(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the items: ``Name``, then ``Name#2``, ``Name#3`` for equal names."""
    result: dict[str, Any] = {}
    for name, value in items:
        key, number = name, 1
        while key in result:
            number += 1
            key = f"{name}#{number}"
        result[key] = value
    return result


def hook_name(hook: Any) -> str:
    """Return a hook's name for messages: its class, or the function it was made of."""
    return getattr(hook, "display_name", None) or type(hook).__name__


def overrides(hook: HookBase, event: str) -> bool:
    """Return whether the hook overrides ``event``."""
    return event in hook.__dict__ or getattr(type(hook), event, None) is not getattr(HookBase, event, None)
