import gc
import weakref

import pytest

from hookline.engine import TrainerBase
from hookline.hooks import GarbageCollection


class Cycles(TrainerBase):
    """Each step creates an object that only the garbage collector can remove."""

    def __init__(self):
        super().__init__()
        self.alive, self.left = [], weakref.WeakSet()

    def run_step(self):
        class Node:
            pass

        node = Node()
        node.itself = node
        self.left.add(node)
        del node
        self.alive.append(len(self.left))


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
    trainer.train(0, 20)
    assert trainer.alive == [*range(1, 11)] * 2


def test_the_collector_is_off_during_the_run_and_restored_also_after_an_error(collector):
    class Failing(TrainerBase):
        def run_step(self):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))
            raise ValueError("here")

    seen, trainer = [], Failing()
    trainer.register_hooks([GarbageCollection()])
    with pytest.raises(ValueError, match="here"):
        trainer.train(0, 1)
    assert seen == [(False, True)]
    assert gc.isenabled()
