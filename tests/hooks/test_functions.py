"""Plain functions as hooks."""

import pytest
from metric_runs import Losses

from hookline.config import ConfigError
from hookline.hooks import CallbackHook, EvalHook, on


def test_a_function_is_called_at_the_events_of_its_trainer_only():
    seen, mine, other = [], Losses(), Losses()

    @mine.on("after_step", every=2)
    def note(trainer):
        seen.append(trainer.iter)

    on("after_step", trainer=mine, every=4)(lambda trainer: seen.append("by name"))
    mine.train(0, 4)
    other.train(0, 4)
    assert seen == [1, 3, "by name"]
    with pytest.raises(ConfigError, match="of which trainer"):
        on("after_step", every=2)
    with pytest.raises(ConfigError, match="parsecs"):
        mine.on("after_step", every="3 parsecs")(note)


def test_once_and_when():
    seen, trainer = [], Losses()
    trainer.on("after_step", once=True)(lambda t: seen.append(("once", t.iter)))
    trainer.on("after_step", when=lambda t: t.iter % 3 == 2)(lambda t: seen.append(("when", t.iter)))
    trainer.train(0, 7)
    assert seen == [("once", 0), ("when", 2), ("when", 5)]


def test_a_number_counts_the_calls_of_other_events_also_over_a_resume():
    def make(seen):
        trainer = Losses()
        trainer.on("after_eval", every=2)(lambda t, results: seen.append(("second", t.iter)))
        trainer.on("after_eval", every="4it")(lambda t, results: seen.append(("step", t.iter)))
        trainer.register_hooks([EvalHook(1, lambda: {}, eval_after_train=False)])
        return trainer

    whole, parts = [], []
    make(whole).train(0, 8)
    assert whole == [("second", 1), ("second", 3), ("step", 3), ("second", 5), ("second", 7), ("step", 7)]
    first, then = make(parts), make(parts)
    first.train(0, 3)
    then.load_state_dict(first.state_dict())
    then.train(3, 8)
    assert parts == whole


@pytest.mark.parametrize(
    ("event", "function", "words"),
    [
        ("after_eval", lambda trainer: None, r"f\(trainer, results\).*too many positional"),
        ("after_step", lambda trainer, batch: None, "missing a required argument: 'batch'"),
        ("after_stp", lambda trainer: None, "after_step"),
    ],
)
def test_a_function_or_event_that_does_not_fit_fails_when_it_is_registered(event, function, words):
    with pytest.raises(ConfigError, match=words):
        Losses().on(event)(function)
    with pytest.raises((ConfigError, TypeError), match=words):
        CallbackHook(**{event: function})


def test_a_function_defined_again_replaces_the_earlier_one():
    """As by a cell of a notebook that runs twice."""
    trainer, seen = Losses(), []
    space = {"seen": seen, "trainer": trainer, "__name__": "__main__"}
    for version in (1, 2):
        exec(f"@trainer.on('after_step')\ndef report(trainer):\n    seen.append({version})\n", space)
    trainer.train(0, 2)
    assert seen == [2, 2]
