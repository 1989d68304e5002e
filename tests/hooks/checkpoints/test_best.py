import logging
import math
import os
import shutil
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from fvcore.common.file_io import PathManager
from small_runs import files, last, saved

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import BestCheckpointer, CallbackHook, EvalHook, HookBase, PeriodicCheckpointer
from hookline.hooks.checkpoints.best import link


def best_hooks(checkpointer, metrics, mode="max", period=2, **kwargs):
    values = iter(metrics)
    return [
        PeriodicCheckpointer(checkpointer, period),
        EvalHook(period, lambda: {"metric": next(values)}),
        BestCheckpointer(0, checkpointer, "metric", mode, **kwargs),
    ]


@pytest.mark.parametrize(
    ("mode", "metrics", "best", "at"),
    [
        ("max", [0.3, 0.4, 0.35, 0.5], 0.5, 8),
        ("max", [0.3, 0.5, 0.5, 0.4], 0.5, 3),
        ("min", [1.0, 0.8, 0.9, 0.9], 0.8, 3),
        ("min", [math.nan, 0.8, 0.9, 0.9], 0.8, 3),
        ("max", [math.inf, 0.8, 0.9, math.nan], 0.9, 5),
    ],
)
def test_the_best_value_and_its_weights_are_kept(make, mode, metrics, best, at):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, metrics, mode))
    by_iteration = {}
    note = CallbackHook(
        after_step=lambda trainer: by_iteration.update({trainer.iter: trainer.model.fc.weight.detach().clone()})
    )
    trainer.register_hooks([note])
    trainer.train(0, 8)
    hook = trainer._hooks[2]
    assert (hook.best_metric, hook.best_iter) == (best, at)
    assert torch.equal(saved(checkpointer, "model_best")["model"]["fc.weight"], by_iteration[min(at, 7)])


def test_a_run_without_finite_values_has_no_best(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [math.nan] * 4))
    trainer.train(0, 8)
    assert "model_best.pth" not in files(checkpointer)


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
def test_last_checkpoint_does_not_point_to_the_best(make, checkpointer_type):
    class Fails(HookBase):
        def before_step(self):
            if self.trainer.iter == 5:
                raise RuntimeError("broken")

    trainer, checkpointer = make(checkpointer_type=checkpointer_type)
    trainer.register_hooks([*best_hooks(checkpointer, [0.1, 0.2, 0.3]), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 8)
    assert "model_best.pth" in files(checkpointer)
    assert last(checkpointer) == "model_0000003.pth"


def test_a_worse_value_after_a_resume_does_not_replace_the_best(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [0.1, 0.9]))
    trainer.train(0, 4)
    best = saved(checkpointer, "model_best")["model"]

    trainer, checkpointer = make()
    hooks = best_hooks(checkpointer, [0.3, 0.4])
    trainer.register_hooks(hooks)
    checkpointer.resume_or_load("", resume=True)
    assert hooks[2].best_metric == 0.9
    trainer.train(4, 8)
    assert hooks[2].best_metric == 0.9
    assert torch.equal(saved(checkpointer, "model_best")["model"]["fc.weight"], best["fc.weight"])


def test_file_prefix_names_the_file(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [1.0], period=0, file_prefix="top"))
    trainer.train(0, 2)
    assert "top.pth" in files(checkpointer)


def test_a_metric_of_any_hook_is_checked_every_period(make):
    trainer, checkpointer = make()
    put = CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("score", trainer.iter, False))
    hook = BestCheckpointer(4, checkpointer, "score")
    trainer.register_hooks([put, hook])
    trainer.train(0, 6)
    assert saved(checkpointer, "model_best")["iteration"] == 5
    assert hook.best_metric == 5.0


def test_a_missing_metric_is_warned_about_once_with_the_closest_name(make, log):
    trainer, checkpointer = make()
    trainer.register_hooks([EvalHook(1, lambda: {"accuracy": 1.0}), BestCheckpointer(1, checkpointer, "acuracy")])
    trainer.train(0, 4)
    warnings = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'acuracy'" in warnings[0]
    assert "did you mean 'accuracy'" in warnings[0]


def test_a_mode_other_than_max_or_min_is_an_error(make):
    with pytest.raises(ConfigError, match="not 'maximum'"):
        BestCheckpointer(1, make()[1], "a", "maximum")


# ---------------------------------------------------------------------------- several files


def kept(checkpointer):
    """The iteration and value stored in each file."""
    names = [name.removesuffix(".pth") for name in files(checkpointer) if name.startswith("model_best")]
    states = {name: saved(checkpointer, name) for name in names}
    return {name: (state["iteration"], state["best_metric"]["value"]) for name, state in states.items()}


def files_of(best):
    """What :func:`kept` returns for a list of the best, given as the hook or as (value, iteration)."""
    entries = [(iteration, value) for value, iteration in getattr(best, "best", best)]
    return {"model_best": entries[0]} | {f"model_best_{entry[0]:07d}": entry for entry in entries}


def run(make, metrics, start=0, keep=1, mode="max", period=2, stop=None, **kwargs):
    """A run that is evaluated every ``period``, with the given results; the last one comes after training."""
    trainer, checkpointer = make()
    hooks = best_hooks(checkpointer, metrics, mode, period, keep=keep, **kwargs)
    trainer.register_hooks(hooks)
    checkpointer.resume_or_load("", resume=start > 0)
    trainer.train(start, stop or start + len(metrics) * period)
    return trainer, checkpointer, hooks[2]


def test_the_best_three_are_kept_and_the_best_has_a_second_name_without_iteration(make):
    _, checkpointer, hook = run(make, [0.3, 0.5, 0.1, 0.4, 0.6, 0.2], keep=3)
    assert hook.best == [(0.6, 9), (0.5, 3), (0.4, 7)]
    assert kept(checkpointer) == files_of(hook)
    assert last(checkpointer) == "model_final.pth"


def test_each_of_the_best_files_holds_the_weights_of_its_iteration(make):
    weights = []
    trainer, checkpointer = make()
    note = CallbackHook(after_step=lambda trainer: weights.append(trainer.model.fc.weight.detach().clone()))
    trainer.register_hooks([note, *best_hooks(checkpointer, [0.3, 0.5, 0.4, 0.1], keep=3)])
    trainer.train(0, 8)
    assert len(kept(checkpointer)) == 4
    for name, (iteration, _) in kept(checkpointer).items():
        assert torch.equal(saved(checkpointer, name)["model"]["fc.weight"], weights[iteration])


def test_the_list_of_the_best_survives_a_resume(make):
    run(make, [0.3, 0.5, 0.1], keep=2)
    _, checkpointer, hook = run(make, [0.2, 0.4, 0.6], start=6, keep=2)
    assert hook.best == [(0.6, 12), (0.5, 3)]
    assert kept(checkpointer) == files_of(hook)


def test_another_metric_on_a_resume_starts_a_new_list_and_keeps_the_former_best(make, log):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [5.0, 9.0]))
    trainer.train(0, 4)
    before = saved(checkpointer, "model_best")["model"]["fc.weight"]

    trainer, checkpointer = make()
    hook = BestCheckpointer(1, checkpointer, "total_loss", "min")
    trainer.register_hooks([hook, PeriodicCheckpointer(checkpointer, 2)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.finished_iter + 1, 6)
    [warning] = [message for message in log.messages if "chosen by" in message]
    assert "chosen by metric (max), and are chosen by total_loss (min) from now on" in warning
    assert torch.equal(saved(checkpointer, "model_best_0000004_before")["model"]["fc.weight"], before)
    assert saved(checkpointer, "model_best")["best_metric"]["name"] == "total_loss"
    assert [iteration for _, iteration in hook.best] == [5]


def test_the_former_best_is_kept_also_when_the_run_is_killed_before_its_next_checkpoint(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [5.0, 9.0]))
    trainer.train(0, 4)
    for _ in range(2):
        trainer, checkpointer = make()
        killed = CallbackHook(before_step=lambda trainer: trainer.iter == 6 and 1 / 0)
        trainer.register_hooks([killed, BestCheckpointer(1, checkpointer, "total_loss", "min")])
        checkpointer.resume_or_load("", resume=True)
        with pytest.raises(ZeroDivisionError):
            trainer.train(trainer.finished_iter + 1, 8)
        assert saved(checkpointer, "model_best")["best_metric"]["name"] == "total_loss"
        assert saved(checkpointer, "model_best_0000004_before")["best_metric"]["name"] == "metric"


def test_a_value_from_before_a_resume_with_another_metric_does_not_count_for_later_weights(make):
    def put(trainer):
        if trainer.iter == 1:
            trainer.storage.put_scalar("other", 0.9)

    def hooks(checkpointer, metric, mode):
        best = BestCheckpointer(1, checkpointer, metric, mode)
        return [CallbackHook(after_step=put), PeriodicCheckpointer(checkpointer, 2), best]

    trainer, checkpointer = make()
    trainer.register_hooks(hooks(checkpointer, "total_loss", "min"))
    trainer.train(0, 4)
    trainer, checkpointer = make()
    trainer.register_hooks(hooks(checkpointer, "other", "max"))
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.finished_iter + 1, 6)
    assert trainer.find_hook(BestCheckpointer).best == []


def test_keep_must_be_at_least_1(make):
    with pytest.raises(ConfigError, match="at least 1"):
        BestCheckpointer(1, make()[1], "a", keep=0)


# ---------------------------------------------------------------------------- a resume from before the best


@pytest.fixture
def rewound(make):
    """A run whose best is 0.9, at 7, resumed from the checkpoint of 3, whose best is 0.5, at 3."""

    def rewound(metrics, stop=None, **kwargs):
        _, checkpointer, _ = run(make, [0.4, 0.5, 0.3, 0.9, 0.2], **kwargs)
        Path(checkpointer.save_dir, "last_checkpoint").write_text("model_0000003.pth")
        return run(make, metrics, start=4, stop=stop, **kwargs)

    return rewound


def test_a_repeated_run_ends_with_the_same_files(rewound):
    _, checkpointer, hook = rewound([0.3, 0.9, 0.2], keep=2)
    assert hook.best == [(0.9, 7), (0.5, 3)]
    assert kept(checkpointer) == files_of(hook)


def test_the_best_is_the_one_of_the_resumed_run(rewound):
    _, checkpointer, hook = rewound([0.6, 0.7, 0.2], keep=2)
    assert hook.best == [(0.7, 7), (0.6, 5)]
    assert kept(checkpointer) == files_of(hook)


def test_a_resume_without_a_better_value_ends_with_the_best_of_its_list(rewound):
    _, checkpointer, hook = rewound([0.45, 0.3], keep=2, load_at_end=True)
    assert hook.best == [(0.5, 3), (0.45, 5)]
    assert kept(checkpointer) == files_of(hook)


# ---------------------------------------------------------------------------- other values after a failure


FIRST = {1: 0.5, 3: 0.6, 7: 0.9}  # the checkpoint of 5 lists 0.6 as the best; the run fails at 9


@pytest.fixture
def train(make):
    """A run with given values at some iterations and a checkpoint every 6; it resumes if there is a checkpoint."""

    def train(values, fail_at=None, **kwargs):
        def act(trainer):
            if trainer.iter == fail_at:
                raise RuntimeError("broken")

        def put(trainer):
            if trainer.iter in values:
                trainer.storage.put_scalar("metric", values[trainer.iter], smoothing_hint=False)

        trainer, checkpointer = make()
        hook = BestCheckpointer(1, checkpointer, "metric", **kwargs)
        trainer.register_hooks(
            [CallbackHook(before_step=act, after_step=put), PeriodicCheckpointer(checkpointer, 6), hook]
        )
        checkpointer.resume_or_load("", resume=True)
        if fail_at is None:
            trainer.train(trainer.finished_iter + 1, 20)
            return checkpointer, hook
        with pytest.raises(RuntimeError, match="broken"):
            trainer.train(trainer.finished_iter + 1, 20)
        return checkpointer, hook

    return train


def test_a_worse_value_at_the_same_iteration_does_not_count(train):
    train(FIRST, fail_at=9)
    checkpointer, hook = train({**FIRST, 7: 0.4}, load_at_end=True)
    assert hook.best == [(0.6, 3)]
    assert hook.loaded_iter == 3
    assert kept(checkpointer) == files_of(hook)


@pytest.mark.parametrize("keep", [1, 2])
def test_files_are_removed_after_the_next_checkpoint(train, keep):
    checkpointer, _ = train(FIRST, fail_at=9, keep=keep)
    entries = [(0.9, 7), (0.6, 3), (0.5, 1)]
    assert kept(checkpointer) == files_of(entries[: keep + 1])
    checkpointer, _ = train(FIRST, fail_at=14, keep=keep)  # the checkpoint of 11 lists 7
    assert kept(checkpointer) == files_of(entries[:keep])


def test_a_resumed_run_finds_every_file_of_its_list(train):
    train(FIRST, fail_at=9, keep=2)
    checkpointer, hook = train({**FIRST, 7: 0.4}, keep=2)
    assert hook.best == [(0.6, 3), (0.5, 1)]
    assert kept(checkpointer) == files_of(hook)


def test_files_written_after_the_checkpoint_are_removed(train):
    train({1: 0.5, 3: 0.6, 7: 0.8, 8: 0.9}, fail_at=9, keep=2)
    checkpointer, hook = train({15: 0.95}, keep=2)
    assert hook.best == [(0.95, 15), (0.6, 3)]
    assert kept(checkpointer) == files_of(hook)


def test_files_that_a_killed_run_did_not_remove_are_removed(train, monkeypatch):
    remove = Checkpointer.remove
    monkeypatch.setattr(Checkpointer, "remove", lambda self, path: None)  # killed before
    checkpointer, _ = train(FIRST, fail_at=9)
    assert kept(checkpointer) == files_of([(0.9, 7), (0.6, 3), (0.5, 1)])
    monkeypatch.setattr(Checkpointer, "remove", remove)
    checkpointer, hook = train({})
    assert hook.best == [(0.6, 3)]
    assert kept(checkpointer) == files_of(hook)


def test_a_removed_best_is_not_replaced_by_a_later_one(train, log):
    checkpointer, hook = train(FIRST, fail_at=14)  # the checkpoint of 11 lists 7, so that 3 was removed
    checkpointer.tag_last_checkpoint("model_0000005.pth")
    checkpointer, hook = train({8: 0.55}, load_at_end=True)
    assert "The file of iteration 3 is missing (metric: 0.6)" in log.text
    assert hook.best == [(0.55, 8)]
    assert hook.loaded_iter == saved(checkpointer, "model_best")["iteration"] == 8
    assert kept(checkpointer) == files_of(hook)


def test_files_of_a_run_that_starts_over_are_removed(make):
    trainer, checkpointer, hook = run(make, [0.3, 0.9])
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.storage.put_scalar("metric", 0.2, False))])
    trainer.remove_hook(EvalHook)
    trainer.train(0, 4)
    assert kept(checkpointer) == files_of(hook)


def test_an_entry_whose_file_is_missing_is_dropped_with_a_warning(train, log):
    checkpointer, _ = train(FIRST, fail_at=6, keep=2)
    Path(checkpointer.save_dir, "model_best_0000001.pth").unlink()
    _, hook = train({9: 0.1}, keep=2)
    assert "The file of iteration 1 is missing (metric: 0.5)" in log.text
    assert hook.best == [(0.6, 3), (0.1, 9)]


def test_a_value_whose_file_is_missing_does_not_count_for_later_weights(train):
    checkpointer, _ = train({3: 0.6}, fail_at=6)
    for path in Path(checkpointer.save_dir).glob("model_best*"):
        path.unlink()
    checkpointer, hook = train({9: 0.1})
    assert hook.best == [(0.1, 9)]
    assert kept(checkpointer) == files_of(hook)


def test_the_best_of_detectron2_which_has_one_file_is_kept(train):
    checkpointer, _ = train({3: 0.6}, fail_at=6)
    Path(checkpointer.save_dir, "model_best_0000003.pth").unlink()
    checkpointer, hook = train({9: 0.1})
    assert hook.best == [(0.6, 3)]
    assert kept(checkpointer) == files_of(hook)


def test_a_failed_save_leaves_the_list_as_it_was(train, monkeypatch):
    monkeypatch.setattr(Checkpointer, "__init__", partialmethod(Checkpointer.__init__, on_error="continue"))
    write = Checkpointer._write

    def full(self, path, how):
        if path.endswith("model_best_0000007.pth"):
            raise OSError("disk full")
        write(self, path, how)

    monkeypatch.setattr(Checkpointer, "_write", full)
    checkpointer, hook = train({1: 0.5, 7: 0.9})
    assert hook.best == [(0.5, 1)]
    assert kept(checkpointer) == files_of(hook)


# ---------------------------------------------------------------------------- loading the best at the end


def test_the_model_ends_with_the_best_weights_and_the_final_checkpoint_with_the_last(make, log):
    trainer, checkpointer, hook = run(make, [0.3, 0.9, 0.4], load_at_end=True)
    ours = trainer.model.fc.weight
    assert torch.equal(ours, saved(checkpointer, "model_best")["model"]["fc.weight"])
    assert not torch.equal(ours, saved(checkpointer, "model_final")["model"]["fc.weight"])
    assert hook.loaded_iter == 3
    assert "best weights now: " in log.text
    assert "of iteration 3, metric: 0.9" in log.text


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
def test_an_early_stop_loads_the_best_and_an_interruption_does_not(make, checkpointer_type):
    for folder, code, loaded in (("stopped", 0, True), ("interrupted", 75, False)):
        trainer, checkpointer = make(folder, checkpointer_type)
        stop = CallbackHook(after_step=lambda t, c=code: t.request_stop("", exit_code=c) if t.iter == 6 else None)
        trainer.register_hooks([*best_hooks(checkpointer, [0.3, 0.9, 0.4], load_at_end=True), stop])
        trainer.train(0, 12)
        best = torch.load(f"{checkpointer.save_dir}/model_best.pth", weights_only=False)["model"]["fc.weight"]
        assert torch.equal(trainer.model.fc.weight, best) == loaded


def test_a_failed_run_keeps_its_weights(make):
    def fail(trainer):
        if trainer.iter == 5:
            raise RuntimeError("broken")

    trainer, checkpointer = make()
    hooks = best_hooks(checkpointer, [0.3, 0.2], load_at_end=True)
    trainer.register_hooks([*hooks, CallbackHook(before_step=fail)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 8)
    assert hooks[2].loaded_iter is None


def test_a_missing_best_at_the_end_is_a_warning(make, log):
    run(make, [math.nan, math.nan], load_at_end=True)
    assert "There is no " in log.text


def test_a_damaged_best_file_is_not_loaded(make):
    def damage(trainer):
        path = Path(checkpointer.save_dir, "model_best.pth")
        content = bytearray(path.read_bytes())
        weight = saved(checkpointer, "model_best")["model"]["fc.weight"].numpy().tobytes()
        content[content.index(weight) + 2] ^= 1
        path.write_bytes(content)

    trainer, checkpointer = make()
    hooks = best_hooks(checkpointer, [0.3, 0.9, 0.4], load_at_end=True)
    trainer.register_hooks([*hooks, CallbackHook(after_train=damage)])
    with pytest.raises(ConfigError, match=r"model_best\.pth is damaged"):
        trainer.train(0, 6)
    assert hooks[2].loaded_iter is None
    assert torch.equal(trainer.model.fc.weight, saved(checkpointer, "model_final")["model"]["fc.weight"])


def test_a_pipe_in_place_of_the_best_file_is_replaced(make):
    trainer, checkpointer = make()
    os.mkfifo(f"{checkpointer.save_dir}/model_best.pth")
    trainer.register_hooks(best_hooks(checkpointer, [0.3, 0.9]))
    trainer.train(0, 4)
    assert kept(checkpointer) == files_of([(0.9, 4)])


def test_an_asynchronous_save_of_the_best_is_complete_before_it_is_loaded(make, tmp_path):
    trainer, checkpointer = make()
    checkpointer = Checkpointer(trainer.model, str(tmp_path / "run"), asynchronous=True, trainer=trainer)
    hooks = best_hooks(checkpointer, [0.3, 0.4, 0.5, 0.6], keep=2, load_at_end=True)
    trainer.register_hooks(hooks)
    trainer.train(0, 8)
    assert hooks[2].loaded_iter == 8
    assert kept(checkpointer) == files_of([(0.6, 8), (0.5, 5)])


def test_the_best_by_a_function_of_all_metrics_and_reset_when_training_starts(make):
    def score(metrics):
        return metrics["metric"] - metrics["total_loss"] * 0

    trainer, checkpointer = make()
    values = iter([0.5, 0.3, 0.2])
    best = BestCheckpointer(0, checkpointer, score, reset_on_train=True)
    trainer.register_hooks([EvalHook(2, lambda: {"metric": next(values)}, eval_after_train=False), best])
    trainer.train(0, 4)
    assert best.best == [(0.5, 1)]
    assert saved(checkpointer, "model_best")["best_metric"]["name"] == f"{__name__}:score"
    trainer.train(4, 6)
    assert best.best == [(0.2, 5)]


# ---------------------------------------------------------------------------- subclasses that check by themselves


class Checking(BestCheckpointer):
    def _best_checking(self):
        value, iteration = self.trainer.storage.latest()[self._val_metric]
        self.checked = [*getattr(self, "checked", []), iteration]
        if self.best_metric is None or self._compare(value, self.best_metric):
            self._checkpointer.save(f"{self._file_prefix}_own", iteration=iteration)
            self._update_best(value, iteration)
            self._logger.info("saved %.5f of %d", self.best_metric, self.best_iter)


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
def test_a_subclass_that_checks_by_itself_is_called_as_in_detectron2(make, checkpointer_type):
    trainer, checkpointer = make(checkpointer_type=checkpointer_type)
    values = iter([0.3, 0.9, 0.5, 0.4])
    hook = Checking(2, checkpointer, "metric")
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


# ---------------------------------------------------------------------------- second names


def write(path, folder, text):
    if folder:
        path.mkdir()
        (path / "checksums.json").write_text("{}")
        path /= "state.pth"
    path.write_text(text)


@pytest.mark.parametrize("existing", ["nothing", "file", "folder"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_link_replaces_its_target_and_does_not_depend_on_its_source(tmp_path, folder, existing):
    source, target = tmp_path / "model_0000003.pth", tmp_path / "model_best.pth"
    write(source, folder, "new")
    if existing != "nothing":
        write(target, existing == "folder", "old")
    for _ in range(2):  # the second call changes nothing
        link(str(source), str(target), PathManager)
        assert sorted(os.listdir(tmp_path)) == ["model_0000003.pth", "model_best.pth"]
    (source / "state.pth" if folder else source).unlink()
    assert (target / "state.pth" if folder else target).read_text() == "new"


def test_a_missing_source_is_ignored(tmp_path):
    link(str(tmp_path / "missing.pth"), str(tmp_path / "target.pth"), PathManager)
    assert os.listdir(tmp_path) == []


def test_a_failed_copy_leaves_no_temporary_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    write(tmp_path / "source.pth", False, "new")
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(OSError, match="No space"):
        link(str(tmp_path / "source.pth"), str(tmp_path / "target.pth"), PathManager)
    assert os.listdir(tmp_path) == ["source.pth"]
