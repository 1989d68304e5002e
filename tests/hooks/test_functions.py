"""Plain functions as hooks."""

import pytest

from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, off, on


class Trainer(TrainerBase):
    def run_step(self):
        pass


class OtherTrainer(Trainer):
    pass


@pytest.fixture
def decorated():
    """Collects functions that a test decorated, and undoes it at the end."""
    functions = []
    yield functions.append
    for function in functions:
        off(function)


def test_a_function_joins_every_trainer_that_starts_later(decorated):
    seen = []

    @on("after_step", every=2)
    def note(trainer):
        seen.append((type(trainer.storage).__name__, trainer.iter))

    decorated(note)
    for cls in (Trainer, OtherTrainer):
        cls().train(0, 4)
    assert [it for _, it in seen] == [1, 3, 1, 3]


def test_a_function_joins_a_trainer_once(decorated):
    seen = []
    decorated(on("before_train")(lambda trainer: seen.append(1)))
    trainer = Trainer()
    trainer.train(0, 1)
    trainer.train(1, 2)
    assert len(trainer._hooks) == 1
    assert len(seen) == 2


def test_a_function_can_be_registered_for_one_trainer():
    seen, mine, other = [], Trainer(), Trainer()

    @on("after_train", trainer=mine)
    def note(trainer):
        seen.append(trainer.iter)

    mine.train(0, 2)
    other.train(0, 3)
    assert seen == [2]


def test_a_function_can_be_registered_for_trainers_by_name(decorated):
    seen = []

    @on("after_step", trainer="OtherTrainer")
    def by_class(trainer):
        seen.append("class")

    @on("after_step", trainer="critic")
    def by_name(trainer):
        seen.append("name")

    decorated(by_class)
    decorated(by_name)
    Trainer().train(0, 1)
    assert seen == []
    critic = Trainer()
    critic.name = "critic"
    critic.train(0, 1)
    OtherTrainer().train(0, 1)
    assert seen == ["name", "class"]


def test_once_and_when():
    seen, trainer = [], Trainer()
    on("after_step", once=True, trainer=trainer)(lambda t: seen.append(("once", t.iter)))
    on("after_step", when=lambda t: t.iter % 3 == 2, trainer=trainer)(lambda t: seen.append(("when", t.iter)))
    trainer.train(0, 7)
    assert seen == [("once", 0), ("when", 2), ("when", 5)]


def test_once_holds_after_a_resume():
    def make(seen):
        trainer = Trainer()

        @on("after_step", once=True, trainer=trainer)
        def note(trainer):
            seen.append(trainer.iter)

        return trainer

    seen = []
    first = make(seen)
    first.train(0, 2)
    second = make(seen)
    second.load_state_dict(first.state_dict())
    second.train(2, 4)
    assert seen == [0]


def test_events_pass_their_arguments():
    seen, trainer = [], Trainer()
    on("on_exception", trainer=trainer)(lambda t, error: seen.append(str(error)))
    on("verify", trainer=trainer, custom=True)(lambda t, value: seen.append(value))
    trainer.emit("verify", 3)
    trainer.run_step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 1)
    assert seen == [3, "division by zero"]


def test_every_counts_the_calls_of_an_event_outside_of_steps():
    seen, trainer = [], Trainer()
    hook = on("after_eval", every=2, trainer=trainer)
    hook(lambda trainer, results: seen.append(results["n"]))
    on("verify", every=3, trainer=trainer, custom=True)(lambda trainer: seen.append("verified"))
    for n in range(3):
        trainer.emit("after_eval", {"n": n})
        trainer.emit("verify")
    assert seen == [1, "verified"]
    state = {key: one.state_dict() for key, one in trainer._hook_list.by_key().items()}
    resumed = Trainer()
    on("after_eval", every=2, trainer=resumed)(lambda trainer, results: seen.append(results["n"]))
    resumed._hooks[0].load_state_dict(next(iter(state.values())))
    resumed.emit("after_eval", {"n": 3})
    assert seen[-1] == 3


@pytest.mark.parametrize(
    ("event", "function", "words"),
    [
        ("after_eval", lambda trainer: None, r"f\(trainer, results\).*too many positional"),
        ("after_step", lambda: None, r"f\(trainer\)"),
        ("after_step", lambda trainer, batch: None, "missing a required argument: 'batch'"),
    ],
)
def test_a_function_that_does_not_fit_its_event_fails_when_it_is_registered(event, function, words):
    with pytest.raises(ConfigError, match=words):
        on(event, trainer=Trainer())(function)
    with pytest.raises(ConfigError, match=words):
        CallbackHook(**{event: function})


def test_wrong_arguments_fail_at_the_decorator():
    with pytest.raises(ConfigError, match="no event 'after_stp'; did you mean 'after_step'"):
        on("after_stp")(print)
    with pytest.raises(ConfigError, match="cannot be used with before_train"):
        on("before_train", every=3)(print)
    with pytest.raises(ConfigError, match="not a duration"):
        on("after_step", every="3 parsecs")(print)


def test_the_function_itself_is_unchanged():
    def function(trainer):
        return 5

    assert on("after_step", trainer=Trainer())(function) is function


def test_callback_hook_takes_any_event_and_passes_the_trainer_first():
    seen = []
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_save=lambda t, path: seen.append((t.iter, path)), after_step=None)])
    trainer.emit("before_save", "x.pth")
    assert seen == [(0, "x.pth")]


def test_callback_hook_rejects_unknown_events():
    with pytest.raises(ConfigError, match="no event 'after_stepp'; did you mean 'after_step'"):
        CallbackHook(after_stepp=print)


def test_callback_hook_accepts_custom_events():
    seen = []
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(custom={"verify": lambda t, value: seen.append(value)})])
    trainer.emit("verify", 3)
    assert seen == [3]


def test_a_callback_hook_works_in_a_second_training():
    seen = []
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_train=lambda t: seen.append("begin"))])
    trainer.train(0, 1)
    trainer.train(0, 1)
    assert seen == ["begin", "begin"]


def test_a_function_defined_again_replaces_the_earlier_one():
    """As by a cell of a notebook that runs twice."""
    trainer, seen = Trainer(), []
    space = {"on": on, "seen": seen, "trainer": trainer, "__name__": "__main__"}
    for version in (1, 2):
        exec(f"@on('after_step', trainer=trainer)\ndef report(trainer):\n    seen.append({version})\n", space)
    trainer.train(0, 2)
    assert seen == [2, 2]
    for version in (3, 4):
        exec(f"@on('after_step')\ndef everywhere(trainer):\n    seen.append({version})\n", space)
        trainer.train(0, 1)
    off(space["everywhere"])
    assert seen == [2, 2, 2, 3, 2, 4]
