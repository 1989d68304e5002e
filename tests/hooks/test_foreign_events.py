import re

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import EVENTS, HookBase
from hookline.hooks.foreign_events import _NAMES


class Ported(HookBase):
    def on_epoch_end(self, *args, **kwargs):
        raise AssertionError("not called")

    def after_step(self):
        pass


def test_a_method_that_is_an_event_elsewhere_is_warned_of_with_the_name_here(log):
    TrainerBase().register_hooks([Ported()])
    assert "hookline does not call Ported.on_epoch_end: the event is after_epoch here" in log.text


def test_other_methods_are_not_warned_of(log):
    class Own(HookBase):
        def after_epoch(self):
            pass

        def verify_batch(self, batch):
            pass

    TrainerBase().register_hooks([Own()])
    assert log.text == ""


@pytest.mark.parametrize("name", sorted(_NAMES))
def test_the_names_are_no_events_here_and_stand_in_the_table_of_events(name, request):
    table = (request.config.rootpath / "docs" / "events.md").read_text()
    assert name not in EVENTS
    assert _NAMES[name] in EVENTS
    rows = [line for line in table.splitlines() if re.match(rf"\| `{_NAMES[name]}[`(]", line)]
    assert any(f"`{name}`" in row for row in rows)
