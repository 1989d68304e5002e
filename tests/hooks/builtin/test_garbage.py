import gc
import weakref

import pytest
from metric_runs import train_losses

from hookline.hooks import CallbackHook, GarbageCollection


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
    left, alive = weakref.WeakSet(), []

    class Node:
        pass

    def make_a_cycle(trainer):
        node = Node()
        node.itself = node
        left.add(node)
        del node
        alive.append(len(left))

    train_losses(CallbackHook(before_step=make_a_cycle), GarbageCollection(period=10), end=20)
    assert alive == [*range(1, 11)] * 2


def test_the_collector_is_off_during_the_run_and_restored_also_after_an_error(collector):
    seen = []

    def fail(trainer):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        train_losses(GarbageCollection(), CallbackHook(before_step=fail))
    assert seen == [(False, True)]
    assert gc.isenabled()
