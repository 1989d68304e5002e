"""``HookList``: the hooks of a trainer, in their order, and the one way to call them."""

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..config import ConfigError
from ..config.errors import loading
from .base import EVENTS, STEP_EVENTS, HookBase, StopTraining
from .functions import functions_for, replaces

__all__ = ["HookList", "HookOrderError", "check_hooks", "hook_name", "overrides"]

logger = logging.getLogger(__name__)

# A hook's method for an event, its cost so far as [seconds, calls], and the hook.
Listener = tuple[Callable[..., None], list[float], HookBase]


class HookList:
    """Holds a trainer's hooks, and calls at each event those that override it, in the order of registration.

    The table of the methods to call is built when hooks are registered or removed, and when training starts. Each call
    is timed, which takes less than 0.1 µs.

    Args:
        trainer: the trainer. Its ``_hooks_changed()`` is called when the table was built.

    Attributes:
        hooks: the hooks, as a plain list.
        listeners: the methods to call, by event. Always the same dict, so that it can be kept.
        running: whether the trainer trains. Hooks then join and leave before the next step.
        waits: whether hooks wait to join or leave; see :meth:`change`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # weak: a cycle of trainer and hooks would keep GPU memory in use
        self.hooks: list[HookBase] = []
        self.listeners: dict[str, tuple[Listener, ...]] = dict.fromkeys(EVENTS, ())
        self.running = self.waits = False
        self._changed = 0
        # By identity, since hooks may define equality and need not be hashable.
        self._costs: dict[tuple[int, str], tuple[HookBase, list[float]]] = {}
        self._joined: list[HookBase] = []
        self._left: list[HookBase] = []
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookList":
        """Copy the list of a trainer that is being copied. The table is built when the copy trains."""
        copied = HookList(memo[id(self._trainer())])
        memo[id(self)], memo[id(self.listeners)] = copied, copied.listeners
        copied.hooks = copy.deepcopy(self.hooks, memo)
        return copied

    def is_of(self, trainer: Any) -> bool:
        """Return whether the hooks act on a trainer, or on one that shares its attributes."""
        own = self._trainer()
        return own is not None and vars(own) is vars(trainer)

    # ------------------------------------------------------------------ registration

    def register(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks; see :meth:`TrainerBase.register_hooks`."""
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must be a HookBase, not {hook!r}")
        for hook in new:
            for old in [old for old in self.hooks if replaces(hook, old)]:  # a notebook's cell ran again
                self.remove(old)
        check_hooks([*self.hooks, *new])
        self._adopt(new)
        self.hooks.extend(new)
        if self.running:
            self._joined.extend(new)
            self.waits = True
        else:
            self.bind()
        try:
            for hook in new:
                self.call("on_registered", listeners=(self.listener(hook, "on_registered"),))
        except BaseException:
            for hook in new:
                self.remove(hook)
            raise

    def _adopt(self, hooks: Iterable[HookBase]) -> None:
        """Make the trainer that of ``hooks``. Reset the state of those that were another trainer's."""
        moved = []
        for hook in hooks:
            former = hook.trainer
            try:
                former_list = getattr(former, "_hook_list", None)
                if former_list is not None and former_list is not self and former_list.running:
                    raise ConfigError(
                        f"hook {hook_name(hook)} belongs to a trainer that is training now: create another one for "
                        "this trainer, or wait until that one has trained"
                    )
                reset = former is not None and former_list is not self
            except ReferenceError:  # the former trainer is gone
                reset = True
            moved.append((hook, reset))
        proxy: Any = weakref.proxy(self._trainer())
        for hook, reset in moved:
            hook.trainer = proxy
            if reset:
                hook.reset_state()

    def remove(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove hooks, and return them; see :meth:`TrainerBase.remove_hook`."""
        found = [h for h in self.hooks if h is hook or (isinstance(hook, type) and isinstance(h, hook))]
        self.hooks = [h for h in self.hooks if not _is_among(h, found)]
        if not self.running:
            self.bind()
            return found
        # A hook that was registered in this step has not joined the run, so it gets no event.
        self._left.extend(hook for hook in found if not _is_among(hook, self._joined))
        self._joined = [hook for hook in self._joined if not _is_among(hook, found)]
        self.waits = True
        return found

    def find(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""
        if isinstance(cls, str):
            return [hook for hook in self.hooks if any(base.__name__ == cls for base in type(hook).__mro__)]
        return [hook for hook in self.hooks if isinstance(hook, cls)]

    def describe(self) -> str:
        """Return a text with the hooks in their order, and the events that each overrides."""
        lines = []
        for number, hook in enumerate(self.hooks):
            events = [event for event in EVENTS if overrides(hook, event)]
            lines.append(f"  {number:>2}  {hook_name(hook):<24} {', '.join(events)}")
        return "\n".join(lines) or "  none"

    # ------------------------------------------------------------------ calls

    def call(
        self,
        event: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        listeners: Sequence[Listener] | None = None,
        on_error: Callable[[BaseException], Any] | None = None,
    ) -> None:
        """Call hooks' method for an event, which need not be declared.

        Args:
            event: the name of the method.
            args, kwargs: its arguments.
            listeners: those to call. Default: of all hooks that have the method.
            on_error: called with a hook's error; the next hook is called then. Default: the error is raised.
        """
        if listeners is None:
            listeners = self.listeners.get(event)
        if listeners is None:  # the event is not declared
            listeners = self.listeners_of(event)
        if not listeners:
            return
        clock = time.perf_counter
        start = clock()
        for call, cost, hook in listeners:
            try:
                if kwargs:
                    call(*args, **kwargs)
                else:
                    call(*args)
            except StopTraining as stop:
                trainer: Any = self._trainer()
                trainer.request_stop(str(stop))
            except BaseException as error:
                trainer = self._trainer()
                error.add_note(f"(in hook {hook_name(hook)}.{event}, at iteration {trainer.iter})")
                if on_error is None:
                    raise
                on_error(error)
            end = clock()
            cost[0] += end - start
            cost[1] += 1
            start = end

    def listeners_of(self, event: str) -> tuple[Listener, ...]:
        """Return the methods to call for an event, which need not be declared."""
        if event in self.listeners:
            return self.listeners[event]
        return tuple(self.listener(hook, event) for hook in self.hooks if hasattr(hook, event))

    def bind(self) -> None:
        """Build the table of the methods to call for each event."""
        for event in EVENTS:
            self.listeners[event] = tuple(self.listener(hook, event) for hook in self.hooks if overrides(hook, event))
        trainer: Any = self._trainer()
        trainer._hooks_changed()

    def listener(self, hook: HookBase, event: str) -> Listener:
        """Return a hook's entry in the table."""
        _, cost = self._costs.setdefault((id(hook), event), (hook, [0.0, 0]))
        return getattr(hook, event), cost, hook

    def costs(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of calls of each hook in the current or last run, most expensive first."""
        totals: dict[int, tuple[str, float, int]] = {}
        for hook, (seconds, calls) in self._costs.values():
            name, before, count = totals.get(id(hook), (hook_name(hook), 0.0, 0))
            totals[id(hook)] = (name, before + seconds, count + int(calls))
        ordered = sorted(totals.values(), key=lambda item: -item[1])
        return _numbered((name, (seconds, calls)) for name, seconds, calls in ordered)

    # ------------------------------------------------------------------ during a run

    @property
    def changes(self) -> int:
        """The number of hooks that were registered and removed since training began."""
        return self._changed + len(self._joined) + len(self._left)

    def start(self, names: Iterable[str]) -> None:
        """Prepare for a run: add functions of ``@on``, and hooks that were put into the list by hand.

        Args:
            names: of the trainer, which functions may be decorated for.
        """
        self.register(functions_for(names, self.hooks))
        check_hooks(self.hooks)
        self._adopt(self.hooks)
        self._costs.clear()
        self.bind()
        self._joined, self._left, self.waits, self.running, self._changed = [], [], False, True, 0

    def change(self) -> None:
        """Before a step, let hooks that were registered or removed since the last step join and leave the run."""
        self._changed = self.changes
        joined, left = self._joined, self._left
        self._joined, self._left, self.waits = [], [], False
        self.bind()
        for event, hooks in (("after_train", left), ("after_run", left), ("before_train", joined)):
            self.call(event, listeners=[self.listener(hook, event) for hook in hooks])

    def check_called(self) -> None:
        """After the first step: warn if hooks override events that this trainer's step does not emit."""
        for event in STEP_EVENTS:
            silent = [hook for _, cost, hook in self.listeners[event] if not cost[1]]
            if silent and event not in self._warned:
                self._warned.add(event)
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(map(hook_name, silent)),
                    event,
                    type(self._trainer()).__name__,
                    event,
                )

    # ------------------------------------------------------------------ state

    def by_key(self) -> dict[str, HookBase]:
        """Return the hooks by the keys of their states."""
        return _numbered((hook.state_key or hook_name(hook), hook) for hook in self.hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by key."""
        states = {key: hook.state_dict() for key, hook in self.by_key().items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any], names: Iterable[str]) -> None:
        """Load states; ``names`` as for :meth:`start`."""
        self.register(functions_for(names, self.hooks))
        self._adopt(self.hooks)
        hooks = self.by_key()
        for key, state in states.items():
            if key not in hooks:
                logger.warning("The checkpoint holds the state of a hook %r, which this run does not have", key)
                continue
            with loading(f"the state of the hook {key} in the checkpoint"):
                hooks[key].load_state_dict(state)
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


def _is_among(hook: HookBase, hooks: Iterable[HookBase]) -> bool:
    """Return whether the hook is in the list, by identity, since hooks may define equality."""
    return any(hook is other for other in hooks)


def hook_name(hook: Any) -> str:
    """Return a hook's name for messages: its class, or the function it was made of."""
    return getattr(hook, "display_name", None) or type(hook).__name__


def overrides(hook: HookBase, event: str) -> bool:
    """Return whether the hook overrides ``event``."""
    return event in hook.__dict__ or getattr(type(hook), event, None) is not getattr(HookBase, event, None)


# ---------------------------------------------------------------------------- the order that classes declare


class HookOrderError(ConfigError):
    """Hooks are in an invalid order, or a hook is registered twice."""


def check_hooks(hooks: Sequence[HookBase]) -> None:
    """Check ``after``, ``before``, ``single`` and ``state_key`` of a list of hooks.

    Raises:
        HookOrderError: the order is wrong (the message shows a valid one), a ``single`` class has two hooks, or two
            hooks have the same ``state_key``.
    """
    _check_single(hooks)
    place = {id(hook): number for number, hook in enumerate(hooks)}
    wrong = [(first, second) for first, second in _constraints(hooks) if place[id(first)] > place[id(second)]]
    if not wrong:
        return
    first, second = wrong[0]
    declared = "after" if any(_is(first, name) for name in second.after) else "before"
    owner = second if declared == "after" else first
    order = _sorted(hooks)
    works = (
        ", ".join(type(hook).__name__ for hook in order) if order else "none: the declarations contradict each other"
    )
    raise HookOrderError(
        f"hook {type(first).__name__} (number {place[id(first)]}) must be registered before "
        f"{type(second).__name__} (number {place[id(second)]}), as {type(owner).__name__}.{declared} declares. "
        f"An order that works: {works}"
    )


def _check_single(hooks: Sequence[HookBase]) -> None:
    for index, hook in enumerate(hooks):
        for other in hooks[:index]:
            if other is hook:
                raise HookOrderError(f"hook {hook!r} is registered twice; create a second one")
            if hook.single and type(other) is type(hook):
                raise HookOrderError(
                    f"there is a {type(hook).__name__} already, and there can be only one: remove it first "
                    f"(trainer.remove_hook({type(hook).__name__})), or do not register the second"
                )
            if hook.state_key and hook.state_key == other.state_key:
                raise HookOrderError(
                    f"hooks {type(other).__name__} and {type(hook).__name__} have the same state_key, "
                    f"{hook.state_key!r}: a checkpoint can hold only one of their states"
                )


def _is(hook: HookBase, name: type | str) -> bool:
    """Return whether a hook is an instance of a class, given as a class or by name."""
    if isinstance(name, str):
        return any(cls.__name__ == name for cls in type(hook).__mro__)
    return isinstance(hook, name)


def _constraints(hooks: Sequence[HookBase]) -> list[tuple[HookBase, HookBase]]:
    """Return pairs of hooks. The first of a pair must come earlier."""
    pairs = []
    for hook in hooks:
        for other in hooks:
            if other is hook:
                continue
            if any(_is(other, name) for name in hook.after):
                pairs.append((other, hook))
            if any(_is(other, name) for name in hook.before):
                pairs.append((hook, other))
    return pairs


def _sorted(hooks: Sequence[HookBase]) -> list[HookBase]:
    """Return the hooks in the valid order that is nearest to the current one; an empty list if there is none."""
    pairs = _constraints(hooks)
    left, order = list(hooks), []
    while left:
        waiting = {id(second) for first, second in pairs if any(first is hook for hook in left)}
        free = next((hook for hook in left if id(hook) not in waiting), None)
        if free is None:
            return []
        left = [hook for hook in left if hook is not free]
        order.append(free)
    return order
