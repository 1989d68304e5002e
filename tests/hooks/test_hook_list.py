"""Registering, finding and removing hooks; order, state and costs."""

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, TrainerBase
from hookline.hooks import CallbackHook, HookBase, HookOrderError, IterationTimer


class Trainer(TrainerBase):
    def run_step(self):
        pass


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


def test_none_is_skipped_and_other_objects_are_rejected():
    trainer = Trainer()
    trainer.register_hooks([None, Counter()])
    assert len(trainer._hooks) == 1
    with pytest.raises(TypeError, match="must be a HookBase"):
        trainer.register_hooks([object()])


def test_hooks_are_called_in_the_order_of_registration():
    seen = []
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=lambda t, n=n: seen.append(n)) for n in range(3)])
    trainer.train(0, 1)
    assert seen == [0, 1, 2]


def test_the_list_of_hooks_can_be_edited_directly():
    seen = []
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=lambda t, n=n: seen.append(n)) for n in range(3)])
    trainer._hooks = trainer._hooks[:1] + trainer._hooks[1:][::-1]
    trainer.train(0, 1)
    assert seen == [0, 2, 1]


def test_hooks_that_override_nothing_are_never_called():
    class Silent(HookBase):
        def __getattribute__(self, name):
            if name == "after_step":
                raise AssertionError("asked for in a step")
            return super().__getattribute__(name)

    trainer = Trainer()
    trainer.register_hooks([Silent()])
    trainer.train(0, 2)
    assert not trainer.listens("after_step")


def test_a_hook_is_found_by_its_class_and_by_its_name():
    trainer, counter = Trainer(), Counter()
    trainer.register_hooks([CallbackHook(), counter])
    assert trainer.find_hook(Counter) is counter
    assert trainer.find_hook("Counter") is counter
    assert trainer.find_hooks(HookBase) == trainer._hooks
    assert trainer.find_hook(IterationTimer) is None


def test_hooks_are_removed_by_instance_and_by_class():
    trainer, one, two = Trainer(), Counter(), Counter()
    trainer.register_hooks([one, two, CallbackHook()])
    assert trainer.remove_hook(one) == [one]
    assert trainer.remove_hook(Counter) == [two]
    assert trainer.remove_hook(Counter) == []
    trainer.train(0, 1)
    assert (one.count, two.count) == (0, 0)


def test_adding_while_running_takes_effect_at_the_next_step():
    seen = []

    class Late(HookBase):
        def before_train(self):
            seen.append(("before_train", self.trainer.iter))

        def before_step(self):
            seen.append(("before_step", self.trainer.iter))

        def after_step(self):
            seen.append(("after_step", self.trainer.iter))

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_step=lambda t: t.register_hooks([Late()]) if t.iter == 1 else None)])
    trainer.train(0, 3)
    assert seen == [("before_train", 2), ("before_step", 2), ("after_step", 2)]


def test_removing_while_running_takes_effect_at_the_next_step():
    seen = []
    leaving = CallbackHook(after_step=lambda t: seen.append(t.iter), after_train=lambda t: seen.append("left"))
    trainer = Trainer()
    trainer.register_hooks(
        [CallbackHook(before_step=lambda t: t.remove_hook(leaving) if t.iter == 1 else None), leaving]
    )
    trainer.train(0, 4)
    assert seen == [0, 1, "left"]


def test_custom_events_reach_the_hooks_that_have_them():
    class Verifier(HookBase):
        def verify_batch(self, batch, strict=False):
            self.seen = (batch, strict)

    verifier = Verifier()
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(), verifier])
    trainer.emit("verify_batch", [1, 2], strict=True)
    assert verifier.seen == ([1, 2], True)
    assert trainer.listens("verify_batch")
    assert not trainer.listens("verify_something")


def test_a_hook_may_define_equality_and_need_not_be_hashable():
    @dataclass
    class Settings(HookBase):
        value: int = 1
        count: int = 0

        def after_step(self):
            self.count += 1

    one, two = Settings(), Settings()
    trainer = Trainer()
    trainer.register_hooks([one, two])
    trainer.train(0, 3)
    assert (one.count, two.count) == (3, 3)
    assert {name: calls for name, (_, calls) in trainer.hook_costs().items() if calls} == {
        "Settings": 3,
        "Settings#2": 3,
    }


def test_a_hook_whose_on_registered_fails_is_removed():
    class Refuses(HookBase):
        def on_registered(self):
            raise ValueError("not me")

    trainer = Trainer()
    with pytest.raises(ValueError, match="not me") as info:
        trainer.register_hooks([Counter(), Refuses()])
    assert "in hook Refuses.on_registered" in info.value.__notes__[0]
    assert trainer._hooks == []


# ---------------------------------------------------------------------------- order


def test_a_hook_registered_and_removed_in_one_step_gets_no_event():
    seen = []

    class Brief(HookBase):
        def before_train(self):
            seen.append("before_train")

        def after_train(self):
            seen.append("after_train")

        def after_run(self):
            seen.append("after_run")

    class Refuses(Brief):
        def on_registered(self):
            raise ValueError("not me")

    def come_and_go(trainer):
        if trainer.iter == 1:
            brief = Brief()
            trainer.register_hooks([brief])
            assert trainer.remove_hook(brief) == [brief]
            with pytest.raises(ValueError, match="not me"):
                trainer.register_hooks([Brief(), Refuses()])

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=come_and_go)])
    trainer.train(0, 4)
    assert seen == []


def test_a_hook_removed_and_registered_in_one_step_gets_both_ends():
    seen = []

    class Again(HookBase):
        def before_train(self):
            seen.append(("before_train", self.trainer.iter))

        def after_train(self):
            seen.append(("after_train", self.trainer.iter))

    again = Again()

    def move_to_the_end(trainer):
        if trainer.iter == 1:
            trainer.remove_hook(again)
            trainer.register_hooks([again])

    trainer = Trainer()
    trainer.register_hooks([again, CallbackHook(after_step=move_to_the_end)])
    trainer.train(0, 4)
    assert seen == [("before_train", 0), ("after_train", 2), ("before_train", 2), ("after_train", 4)]


class Source(HookBase):
    pass


class Sink(HookBase):
    after = (Source,)


class Early(HookBase):
    before = ("Source",)


def test_a_wrong_order_raises_an_error_with_a_valid_order():
    trainer = Trainer()
    with pytest.raises(HookOrderError) as info:
        trainer.register_hooks([Sink(), Counter(), Source(), Early()])
    message = str(info.value)
    assert "Source (number 2) must be registered before Sink (number 0), as Sink.after declares" in message
    assert "An order that works: Counter, Early, Source, Sink" in message
    assert trainer._hooks == []


def test_a_valid_order_is_accepted_whenever_hooks_are_registered():
    trainer = Trainer()
    trainer.register_hooks([Early(), Source()])
    trainer.register_hooks([Sink()])
    trainer.train(0, 1)
    with pytest.raises(HookOrderError, match=r"Early.before declares"):
        trainer.register_hooks([Early()])


def test_constraints_on_absent_hooks_are_ignored():
    trainer = Trainer()
    trainer.register_hooks([Sink(), Early()])
    assert len(trainer._hooks) == 2


def test_a_wrong_order_in_an_edited_list_is_found_when_training_starts():
    trainer = Trainer()
    trainer.register_hooks([Source(), Sink()])
    trainer._hooks.reverse()
    with pytest.raises(HookOrderError):
        trainer.train(0, 1)


def test_contradicting_declarations_are_reported():
    class Other(HookBase):
        after = (Sink,)
        before = (Source,)

    with pytest.raises(HookOrderError, match="contradict"):
        Trainer().register_hooks([Source(), Sink(), Other()])


def test_a_second_hook_of_a_single_class_is_rejected():
    trainer = Trainer()
    trainer.register_hooks([IterationTimer()])
    with pytest.raises(HookOrderError, match="there is a IterationTimer already"):
        trainer.register_hooks([IterationTimer()])


def test_one_instance_cannot_be_registered_twice():
    hook = Counter()
    with pytest.raises(HookOrderError, match="registered twice"):
        Trainer().register_hooks([hook, hook])


# ---------------------------------------------------------------------------- state


def test_two_stateful_hooks_of_one_class_both_keep_their_state():
    first = Trainer()
    first.register_hooks([Counter(10), Counter(20)])
    first.train(0, 2)
    second = Trainer()
    second.register_hooks([Counter(), Counter()])
    second.load_state_dict(first.state_dict())
    assert [hook.count for hook in second._hooks] == [12, 22]


def test_repeated_saves_are_identical():
    trainer = Trainer()
    trainer.register_hooks([Counter(1), Counter(2)])
    for _ in range(3):
        state = trainer.state_dict()
        trainer.load_state_dict(state)
    assert state["hooks"] == {"Counter": {"count": 1}, "Counter#2": {"count": 2}}
    assert [hook.count for hook in trainer._hooks] == [1, 2]


def test_states_find_their_hooks_by_key_in_another_order():
    class Left(Counter):
        state_key = "left"

    class Right(Counter):
        state_key = "right"

    first, second = Trainer(), Trainer()
    first.register_hooks([Left(1), Right(2)])
    second.register_hooks([Right(), Left()])
    second.load_state_dict(first.state_dict())
    assert [hook.count for hook in second._hooks] == [2, 1]


def test_equal_state_keys_raise_an_error():
    class Keyed(Counter):
        state_key = "mine"

    with pytest.raises(HookOrderError, match="same state_key, 'mine'"):
        Trainer().register_hooks([Keyed(), Keyed()])


def test_hooks_missing_in_the_run_or_the_checkpoint_are_logged(caplog):
    class Gone(Counter):
        pass

    class New(Counter):
        pass

    first, second = Trainer(), Trainer()
    first.register_hooks([Gone(3)])
    second.register_hooks([New(7)])
    with caplog.at_level(logging.INFO):
        second.load_state_dict(first.state_dict())
    assert second._hooks[0].count == 7
    assert "holds the state of a hook 'Gone', which this run does not have" in caplog.text
    assert "holds no state of hook New: it starts fresh" in caplog.text


def test_a_state_that_a_hook_cannot_load_is_an_error_that_names_the_hook():
    trainer = Trainer()
    trainer.register_hooks([Counter()])
    with pytest.raises(ConfigError, match=r"the state of the hook Counter .* cannot be loaded \(KeyError: 'count'\)"):
        trainer.load_state_dict({"iteration": 3, "hooks": {"Counter": {}}})


# ---------------------------------------------------------------------------- one hook in several trainers


class Sum(Counter):
    def reset_state(self):
        self.count = 0


def test_a_hook_of_a_trainer_that_has_trained_starts_fresh_in_another():
    hook, first = Sum(), Trainer()
    first.register_hooks([hook])
    first.train(0, 3)
    first.train(3, 5)
    assert hook.count == 5
    second = Trainer()
    second.register_hooks([hook])
    assert hook.count == 0
    second.train(0, 2)
    assert hook.count == 2
    del second
    first.train(5, 6)  # the other trainer is gone
    assert hook.count == 1


def test_trainers_built_together_share_a_hook_one_after_the_other():
    hook, trainers = Sum(), [Trainer(), Trainer()]
    for trainer in trainers:
        trainer.register_hooks([hook])
    for trainer in trainers:
        trainer.train(0, 3)
        assert hook.count == 3
        assert hook.trainer.finished_iter == 2


def test_a_state_loaded_into_a_shared_hook_is_kept():
    hook, first, second = Sum(), Trainer(), Trainer()
    for trainer in (first, second):
        trainer.register_hooks([hook])
    first.load_state_dict({"iteration": 6, "hooks": {"Sum": {"count": 7}}})
    first.train(7, 9)
    assert hook.count == 9


@pytest.mark.parametrize("registered", [False, True])
def test_a_hook_of_a_trainer_that_is_training_is_refused(registered):
    outer, inner, hook = Trainer(), Trainer(), Sum()
    if registered:
        inner.register_hooks([hook])

    def share(trainer):
        if not registered:
            inner.register_hooks([hook])
        inner.train(0, 1)

    outer.register_hooks([hook, CallbackHook(after_step=share)])
    with pytest.raises(ConfigError, match="hook Sum belongs to a trainer that is training now: create another one"):
        outer.train(0, 2)
    assert hook.trainer.finished_iter == 0
    inner.register_hooks([hook] if not registered else [])
    inner.train(0, 1)


# ---------------------------------------------------------------------------- cost


def test_the_cost_of_each_hook_is_measured_and_logged(caplog):
    import time

    class Slow(HookBase):
        def after_step(self):
            time.sleep(0.002)

    model = nn.Linear(1, 1)
    trainer = SimpleTrainer(nn.Sequential(model), [torch.ones(1, 1)], torch.optim.SGD(model.parameters(), 0.1))
    trainer.adapter.losses = lambda model, batch: {"loss": model(batch).sum()}
    trainer.register_hooks([IterationTimer(), Slow(), Counter()])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 10)
    costs = trainer.hook_costs()
    assert next(iter(costs)) == "Slow"
    assert costs["Slow"][1] == costs["Counter"][1] == 10
    assert costs["Slow"][0] >= 0.02
    assert "Time spent in hooks" in caplog.text
    assert "Slow" in caplog.text


def test_hooks_are_described_in_order_with_their_events():
    trainer = Trainer()
    trainer.register_hooks([Counter(), CallbackHook(before_train=print, after_train=print)])
    lines = trainer.describe_hooks().splitlines()
    assert lines[0].split() == ["0", "Counter", "after_step"]
    assert lines[1].split() == ["1", "CallbackHook", "before_train,", "after_train"]


def test_methods_of_a_trainer_that_call_no_hooks_still_let_the_run_go_on():
    class Silent(Trainer):
        def before_step(self):
            pass

        def after_step(self):
            pass

        def after_train(self):
            pass

    trainer, counter, seen = Silent(), Counter(), []
    trainer.register_hooks([counter, CallbackHook(after_run=lambda t: seen.append(t.iter))])
    result = trainer.train(0, 3)
    assert (result.iteration, counter.count, seen) == (3, 0, [3])
