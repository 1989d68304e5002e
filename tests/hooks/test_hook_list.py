"""Registering, finding and removing hooks; order, state and costs."""

from types import SimpleNamespace

import pytest
from metric_runs import Losses

from hookline.config import ConfigError
from hookline.hooks import CallbackHook, HookBase, HookOrderError, IterationTimer, hook_list


def make(*hooks, cls=Losses):
    trainer = cls()
    trainer.register_hooks(hooks)
    return trainer


class Counter(HookBase):
    """Counts its steps, and saves the count."""

    def __init__(self, start=0):
        self.count = start

    def after_step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]

    def reset_state(self):
        self.count = 0


class Notes(CallbackHook):
    """Notes its events, each with the iteration."""

    def __init__(self):
        self.seen = []
        names = ("before_train", "after_step", "after_train")
        super().__init__(**{name: lambda t, name=name: self.seen.append((name, t.iter)) for name in names})


def test_hooks_are_called_in_the_order_of_the_list_which_may_be_edited():
    seen = []
    trainer = make(None, *(CallbackHook(after_step=lambda t, n=n: seen.append(n)) for n in range(3)))
    with pytest.raises(TypeError, match="HookBase"):
        trainer.register_hooks([object()])
    trainer.train(0, 1)
    trainer._hooks.insert(1, trainer._hooks.pop())
    trainer.train(1, 2)
    trainer._hooks = trainer._hooks[:1]
    trainer.train(2, 3)
    assert seen == [0, 1, 2, 0, 2, 1, 0]


def test_a_method_that_looks_like_an_event_and_is_none_is_a_warning(caplog):
    class Misspelt(HookBase):
        on_cuda = False

        def after_stpe(self):
            raise AssertionError("it is never called")

        def after_load_best(self):
            """An event of hookline that few hooks have."""

        def verify_batch(self, batch):
            """An event of a person's."""

    make(Misspelt()).train(0, 1)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Hook Misspelt has a method after_stpe, which is no event: only trainer.emit('after_stpe') calls it; "
        "did you mean 'after_step'?"
    ]


def test_hooks_are_found_and_removed_by_class_name_and_instance():
    one, two = Counter(), Counter()
    trainer = make(CallbackHook(), one, two)
    assert trainer.find_hook(Counter) is trainer.find_hook("Counter") is one
    assert trainer.find_hooks(HookBase) == trainer._hooks
    assert trainer.find_hook(IterationTimer) is None
    assert (trainer.remove_hook(one), trainer.remove_hook(Counter), trainer.remove_hook(Counter)) == ([one], [two], [])
    trainer.train(0, 1)
    assert (one.count, two.count) == (0, 0)


def test_a_hook_that_is_registered_or_removed_while_running_joins_or_leaves_at_once():
    late, leaving, moved = Notes(), Notes(), Notes()

    def change(trainer):
        if trainer.iter == 1:
            trainer.remove_hook(leaving)
            trainer.remove_hook(moved)
            trainer.register_hooks([late, moved])

    make(leaving, moved, CallbackHook(before_step=change)).train(0, 3)
    assert leaving.seen == [("before_train", 0), ("after_step", 0), ("after_train", 1)]
    assert late.seen == [("before_train", 1), ("after_step", 1), ("after_step", 2), ("after_train", 3)]
    assert moved.seen == leaving.seen + late.seen


class Source(HookBase):
    pass


class Sink(HookBase):
    after = (Source,)


class Early(HookBase):
    before = ("Source",)


class Keyed(Counter):
    state_key = "mine"


ONE = Counter()


@pytest.mark.parametrize(
    ("there", "new", "message"),
    [
        ([], [Sink(), Counter(), Source(), Early()], r"Sink\.after"),
        ([Early(), Source(), Sink()], [Early()], r"Early\.before"),
        ([IterationTimer()], [IterationTimer()], "IterationTimer"),
        ([], [ONE, ONE], "twice"),
        ([], [Keyed(), Keyed()], "'mine'"),
    ],
    ids=["after", "before", "single", "twice", "state_key"],
)
def test_hooks_that_do_not_fit_are_refused(there, new, message):
    trainer = make(*there)
    with pytest.raises(HookOrderError, match=message):
        trainer.register_hooks(new)
    assert trainer._hooks == there


def test_two_stateful_hooks_of_one_class_both_keep_their_state():
    first, second = make(Counter(10), Counter(20)), make(Counter(), Counter())
    first.train(0, 2)
    for _ in range(2):  # repeated saves are the same
        second.load_state_dict(first.state_dict())
        assert second.state_dict()["hooks"] == {"Counter": {"count": 12}, "Counter#2": {"count": 22}}


def test_states_find_their_hooks_by_key_in_another_order():
    class Other(Counter):
        state_key = "other"

    first, second = make(Keyed(1), Other(2)), make(Other(), Keyed())
    second.load_state_dict(first.state_dict())
    assert [hook.count for hook in second._hooks] == [2, 1]


def test_a_state_that_a_hook_cannot_load_is_an_error_that_names_the_hook():
    with pytest.raises(ConfigError, match=r"hook Counter .*'count'"):
        make(Counter()).load_state_dict({"iteration": 3, "hooks": {"Counter": {}}})


def test_a_hook_of_a_trainer_that_has_trained_starts_fresh_in_another():
    hook = Counter()
    first, second = make(hook), make()
    first.train(0, 3)
    first.train(3, 5)
    assert hook.count == 5
    second.register_hooks([hook])
    assert hook.count == 0
    second.train(0, 2)
    assert (hook.count, hook.trainer.finished_iter) == (2, 1)
    first.load_state_dict({"iteration": 6, "hooks": {"Counter": {"count": 7}}})  # which is kept
    first.train(7, 9)
    assert (hook.count, hook.trainer.finished_iter) == (9, 8)


def test_the_time_of_a_call_within_another_hook_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hook_list, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(seconds):
        now[0] += seconds

    class Evaluates(HookBase):
        def after_step(self):
            work(1)
            self.trainer.emit("after_eval", {})
            self.trainer.emit("after_eval", {})

    class Saves(HookBase):
        def after_eval(self, results):
            work(3)
            self.trainer.emit("after_save", "path")

        def after_save(self, path):
            work(5)

    trainer = make(Evaluates(), Saves(), Saves())
    trainer.train(0, 2)
    costs = [("Saves", (52.0, 12)), ("Saves#2", (52.0, 12)), ("Evaluates", (2.0, 2))]  # slowest first
    assert list(trainer.hooks.costs().items()) == costs
