"""BestCheckpointer: which files it keeps, also over failures and resumes, and what the model ends with."""

import contextlib
import math
import os
import re
from pathlib import Path

import pytest
import torch
from small_runs import files, last, saved

from hookline.engine import setup_logger
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint import files as files_module
from hookline.hooks import BestCheckpointer, CallbackHook, EvalHook, PeriodicCheckpointer


@pytest.fixture
def train(make):
    """A run with given values at some iterations; it resumes if there is a checkpoint."""

    def train(values, until=16, fail_at=None, hooks=(), metric="metric", checkpointer=None, **kwargs):
        def fail(trainer):
            if trainer.iter == fail_at:
                raise RuntimeError("broken")

        def put(trainer):
            weights[trainer.iter] = trainer.model.fc.weight.detach().clone()
            if trainer.iter in values:
                trainer.storage.put_scalar("metric", values[trainer.iter], smoothing_hint=False)

        weights = {}
        trainer, ours = make()
        ours = Checkpointer(trainer.model, ours.save_dir, trainer=trainer, **(checkpointer or {}))
        hook = BestCheckpointer(1, ours, metric, **kwargs)
        look = CallbackHook(before_step=fail, after_step=put)
        trainer.register_hooks([look, PeriodicCheckpointer(ours, 6), hook, *hooks])
        ours.resume_or_load("", resume=True)
        trainer.weights = weights
        with contextlib.nullcontext() if fail_at is None else pytest.raises(RuntimeError, match="broken"):
            trainer.train(trainer.finished_iter + 1, until)
        return trainer, ours, hook

    return train


def kept(checkpointer):
    """The iteration and value stored in each file."""
    names = [name.removesuffix(".pth") for name in files(checkpointer) if name.startswith("model_best")]
    states = {name: saved(checkpointer, name) for name in names}
    return {name: (state["iteration"], state["best_metric"]["value"]) for name, state in states.items()}


def files_of(best):
    """What :func:`kept` returns for a list of the best, given as the hook or as (value, iteration)."""
    entries = [(iteration, value) for value, iteration in getattr(best, "best", best)]
    return {"model_best": entries[0]} | {f"model_best_{entry[0]:07d}": entry for entry in entries}


def evaluations(period, values):
    values = iter(values)
    return EvalHook(period, lambda: {"metric": next(values)})


@pytest.mark.parametrize(
    ("mode", "keep", "values", "best"),
    [
        ("min", 1, {1: math.nan, 3: 0.8, 5: 0.9}, [(0.8, 3)]),
        ("max", 1, {1: math.inf, 3: 0.8, 5: 0.9, 7: math.nan}, [(0.9, 5)]),
        ("max", 3, {1: 0.3, 3: 0.5, 5: 0.1, 7: 0.4, 8: 0.6}, [(0.6, 8), (0.5, 3), (0.4, 7)]),
        ("max", 1, {1: math.nan}, []),
    ],
)
def test_the_best_are_kept_with_the_weights_of_their_iterations(train, mode, keep, values, best):
    trainer, checkpointer, hook = train(values, mode=mode, keep=keep, until=10)
    assert hook.best == best
    assert kept(checkpointer) == (files_of(best) if best else {})
    for name, (iteration, _) in kept(checkpointer).items():
        assert torch.equal(saved(checkpointer, name)["model"]["fc.weight"], trainer.weights[iteration])
    assert last(checkpointer) == "model_final.pth"
    assert not best or os.readlink(f"{checkpointer.save_dir}/model_best.pth") == f"model_best_{best[0][1]:07d}.pth"


def test_the_evaluation_after_training_counts_and_a_prefix_names_the_files(make):
    trainer, checkpointer = make()
    hook = BestCheckpointer(0, checkpointer, "metric", file_prefix="top")
    trainer.register_hooks([evaluations(2, [0.3, 0.9]), hook])
    trainer.train(0, 4)
    assert (hook.best_metric, hook.best_iter) == (0.9, 4)
    assert saved(checkpointer, "top")["iteration"] == 4


def test_the_console_has_lines_of_at_most_80_columns_and_the_log_whole_names(make, capsys, tmp_path):
    setup_logger(str(tmp_path))
    trainer, ours = make()
    values, name = iter([2, 5, 4]), "validation_2017/average_precision_of_small_boxes"
    trainer.register_hooks([EvalHook(4, lambda: {name: next(values)}), BestCheckpointer(0, ours, name, keep=2)])
    trainer.train(0, 12)
    console = [line[10:] for line in capsys.readouterr().out.splitlines() if "saved" in line]
    assert max(map(len, console)) <= 70
    assert re.fullmatch(r"Best …\S+_small_boxes so far: 2, saved …\S*model_best_0000003\.pth", console[0])
    assert re.fullmatch(r"…\S+_boxes, one of the best: 4, saved …\S*best_0000012\.pth", console[2])
    assert f"Best {name} so far: 2, saved {ours.save_dir}" in (tmp_path / "log.txt").read_text()


def test_a_missing_metric_is_warned_about_once_with_the_closest_name(train, log):
    train({0: 1.0, 1: 1.0, 2: 1.0}, metric="metrik", until=4)
    [warning] = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert "'metrik'" in warning
    assert "did you mean 'metric'" in warning


def score(metrics):
    return metrics["metric"] - metrics["total_loss"] * 0


def test_the_best_by_a_function_of_all_metrics_and_reset_when_training_starts(make):
    trainer, checkpointer = make()
    best = BestCheckpointer(0, checkpointer, score, reset_on_train=True)
    values = iter([0.5, 0.3, 0.2])
    trainer.register_hooks([EvalHook(2, lambda: {"metric": next(values)}, eval_after_train=False), best])
    trainer.train(0, 4)
    assert best.best == [(0.5, 1)]
    assert saved(checkpointer, "model_best")["best_metric"]["name"] == f"{__name__}:score"
    trainer.train(4, 6)
    assert best.best == [(0.2, 5)]


FIRST = {1: 0.5, 3: 0.6, 7: 0.9}  # the checkpoint of 5 lists 0.6 as the best; the run fails at 9


@pytest.mark.parametrize(
    ("keep", "first", "then", "best"),
    [
        (1, FIRST, {9: 0.4}, [(0.6, 3)]),  # a worse value after a resume does not count
        (1, FIRST, FIRST, [(0.9, 7)]),  # a repeated run ends with the same files
        (2, FIRST, {7: 0.4}, [(0.6, 3), (0.5, 1)]),  # another value at the same iteration
    ],
)
def test_a_resumed_run_keeps_the_files_of_its_own_list(train, keep, first, then, best, caplog):
    caplog.set_level("INFO")
    train(first, fail_at=9, keep=keep)
    _, checkpointer, hook = train(then, keep=keep, load_at_end=True)
    assert hook.best == best
    assert kept(checkpointer).items() >= files_of(best).items()  # the file of 7 stays if it is not in the new list
    assert hook.loaded_iter == best[0][1]
    assert f"The model has the best weights, of iteration {best[0][1]}, metric: {best[0][0]}" in caplog.text


def test_a_longer_run_does_not_take_its_weights_for_those_of_the_last_evaluation(make):
    trainer, checkpointer = make()
    values = iter([0.5])
    evaluate = EvalHook(0, lambda: {"metric": next(values)})
    trainer.register_hooks([evaluate, BestCheckpointer(4, checkpointer, "metric")])
    trainer.train(0, 8)
    weight = trainer.model.fc.weight.detach().clone()
    trainer._hooks.remove(evaluate)
    trainer.train(8, 12)
    assert not torch.equal(trainer.model.fc.weight, weight)
    assert torch.equal(saved(checkpointer, "model_best")["model"]["fc.weight"], weight)


def test_a_run_that_failed_after_its_last_evaluation_saves_the_best_when_it_goes_on(make):
    trainer, checkpointer = make()
    trainer.register_hooks([EvalHook(0, lambda: {"metric": 0.5})])
    trainer.train(0, 8)
    trainer.register_hooks([BestCheckpointer(0, checkpointer, "metric")])
    trainer.train(8, 8)
    weight = saved(checkpointer, "model_best")["model"]["fc.weight"]
    assert torch.equal(weight, trainer.model.fc.weight)


def test_files_are_removed_after_the_next_checkpoint_and_a_missing_one_is_a_warning(train, log):
    entries = [(0.9, 7), (0.6, 3)]
    _, checkpointer, _ = train(FIRST, fail_at=9)
    assert last(checkpointer) == "model_0000005.pth"
    assert kept(checkpointer) == files_of(entries)
    train(FIRST, fail_at=14)  # the checkpoint of 11 lists 7
    assert kept(checkpointer) == files_of(entries[:1])
    checkpointer.tag_last_checkpoint("model_0000005.pth")
    _, checkpointer, hook = train({8: 0.55}, load_at_end=True)
    assert "The files of these best (metric, iteration) are missing: [(0.6, 3)]" in log.text
    assert hook.best == [(0.55, 8)]
    assert hook.loaded_iter == saved(checkpointer, "model_best")["iteration"] == 8
    assert kept(checkpointer).items() >= files_of(hook).items()


class Full(Checkpointer):
    """Cannot write the best of iteration 2."""

    def _write(self, path, *args, **kwargs):
        if path.endswith("model_best_0000002.pth"):
            raise OSError(28, "No space left on device")
        super()._write(path, *args, **kwargs)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_could_not_be_written_is_not_among_the_best(make, monkeypatch, asynchronous):
    monkeypatch.setattr(files_module, "RETRY_AFTER", 0.0)
    trainer, ours = make()
    full = Full(trainer.model, ours.save_dir, asynchronous=asynchronous, on_error="continue")
    hook = BestCheckpointer(0, full, "metric", keep=2)
    trainer.register_hooks([evaluations(1, [0.1, 0.2, 0.9, 0.3]), hook])
    trainer.train(0, 4)
    assert hook.best == [(0.3, 4), (0.2, 1)]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_in_the_place_of_the_link_is_renamed(train, log, is_folder):
    """It may be a person's. A copy of a sharded run may have folders in the place of links."""
    _, checkpointer, _ = train({1: 0.5}, until=6)
    best = Path(checkpointer.save_dir, "model_best.pth")
    best.unlink()
    if is_folder:
        best.mkdir()
    (best / "mine" if is_folder else best).write_text("mine")
    train({7: 0.6}, until=12)
    assert saved(checkpointer, "model_best")["iteration"] == 7
    old = best.with_suffix(".pth.old")
    assert (old / "mine" if is_folder else old).read_text() == "mine"
    assert f"It is now {old}" in log.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_model_ends_with_the_best_weights_and_the_final_checkpoint_with_the_last(train, log, asynchronous):
    options = {"asynchronous": asynchronous}
    trainer, checkpointer, hook = train({1: 0.3, 3: 0.9, 5: 0.4}, until=8, load_at_end=True, checkpointer=options)
    assert torch.equal(trainer.model.fc.weight, trainer.weights[3])
    assert torch.equal(saved(checkpointer, "model_final")["model"]["fc.weight"], trainer.weights[7])
    assert hook.loaded_iter == 3
    assert "iteration 3, metric: 0.9" in log.text


@pytest.mark.parametrize(("exit_code", "loaded"), [(0, 3), (75, None)])
def test_an_early_stop_loads_the_best_and_an_interruption_does_not(train, exit_code, loaded):
    stop = CallbackHook(after_step=lambda t: t.request_stop("", exit_code=exit_code) if t.iter == 6 else None)
    _, _, hook = train({3: 0.9}, hooks=[stop], load_at_end=True)
    assert hook.loaded_iter == loaded


class Checking(BestCheckpointer):
    checked = ()

    def _best_checking(self):
        value, iteration = self.trainer.storage.latest()[self._val_metric]
        self.checked += (iteration,)
        if self.best_metric is None or self._compare(value, self.best_metric):
            self._checkpointer.save(f"{self._file_prefix}_own", iteration=iteration)
            self._update_best(value, iteration)


def test_a_subclass_that_checks_by_itself_is_called_as_in_detectron2(make):
    trainer, checkpointer = make()
    hook = Checking(2, checkpointer, "metric")
    trainer.register_hooks([evaluations(2, [0.3, 0.9, 0.5, 0.4]), hook])
    trainer.train(0, 8)
    assert {1, 3, 5, 8} <= set(hook.checked)
    assert saved(checkpointer, "model_best_own")["iteration"] == hook.best_iter
    assert not [name for name in files(checkpointer) if name.startswith("model_best_0")]


class Better(BestCheckpointer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._compare = lambda value, best: value > best + 0.25


def test_a_subclass_may_say_what_is_better(make):
    trainer, checkpointer = make()
    hook = Better(2, checkpointer, "metric")
    trainer.register_hooks([evaluations(2, [0.3, 0.5, 0.6, 0.7]), hook])
    trainer.train(0, 8)
    assert hook.best == [(0.6, 5)]


class Ported(Checkpointer):
    """Saves as a subclass that was written for fvcore."""

    def save(self, name, **kwargs):
        torch.save({"model": self.model.state_dict(), **kwargs}, f"{self.save_dir}/{name}.pth")
        self.tag_last_checkpoint(f"{name}.pth")


def test_a_checkpointer_with_a_save_of_its_own_keeps_the_best(make):
    trainer, checkpointer = make()
    ported = Ported(trainer.model, checkpointer.save_dir)
    best = BestCheckpointer(2, ported, "metric")
    trainer.register_hooks([PeriodicCheckpointer(ported, 4), best, evaluations(2, [0.3, 0.9, 0.5, 0.4, 0.4])])
    trainer.train(0, 10)
    assert saved(checkpointer, "model_best")["iteration"] == 3
    assert last(checkpointer) == "model_final.pth"
