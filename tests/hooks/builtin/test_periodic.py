"""PeriodicCheckpointer, RollingCheckpointer and ExceptionCheckpointer: which files there are, and what they hold."""

from pathlib import Path

import pytest
import torch
from metric_runs import at
from small_runs import config_trainer, files, kill_at, last, saved

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import (
    CallbackHook,
    ExceptionCheckpointer,
    LRScheduler,
    PeriodicCheckpointer,
    RollingCheckpointer,
)


def names(*iterations, prefix="model", final=True):
    """The files of a run with checkpoints of these iterations."""
    kept = [f"{prefix}_{iteration:07d}.pth" for iteration in iterations]
    return ["last_checkpoint", *kept, *([f"{prefix}_final.pth"] if final else [])]


@pytest.fixture
def train(make):
    """Train with a PeriodicCheckpointer and other hooks; return the trainer and its checkpointer."""

    def train(until, *args, hooks=(), start=0, folder="run", **kwargs):
        trainer, checkpointer = make(folder)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, *args, **kwargs), *hooks])
        if start:
            checkpointer.resume_or_load("", resume=True)
        trainer.train(start, until)
        return trainer, checkpointer

    return train


def fail(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("until", "args", "expected"),
    [
        (12, (5,), names(4, 9)),
        (8, (2, 8, 2, "net"), names(5, 7, prefix="net")),  # detectron2's order: period, max_iter, max_to_keep, prefix
        (16, ("2ep",), names(7, 15)),
        (0, (5,), []),
    ],
)
def test_a_checkpoint_is_named_by_its_last_finished_iteration(train, until, args, expected):
    _, checkpointer = train(until, *args)
    assert files(checkpointer) == expected
    for name in expected[1:]:
        state = saved(checkpointer, name.removesuffix(".pth"))
        assert state["iteration"] == state["trainer"]["iteration"]
        assert state["iteration"] == (until - 1 if "final" in name else int(name[-11:-4]))
    assert not expected or last(checkpointer) == expected[-1]


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_has_the_state_of_all_hooks_after_the_step(make, first):
    trainer, checkpointer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 100)
    hooks = [PeriodicCheckpointer(checkpointer, 5), LRScheduler(scheduler=scheduler)]
    trainer.register_hooks(hooks if first else hooks[::-1])
    trainer.train(0, 5)
    for name in ("model_0000004", "model_final"):
        assert saved(checkpointer, name)["trainer"]["hooks"]["LRScheduler"]["last_epoch"] == 5


def test_a_requested_checkpoint_includes_the_step_of_the_request(train):
    ask = at(3, lambda trainer: trainer.request_save(), "before_step")
    _, checkpointer = train(6, 0, hooks=[ask])
    assert files(checkpointer) == names(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_hear_of_each_save_when_its_file_is_complete(make, asynchronous):
    trainer, checkpointer = make()
    checkpointer = Checkpointer(trainer.model, checkpointer.save_dir, asynchronous=asynchronous, trainer=trainer)
    heard = []
    hook = CallbackHook(
        before_save=lambda trainer, path: heard.append(Path(path).name),
        after_save=lambda trainer, path: heard.append((Path(path).name, Path(path).exists())),
    )
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1), hook])
    trainer.train(0, 5)
    paths = names(1, 3)[1:]
    assert [one for one in heard if isinstance(one, str)] == paths
    assert [one for one in heard if one not in paths] == [(path, True) for path in paths]
    assert asynchronous or heard[:2] == [paths[0], (paths[0], True)]
    assert files(checkpointer) == names(3)
    assert last(checkpointer) == "model_final.pth"


def test_wrong_arguments_are_refused(make):
    with pytest.raises(ConfigError, match=r"hookline\.engine\.checkpoint\.Checkpointer"):
        PeriodicCheckpointer(torch.nn.Linear(1, 1), 2)
    with pytest.raises(ConfigError, match="max_to_keep"):
        PeriodicCheckpointer(make()[1], 2, max_to_keep=0)
    with pytest.raises(ConfigError, match="keep"):
        RollingCheckpointer(make()[1], 2, keep=0)


def test_an_interrupted_final_evaluation_leaves_a_final_checkpoint_without_the_end(train, make):
    with pytest.raises(ZeroDivisionError):
        train(4, 0, hooks=[CallbackHook(after_train=fail)])
    checkpointer = make()[1]
    assert files(checkpointer) == names()
    assert not saved(checkpointer, "model_final")["trainer"]["complete"]  # so a resume repeats the end of the run


@pytest.mark.parametrize(("exit_code", "expected"), [(75, names(4, final=False)), (0, names(4))])
def test_an_interrupted_run_is_saved_under_its_iteration_and_a_stopped_one_as_final(train, exit_code, expected):
    writes = []
    note = CallbackHook(after_save=lambda trainer, path: writes.append(Path(path).name))
    stop = at(4, lambda trainer: trainer.request_stop("", exit_code=exit_code))
    _, checkpointer = train(12, 5, hooks=[stop, note])
    assert files(checkpointer) == expected
    assert writes == expected[1:]
    assert saved(checkpointer, expected[-1].removesuffix(".pth"))["iteration"] == 4


def test_only_the_newest_are_kept_also_of_an_interrupted_run_and_over_resumes(train):
    stop = at(6, lambda trainer: trainer.request_stop("", exit_code=75))
    _, checkpointer = train(20, 2, max_to_keep=2, hooks=[stop])
    assert files(checkpointer) == names(5, 6, final=False)
    train(11, 2, max_to_keep=2, start=7)
    assert files(checkpointer) == names(7, 9)


@pytest.mark.parametrize("name", ["../thesis.pth", "{}/thesis.pth", "notes.txt", "model_final.pth", "model_12.pth"])
def test_only_checkpoints_of_the_run_itself_are_removed_whatever_names_a_file_lists(train, tmp_path, name):
    _, checkpointer = train(4, 2, max_to_keep=1)
    for other in (tmp_path / "thesis.pth", tmp_path / "run/notes.txt", tmp_path / "run/model_12.pth"):
        other.write_text("mine")
    state = saved(checkpointer, "model_final")
    name = name.format(tmp_path)
    state["trainer"]["hooks"]["PeriodicCheckpointer"] = {"recent_checkpoints": [name]}
    torch.save(state, tmp_path / "run/model_final.pth")
    before = {*files(checkpointer), "model_0000005.pth"}
    train(6, 2, start=4, max_to_keep=1)
    assert before <= set(files(checkpointer))
    assert (tmp_path / "thesis.pth").exists()
    checkpointer.remove(str(tmp_path / "thesis.pth"))  # outside of its folder
    assert (tmp_path / "thesis.pth").exists()


def test_rolling_checkpoints_stand_between_the_others_and_only_the_newest_stay(make):
    trainer, checkpointer = make()
    seen = []
    look = CallbackHook(after_step=lambda t: seen.append(files(checkpointer)))
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 4, max_to_keep=2), look])
    trainer.register_hooks([RollingCheckpointer(checkpointer, 2, keep=1)])
    trainer.train(0, 10)  # the last step has the final checkpoint
    assert "rolling_0000001.pth" in seen[2]
    assert files(checkpointer) == [*names(3, 7), "rolling_0000007.pth"]
    assert last(checkpointer) == "model_final.pth"


def test_a_resume_takes_the_newest_checkpoint_rolling_or_not(tmp_path):
    options = ("CHECKPOINT.ROLLING.PERIOD", 3, "SOLVER.MAX_ITER", 20, "DATASETS.TEST", [])  # CHECKPOINT_PERIOD is 7
    kill_at(config_trainer(tmp_path, *options), 13)
    assert {path.name for path in tmp_path.glob("*.pth")} == {"model_0000006.pth", "rolling_0000011.pth"}
    resumed = config_trainer(tmp_path, *options, resume=True)
    assert resumed.start_iter == 12
    kill_at(resumed, 14)
    resumed = config_trainer(tmp_path, *options, resume=True)
    assert resumed.start_iter == 14
    resumed.train()
    assert [path.name for path in tmp_path.glob("rolling*")] == ["rolling_0000017.pth"]


@pytest.mark.parametrize(
    ("event", "iteration"),
    [
        *(("before_step", 5), ("after_backward", 5), ("after_step", 6)),
        ("after_optimizer_step", None),  # a partial step is not saved
    ],
)
def test_the_state_at_a_failure_before_the_update_or_after_the_step_is_saved(make, event, iteration):
    weights = []
    note = CallbackHook(after_step=lambda trainer: weights.append(trainer.model.fc.weight.detach().clone()))
    trainer, checkpointer = make()
    trainer.register_hooks(
        [PeriodicCheckpointer(checkpointer, 4), ExceptionCheckpointer(checkpointer), note, at(6, fail, event)]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 12)
    assert last(checkpointer) == "model_0000003.pth"
    if iteration is None:
        assert files(checkpointer) == names(3, final=False)
        return
    assert torch.equal(saved(checkpointer, "model_exception")["model"]["fc.weight"], weights[iteration])
    Path(checkpointer.save_dir, "last_checkpoint").write_text("model_exception.pth")
    trainer, checkpointer = make()
    checkpointer.resume_or_load("", resume=True)
    assert trainer.iter == iteration


def test_a_completed_or_interrupted_run_saves_no_failure_state(make):
    def interrupt(trainer):
        raise KeyboardInterrupt

    trainer, checkpointer = make()
    trainer.register_hooks([ExceptionCheckpointer(checkpointer)])
    trainer.train(0, 2)
    trainer.register_hooks([at(3, interrupt)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(2, 12)
    assert files(checkpointer) == []
