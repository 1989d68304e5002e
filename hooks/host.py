"""``HookHost``: the part of a trainer that holds hooks and calls them."""

import inspect
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from ..config import ConfigError, Duration
from ..config.errors import loading
from .base import EVENTS, STEP_EVENTS, HookBase, StopTraining
from .functions import functions_for, replaces
from .order import check_hooks

__all__ = ["HookHost", "hook_name", "overrides"]

logger = logging.getLogger(__name__)

# A hook's method for an event, its cost so far as [seconds, calls], and the hook.
Listener = tuple[Callable[..., None], list[float], HookBase]


class HookHost:
    """Registers hooks, and at each event calls those that override it, in the order of registration.

    A table of the methods to call for each event is built when hooks are registered or removed, and when training
    starts. Each call is timed, which takes less than 0.1 µs.
    """

    iter: int
    name: str = ""
    """A name for ``@on(..., trainer="name")``, in addition to the names of the trainer's classes."""

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self._listeners: dict[str, tuple[Listener, ...]] = dict.fromkeys(EVENTS, ())
        # By identity, since hooks may define equality and need not be hashable.
        self._costs: dict[tuple[int, str], tuple[HookBase, list[float]]] = {}
        # While training: hooks that join or leave before the next step.
        self._running = False
        self._joined: list[HookBase] = []
        self._left: list[HookBase] = []
        self._warned: set[str] = set()

    # ------------------------------------------------------------------ registration

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks. At each event hooks are called in the order of registration.

        While training, new hooks get ``before_train`` before the next step, and take part from then on.

        Args:
            hooks: the hooks. None is skipped.

        Raises:
            TypeError: one is not a HookBase.
            HookOrderError: the order violates a hook's ``after`` or ``before``; the message shows a valid order.
        """
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must be a HookBase, not {hook!r}")
        for hook in new:
            for old in [old for old in self._hooks if replaces(hook, old)]:  # a notebook's cell ran again
                self.remove_hook(old)
        check_hooks([*self._hooks, *new])
        self._adopt(new)
        self._hooks.extend(new)
        if self._running:
            self._joined.extend(new)
        else:
            self._bind_hooks()
        try:
            for hook in new:
                self._run((self._listener(hook, "on_registered"),), "on_registered", (), {})
        except BaseException:
            for hook in new:
                self.remove_hook(hook)
            raise

    def _adopt(self, hooks: Iterable[HookBase]) -> None:
        """Make this the trainer of ``hooks``. Reset the state of those that were another trainer's."""
        moved = []
        for hook in hooks:
            former = hook.trainer
            try:  # a trainer and its ``_trainer`` have the same __dict__
                if getattr(former, "__dict__", None) is vars(self):
                    continue
                if getattr(former, "_running", False):
                    raise ConfigError(
                        f"hook {hook_name(hook)} belongs to a trainer that is training now: create another one for "
                        "this trainer, or wait until that one has trained"
                    )
            except ReferenceError:  # the former trainer is gone
                pass
            moved.append((hook, former is not None))
        for hook, reset in moved:
            hook.trainer = weakref.proxy(self)  # weak: a cycle of trainer and hooks would keep GPU memory in use
            if reset:
                hook.reset_state()

    def remove_hook(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove hooks.

        While training, the hooks get ``after_train`` and ``after_run`` before the next step. A hook that was registered
        in the same step gets no event.

        Args:
            hook: a hook; or a class, to remove all its hooks.

        Returns:
            The removed hooks.
        """
        found = [h for h in self._hooks if h is hook or (isinstance(hook, type) and isinstance(h, hook))]
        self._hooks = [h for h in self._hooks if not any(h is f for f in found)]
        if not self._running:
            self._bind_hooks()
            return found
        # A hook that was registered in this step has not joined the run, so it gets no event.
        self._left.extend(hook for hook in found if not _is_among(hook, self._joined))
        self._joined = [hook for hook in self._joined if not _is_among(hook, found)]
        return found

    def find_hook(self, cls: type | str) -> Any:
        """Return the first hook of a class, given as a class or by name; None if there is none."""
        return next(iter(self.find_hooks(cls)), None)

    def find_hooks(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""
        if isinstance(cls, str):
            return [hook for hook in self._hooks if any(base.__name__ == cls for base in type(hook).__mro__)]
        return [hook for hook in self._hooks if isinstance(hook, cls)]

    def listens(self, event: str) -> bool:
        """Return whether any hook has the method ``event``, so that its arguments need not be computed if not."""
        return bool(self._listeners_of(event))

    def describe_hooks(self) -> str:
        """Return a text with the hooks in their order, and the events that each overrides."""
        lines = []
        for number, hook in enumerate(self._hooks):
            events = [event for event in EVENTS if overrides(hook, event)]
            lines.append(f"  {number:>2}  {hook_name(hook):<24} {', '.join(events)}")
        return "\n".join(lines) or "  none"

    def hook_costs(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of calls of each hook in the current or last run, most expensive first."""
        totals: dict[int, tuple[str, float, int]] = {}
        for hook, (seconds, calls) in self._costs.values():
            name, before, count = totals.get(id(hook), (hook_name(hook), 0.0, 0))
            totals[id(hook)] = (name, before + seconds, count + int(calls))
        costs: dict[str, tuple[float, int]] = {}
        for name, seconds, calls in sorted(totals.values(), key=lambda item: -item[1]):
            key, number = name, 1
            while key in costs:
                number += 1
                key = f"{name}#{number}"
            costs[key] = (seconds, calls)
        return costs

    # ------------------------------------------------------------------ calls

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every hook that has it. The event need not be declared.

        Example: ``trainer.emit("verify_batch", batch)``
        """
        self._run(self._listeners_of(event), event, args, kwargs)

    def request_stop(self, reason: str = "", exit_code: int = 0) -> None:
        """Stop training. Called for a hook that raises :class:`StopTraining`."""
        raise NotImplementedError

    def _listeners_of(self, event: str) -> tuple[Listener, ...]:
        if event in self._listeners:
            return self._listeners[event]
        return tuple(self._listener(hook, event) for hook in self._hooks if hasattr(hook, event))

    def _dispatch(self, event: str, *args: Any) -> None:
        listeners = self._listeners[event]
        if listeners:
            self._run(listeners, event, args, {})

    def _run(self, listeners: Iterable[Listener], event: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        clock = time.perf_counter
        start = clock()
        for call, cost, hook in listeners:
            try:
                call(*args, **kwargs)
            except StopTraining as stop:
                self.request_stop(str(stop))
            except BaseException as error:
                error.add_note(f"(in hook {hook_name(hook)}.{event}, at iteration {self.iter})")
                raise
            end = clock()
            cost[0] += end - start
            cost[1] += 1
            start = end

    def _asking_hook(self) -> dict[str, Any] | None:
        """Return the state key and arguments of the hook that is being called, or None.

        Searches the call stack, so that calls of hooks need not be recorded.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is HookHost._run.__code__ and frame.f_locals["self"] is self:
                hook = frame.f_locals["hook"]
                keys = [key for key, other in self._keyed_hooks().items() if other is hook]
                return {"hook": keys[0], "arguments": arguments_of(hook)} if keys else None
            frame = frame.f_back
        return None

    def _first_step_done(self) -> None:
        """After the first step: warn if hooks override events that this trainer's step does not emit."""
        for event in STEP_EVENTS:
            silent = [hook for _, cost, hook in self._listeners[event] if not cost[1]]
            if silent and event not in self._warned:
                self._warned.add(event)
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(map(hook_name, silent)),
                    event,
                    type(self).__name__,
                    event,
                )

    def _bind_hooks(self) -> None:
        """Build the table of the methods to call for each event."""
        table: dict[str, tuple[Listener, ...]] = {}
        for event in EVENTS:
            table[event] = tuple(self._listener(hook, event) for hook in self._hooks if overrides(hook, event))
        self._listeners = table

    def _listener(self, hook: HookBase, event: str) -> Listener:
        _, cost = self._costs.setdefault((id(hook), event), (hook, [0.0, 0]))
        return getattr(hook, event), cost, hook

    # ------------------------------------------------------------------ during a run

    def _reset_hooks(self) -> None:
        """Reset all hooks, for a run that does not continue the earlier one."""
        for hook in self._hooks:
            hook.reset_state()

    def _start_hooks(self) -> None:
        """Prepare for a run: add functions of ``@on``, and hooks that were put into the list by hand."""
        self._join_functions()
        check_hooks(self._hooks)
        self._adopt(self._hooks)
        for hook in self._hooks:
            hook.trainer = weakref.proxy(self)  # it may have been that of ``_trainer``
        self._costs.clear()
        self._bind_hooks()
        self._joined, self._left, self._running = [], [], True

    def _change_hooks(self) -> None:
        """Before a step, let hooks that were registered or removed since the last step join and leave the run."""
        joined, left = self._joined, self._left
        self._joined, self._left = [], []
        self._bind_hooks()
        for event, hooks in (("after_train", left), ("after_run", left), ("before_train", joined)):
            for hook in hooks:
                self._run((self._listener(hook, event),), event, (), {})

    def _join_functions(self) -> None:
        """Register hooks for the functions that ``@on`` decorated for this trainer."""
        names = {self.name, *(cls.__name__ for cls in type(self).__mro__)}
        self.register_hooks(functions_for(names, self._hooks))

    # ------------------------------------------------------------------ state

    def _hooks_state(self) -> dict[str, Any]:
        states = {key: hook.state_dict() for key, hook in self._keyed_hooks().items()}
        return {key: state for key, state in states.items() if state}

    def _load_hooks_state(self, states: Mapping[str, Any]) -> None:
        self._join_functions()
        self._adopt(self._hooks)
        hooks = self._keyed_hooks()
        for key, state in states.items():
            if key not in hooks:
                logger.warning("The checkpoint holds the state of a hook %r, which this run does not have", key)
                continue
            with loading(f"the state of the hook {key} in the checkpoint"):
                hooks[key].load_state_dict(state)
        for key, hook in hooks.items():
            if key not in states and hook.state_dict():
                logger.info("The checkpoint holds no state of hook %s: it starts fresh", key)

    def _keyed_hooks(self) -> dict[str, HookBase]:
        """Return the hooks by the keys of their states."""
        keyed: dict[str, HookBase] = {}
        for hook in self._hooks:
            base = hook.state_key or hook_name(hook)
            key, number = base, 1
            while key in keyed:
                number += 1
                key = f"{base}#{number}"
            keyed[key] = hook
        return keyed


def arguments_of(hook: HookBase) -> dict[str, str]:
    """Return the constructor's arguments, as text, that the hook keeps in attributes of the same names."""
    arguments = {}
    for name in inspect.signature(type(hook).__init__).parameters:
        for attribute in (name, f"_{name}"):
            value = vars(hook).get(attribute, hook)
            if isinstance(value, str | int | float | tuple | list | dict | Duration | None):
                arguments[name] = str(value)
                break
    return arguments


def _is_among(hook: HookBase, hooks: Iterable[HookBase]) -> bool:
    """Return whether the hook is in the list, by identity, since hooks may define equality."""
    return any(hook is other for other in hooks)


def hook_name(hook: Any) -> str:
    """Return a hook's name for messages: its class, or the function it was made of."""
    return getattr(hook, "display_name", None) or type(hook).__name__


def overrides(hook: HookBase, event: str) -> bool:
    """Return whether the hook overrides ``event``."""
    return event in hook.__dict__ or getattr(type(hook), event, None) is not getattr(HookBase, event, None)
