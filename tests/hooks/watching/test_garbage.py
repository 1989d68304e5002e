import gc
import weakref

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import GarbageCollection, HookBase


class Cycles(TrainerBase):
    """Each step creates an object that only the garbage collector can remove."""

    def __init__(self):
        super().__init__()
        self.left = []
        self.alive = []

    def run_step(self):
        class Node:
            pass

        node = Node()
        node.itself = node
        self.left.append(weakref.ref(node))
        self.alive.append(sum(ref() is not None for ref in self.left))


@pytest.fixture
def collector():
    """Restores the collector's settings, and checks that the test did not change them."""
    gc.unfreeze()
    before = gc.isenabled()
    yield
    after = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    assert after == (before, 0)


def test_garbage_is_collected_between_steps_at_each_period(collector):
    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(period=10)])
    trainer.train(0, 30)
    assert trainer.alive == [*range(1, 11)] * 3


def test_objects_that_exist_at_the_start_are_frozen_during_the_run(collector):
    seen = []

    class Look(HookBase):
        def after_step(self):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))

    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(), Look()])
    trainer.train(0, 2)
    assert seen == [(False, True)] * 2


def test_freeze_false_freezes_nothing(collector):
    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(freeze=False), look := Frozen()])
    trainer.train(0, 1)
    assert look.count == 0


class Frozen(HookBase):
    def after_step(self):
        self.count = gc.get_freeze_count()


def test_the_collector_is_restored_after_an_error(collector):
    class Failing(TrainerBase):
        def run_step(self):
            raise ValueError("here")

    trainer = Failing()
    trainer.register_hooks([GarbageCollection()])
    with pytest.raises(ValueError, match="here"):
        trainer.train(0, 1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_disabled_collector_stays_disabled_and_frozen_objects_stay_frozen():
    gc.disable()
    gc.freeze()
    try:
        trainer = Cycles()
        trainer.register_hooks([GarbageCollection()])
        trainer.train(0, 1)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_old_garbage_is_collected(collector):
    class Keeper(Cycles):
        kept = None

        def run_step(self):
            if self.iter == 0:
                super().run_step()
                self.kept = self.left[0]()
            if self.iter == 5:  # by now it is too old for the small collections
                self.kept = None

    trainer = Keeper()
    trainer.register_hooks([GarbageCollection(period=1)])
    trainer.train(0, 8)
    assert trainer.left[0]() is not None
    trainer.train(0, 1)  # starting again collects everything
    trainer = Keeper()
    trainer.register_hooks([GarbageCollection(period=1)])
    trainer.train(0, 12)
    assert trainer.left[0]() is None
