"""Subclasses of BestCheckpointer that override what detectron2's has."""

import operator

import pytest
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from small_runs import files, saved

from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer


class Checking(BestCheckpointer):
    def _best_checking(self):
        value, iteration = self.trainer.storage.latest()[self._val_metric]
        self.checked = [*getattr(self, "checked", []), iteration]
        if self.best_metric is None or self._compare(value, self.best_metric):
            self._checkpointer.save(f"{self._file_prefix}_own", iteration=iteration)
            self._update_best(value, iteration)
            self._logger.info("saved %.5f of %d", self.best_metric, self.best_iter)


class WithoutInit(Checking):
    def __init__(self, period, checkpointer, metric):
        self._period, self._checkpointer, self._val_metric = period, checkpointer, metric
        self._compare, self._file_prefix = operator.gt, "model_best"
        self.best_metric = self.best_iter = None


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
@pytest.mark.parametrize("cls", [Checking, WithoutInit])
def test_a_subclass_that_checks_by_itself_is_called_as_in_detectron2(make, cls, checkpointer_type):
    trainer, checkpointer = make(checkpointer_type=checkpointer_type)
    values = iter([0.3, 0.9, 0.5, 0.4])
    hook = cls(2, checkpointer, "metric")
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 4), EvalHook(2, lambda: {"metric": next(values)}), hook])
    trainer.train(0, 8)
    assert hook.checked == [1, 3, 5, 8]
    assert (hook.best_metric, hook.best_iter) == (0.9, 3)
    assert saved(checkpointer, "model_best_own")["iteration"] == 3
    assert not [name for name in files(checkpointer) if name.startswith("model_best_0")]


def test_a_subclass_that_overrides_events_keeps_them(make):
    class Own(Checking):
        def after_step(self):
            if self.trainer.iter == 2:
                self._best_checking()

        def after_train(self):
            pass

    trainer, checkpointer = make()
    hook = Own(1, checkpointer, "metric")
    trainer.register_hooks([EvalHook(1, lambda: {"metric": 1.0}), hook])
    trainer.train(0, 4)
    assert hook.checked == [2]


def test_a_subclass_that_checks_by_itself_may_have_a_period_in_epochs(make):
    trainer, checkpointer = make()
    hook = Checking("1ep", checkpointer, "metric")
    trainer.register_hooks([EvalHook(1, lambda: {"metric": 1.0}), hook])
    trainer.train(0, 6)
    assert hook.checked == [3, 6]


def test_a_subclass_that_calls_super_keeps_the_best_over_a_resume(make):
    class Counting(BestCheckpointer):
        checks = 0

        def _best_checking(self):
            self.checks += 1
            super()._best_checking()

    def run(values, start, end):
        trainer, checkpointer = make()
        hook, values = Counting(2, checkpointer, "metric"), iter(values)
        trainer.register_hooks(
            [PeriodicCheckpointer(checkpointer, 4), EvalHook(2, lambda: {"metric": next(values)}), hook]
        )
        if start:
            checkpointer.resume_or_load("", resume=True)
        trainer.train(start, end)
        return hook

    hook = run([0.3, 0.9], 0, 4)
    assert (hook.best_metric, hook.best_iter) == (0.9, 4)
    resumed = run([0.5, 0.4], 4, 8)
    assert (resumed.best_metric, resumed.best_iter) == (0.9, 4)
    assert resumed.checks > 0
