"""Checks the order of hooks that their classes declare."""

from collections.abc import Sequence

from ..config import ConfigError
from .base import HookBase

__all__ = ["HookOrderError", "check_hooks"]


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
