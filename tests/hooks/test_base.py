"""Events."""

import inspect

from hookline.hooks import EVENTS, STEP_EVENTS, HookBase
from hookline.hooks.hook_list import overrides


def test_events_are_the_methods_of_hook_base():
    methods = {name for name, _ in inspect.getmembers(HookBase, inspect.isfunction)}
    assert methods - {"state_dict", "load_state_dict", "reset_state"} == set(EVENTS)
    assert len(EVENTS) == len(set(EVENTS))
    assert set(STEP_EVENTS) < set(EVENTS)


def test_the_base_class_does_nothing_at_any_event():
    hook = HookBase()
    assert not any(overrides(hook, event) for event in EVENTS)
    assert hook.before_step() is None
    assert hook.state_dict() == {}
