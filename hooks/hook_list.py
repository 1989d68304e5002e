"""``HookList``: a trainer's hooks, in their order, and the one way to call them."""

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ..config import ConfigError
from ..config.errors import as_config_error
from .base import EVENTS, STEP_EVENTS, HookBase, StopTraining, check_hooks, is_a, warn_of_no_events

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A hook's method for an event, its cost so far as [seconds, calls], and the hook.
Listener = tuple[Callable[..., None], list[float], HookBase]


class HookList:
    """The hooks of a trainer. Calls at each event those that override it.

    The table of the methods to call is built when hooks are registered or removed, and when training starts. Each call
    is timed, which takes less than 0.1 µs.

    Args:
        trainer: the trainer of the hooks; it is referenced weakly.

    Attributes:
        hooks: the hooks in their order. The list may be edited before training.
        listeners: the methods to call, by event. A step looks here whether any hook has an event.
        running: whether a run is under way. Hooks then get ``before_train`` and ``after_train`` as they join and leave.
    """

    def __init__(self, trainer: "WithHooks") -> None:
        self._trainer = weakref.proxy(trainer)  # a cycle with the hooks would keep GPU memory in use
        self.hooks: list[HookBase] = []
        self.listeners: dict[str, tuple[Listener, ...]] = dict.fromkeys(EVENTS, ())
        self.running = False
        # By identity, since hooks may define equality and need not be hashable.
        self._costs: dict[tuple[int, str], tuple[HookBase, list[float]]] = {}
        self._nested = 0.0  # seconds of the calls within the current one, as EvalHook's of after_eval
        self._warned: set[str] = set()

    # ------------------------------------------------------------------ registration

    def register(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks; see :meth:`WithHooks.register_hooks`."""
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must be a HookBase, not {hook!r}")
        check_hooks([*self.hooks, *new])
        self._adopt(new)
        before = list(self.hooks)
        self.hooks.extend(new)
        self.bind()
        try:
            for hook in new:
                hook.on_registered()
        except BaseException:
            self.hooks[:] = before
            self.bind()
            raise
        if self.running:
            self.call("before_train", hooks=new)

    def _adopt(self, hooks: Iterable[HookBase]) -> None:
        """Become the list of ``hooks``. Reset the state of those that were another trainer's."""
        for hook in hooks:
            former, hook.trainer = hook.trainer, self._trainer
            if former is not None and former is not self._trainer:
                with suppress(ReferenceError):  # the former trainer is gone
                    if former.hooks.running:
                        hook.trainer = former
                        raise ConfigError(
                            f"hook {hook_name(hook)} belongs to a trainer that is training now: create another one for "
                            "this trainer, or wait until that one has trained"
                        )
                hook.reset_state()

    def remove(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove a hook, or all hooks of a class, and return them; see :meth:`WithHooks.remove_hook`."""
        found = [h for h in self.hooks if h is hook or (isinstance(hook, type) and isinstance(h, hook))]
        removed = set(map(id, found))
        self.hooks[:] = [h for h in self.hooks if id(h) not in removed]
        self.bind()
        if self.running:
            self.call("after_train", hooks=found)
            self.call("after_run", hooks=found)
        return found

    # ------------------------------------------------------------------ calls

    def call(
        self,
        event: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        hooks: Iterable[HookBase] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Call hooks' method for an event.

        Args:
            event: the name of the method.
            args, kwargs: its arguments.
            hooks: those to call. Default: all that have the method.
            on_error: called with a hook's error; the next hook is called then. Default: the error is raised.
        """
        listeners: Iterable[Listener] | None = None if hooks is not None else self.listeners.get(event)
        if listeners is None:  # the event is not declared, or is for some hooks only
            some = self.hooks if hooks is None else hooks
            listeners = [self.entry(hook, event) for hook in some if hasattr(hook, event)]
        clock, outer = time.perf_counter, self._nested
        begin = start = clock()
        for call, cost, hook in listeners:
            self._nested = 0.0
            try:
                if kwargs:
                    call(*args, **kwargs)
                else:
                    call(*args)
            except StopTraining as stop:
                self._trainer.request_stop(str(stop))
            except BaseException as error:
                error.add_note(f"(in hook {hook_name(hook)}.{event}, at iteration {self._trainer.iter})")
                if on_error is None:
                    raise
                on_error(error)
            end = clock()
            cost[0] += end - start - self._nested
            cost[1] += 1
            start = end
        self._nested = outer + start - begin

    def bind(self) -> None:
        """Build the table of the methods to call for each event."""
        for event in EVENTS:
            self.listeners[event] = tuple(self.entry(h, event) for h in self.hooks if overrides(h, event))
        self._trainer.hooks_changed()

    def entry(self, hook: HookBase, event: str) -> Listener:
        """Return a hook's entry in the table."""
        _, cost = self._costs.setdefault((id(hook), event), (hook, [0.0, 0]))
        return getattr(hook, event), cost, hook

    def costs(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of calls of each hook in the current or last run, most expensive first.

        The time of a call within another hook's call, as of ``after_eval``, counts only once.
        """
        totals: dict[int, tuple[str, float, int]] = {}
        for hook, (seconds, calls) in self._costs.values():
            name, before, count = totals.get(id(hook), (hook_name(hook), 0.0, 0))
            totals[id(hook)] = (name, before + seconds, count + int(calls))
        ordered = sorted(totals.values(), key=lambda item: -item[1])
        return _numbered((name, (seconds, calls)) for name, seconds, calls in ordered)

    # ------------------------------------------------------------------ during a run

    def start(self, reset: bool) -> None:
        """Prepare for a run; with ``reset``, hooks forget the state of the one before."""
        if reset:
            for hook in self.hooks:
                hook.reset_state()
        self._adopt(self.hooks)  # also those that were put into the list by hand
        check_hooks(self.hooks)
        self._costs.clear()
        self.bind()
        self.running = True
        warn_of_no_events(self.hooks)

    def warn_of_silent_events(self) -> None:
        """Warn if hooks override events that the trainer's step, which is done, has not emitted."""
        for event in STEP_EVENTS:
            silent = [hook for _, cost, hook in self.listeners[event] if not cost[1]]
            if silent and event not in self._warned:
                self._warned.add(event)
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(map(hook_name, silent)),
                    event,
                    self._trainer.__class__.__name__,
                    event,
                )

    # ------------------------------------------------------------------ state

    def _by_key(self) -> dict[str, HookBase]:
        """Return the hooks by the keys of their states."""
        return _numbered((hook.state_key or hook_name(hook), hook) for hook in self.hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by key."""
        states = {key: hook.state_dict() for key, hook in self._by_key().items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states of the hooks. Those without one start fresh, which is logged."""
        self._adopt(self.hooks)
        hooks = self._by_key()
        for key, state in states.items():
            if key in hooks:
                with as_config_error(f"the state of the hook {key} in the checkpoint"):
                    hooks[key].load_state_dict(state)
            else:
                logger.warning("The checkpoint holds the state of a hook %r, which this run does not have", key)
        for key, hook in hooks.items():
            if key not in states and hook.state_dict():
                logger.info("The checkpoint holds no state of hook %s: it starts fresh", key)


class WithHooks:
    """An object that has hooks: a trainer.

    Attributes:
        hooks: the :class:`HookList`.
    """

    hooks: HookList

    @property
    def _hooks(self) -> list[HookBase]:  # detectron2's name
        return self.hooks.hooks

    @_hooks.setter
    def _hooks(self, hooks: list[HookBase]) -> None:
        self.hooks.hooks[:] = hooks

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks. At each event hooks are called in the order of registration.

        While training, new hooks get ``before_train`` at once, and take part from then on.

        Args:
            hooks: the hooks. None is skipped.

        Raises:
            TypeError: one is not a HookBase.
            HookOrderError: the order violates a hook's ``after`` or ``before``; the message names both.
        """
        self.hooks.register(hooks)

    def remove_hook(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove a hook, or all hooks of a class, and return them.

        While training, they get ``after_train`` and ``after_run`` at once, and no event that begins later.
        """
        return self.hooks.remove(hook)

    def find_hook(self, cls: type | str) -> Any:
        """Return the first hook of a class, given as a class or by name; None if there is none."""
        return next(iter(self.find_hooks(cls)), None)

    def find_hooks(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""
        return [hook for hook in self.hooks.hooks if is_a(hook, cls)]

    def emit(self, event: str, *args: object, **kwargs: object) -> None:
        """Call the method ``event`` of every hook that has it. The event need not be declared.

        Example: ``trainer.emit("verify_batch", batch)``
        """
        self.hooks.call(event, args, kwargs)

    def before_epoch(self) -> None:
        """Call ``before_epoch`` of all hooks, at the first step of an epoch."""
        self.hooks.call("before_epoch")

    def after_epoch(self) -> None:
        """Call ``after_epoch`` of all hooks, at the last step of an epoch."""
        self.hooks.call("after_epoch")

    def after_backward(self) -> None:
        """Call ``after_backward`` of all hooks, after each backward pass."""
        if self.hooks.listeners["after_backward"]:
            self.hooks.call("after_backward")

    def listens(self, event: str) -> bool:
        """Return whether any hook has the method ``event``, so that its arguments need not be computed if not."""
        listeners, hooks = self.hooks.listeners, self.hooks.hooks
        return bool(listeners[event]) if event in listeners else any(hasattr(hook, event) for hook in hooks)

    def hooks_changed(self) -> None:
        """Called when hooks were registered or removed, and when a run begins."""


def _numbered(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return a dict of the items: ``Name``, then ``Name#2``, ``Name#3`` for equal names."""
    result: dict[str, T] = {}
    for name, value in items:
        key, number = name, 1
        while key in result:
            number += 1
            key = f"{name}#{number}"
        result[key] = value
    return result


def hook_name(hook: HookBase) -> str:
    """Return a hook's name for messages: its class, or the function it was made of."""
    return getattr(hook, "display_name", None) or type(hook).__name__


def overrides(hook: HookBase, event: str) -> bool:
    """Return whether the hook overrides ``event``."""
    method = getattr(type(hook), event, None)
    is_own = method is not getattr(HookBase, event, None) and not hasattr(method, "is_for_subclasses")
    return is_own or event in hook.__dict__
