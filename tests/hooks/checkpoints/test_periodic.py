from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from small_runs import assert_equal_models, config_trainer, files, kill_at, last, saved

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import (
    CallbackHook,
    ExceptionCheckpointer,
    HookBase,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    RollingCheckpointer,
)

# ---------------------------------------------------------------------------- PeriodicCheckpointer


def test_a_checkpoint_is_named_by_its_last_finished_iteration(make):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5)])
    trainer.train(0, 12)
    assert files(checkpointer) == ["last_checkpoint", "model_0000004.pth", "model_0000009.pth", "model_final.pth"]
    for name, iteration in (("model_0000004", 4), ("model_0000009", 9), ("model_final", 11)):
        assert saved(checkpointer, name)["iteration"] == iteration
        assert saved(checkpointer, name)["trainer"]["iteration"] == iteration
    assert last(checkpointer) == "model_final.pth"


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
def test_a_subclass_saves_by_fvcores_step(make, checkpointer_type):
    class Own(PeriodicCheckpointer):
        def after_step(self):
            self.step(self.trainer.iter, note="mine")

    trainer, checkpointer = make(checkpointer_type=checkpointer_type)
    hook = Own(checkpointer, 2, max_to_keep=2)
    trainer.register_hooks([hook])
    trainer.train(0, 7)
    assert files(checkpointer) == ["last_checkpoint", "model_0000003.pth", "model_0000005.pth", "model_final.pth"]
    assert saved(checkpointer, "model_0000003")["note"] == "mine"
    hook.save("extra")
    assert "extra.pth" in files(checkpointer)


def test_file_prefix_names_the_files(make):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5, file_prefix="net")])
    trainer.train(0, 5)
    assert files(checkpointer) == ["last_checkpoint", "net_0000004.pth", "net_final.pth"]


def test_a_failed_run_keeps_its_last_checkpoint_and_gets_no_final_one(make):
    class Fails(HookBase):
        def after_step(self):
            if self.trainer.iter == 7:
                raise RuntimeError("broken")

    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 12)
    assert files(checkpointer) == ["last_checkpoint", "model_0000004.pth"]
    assert last(checkpointer) == "model_0000004.pth"


def test_an_interrupted_final_evaluation_leaves_a_final_checkpoint_without_the_end(make):
    class Evaluates(HookBase):
        def after_train(self):
            raise KeyboardInterrupt

    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 0), Evaluates()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 4)
    assert files(checkpointer) == ["last_checkpoint", "model_final.pth"]
    assert "end" not in saved(checkpointer, "model_final")["trainer"]  # so a resume repeats the end of the run


def test_a_run_of_no_iterations_saves_nothing(make):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5)])
    trainer.train(12, 12)
    assert files(checkpointer) == []


def test_a_stopped_run_saves_where_it_stopped(make):
    trainer, checkpointer = make()
    stop = CallbackHook(after_step=lambda trainer: trainer.request_stop("enough") if trainer.iter == 6 else None)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 100), stop])
    trainer.train(0, 12)
    assert saved(checkpointer, "model_final")["iteration"] == 6


@pytest.mark.parametrize("checkpointer_first", [True, False])
def test_a_checkpoint_has_the_state_of_all_hooks_after_the_step(make, checkpointer_first):
    trainer, checkpointer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 100)
    hooks = [PeriodicCheckpointer(checkpointer, 5), LRScheduler(scheduler=scheduler)]
    trainer.register_hooks(hooks if checkpointer_first else hooks[::-1])
    trainer.train(0, 5)
    for name in ("model_0000004", "model_final"):
        assert saved(checkpointer, name)["trainer"]["hooks"]["LRScheduler"]["last_epoch"] == 5


def test_metrics_are_written_before_the_checkpoint_they_belong_to(make):
    order = []

    class Writer(PeriodicWriter):
        def on_write(self):
            order.append("write")

    class Saver(PeriodicCheckpointer):
        def on_save(self):
            order.append("save")

    trainer, checkpointer = make()
    trainer.register_hooks([Saver(checkpointer, 2), Writer([], 2)])
    trainer.train(0, 2)
    assert order == ["write", "save", "write", "save"]


def test_only_the_newest_checkpoints_are_kept(make):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=2)])
    trainer.train(0, 10)
    assert files(checkpointer) == ["last_checkpoint", "model_0000007.pth", "model_0000009.pth", "model_final.pth"]


def test_the_list_of_kept_checkpoints_survives_a_resume(make):
    def run(start, stop):
        trainer, checkpointer = make()
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=2)])
        checkpointer.resume_or_load("", resume=True)
        trainer.train(start, stop)
        return files(checkpointer)

    run(0, 5)
    assert run(5, 10) == ["last_checkpoint", "model_0000007.pth", "model_0000009.pth", "model_final.pth"]


def test_the_final_save_removes_outdated_files_of_a_killed_run(make, tmp_path):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    trainer.train(0, 4)
    # As after a kill between the second checkpoint and the removal of the first one.
    run = tmp_path / "run"
    (run / "model_final.pth").rename(run / "model_0000001.pth")
    (run / "last_checkpoint").write_text("model_0000003.pth")
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.iter + 1, 5)
    assert files(checkpointer) == ["last_checkpoint", "model_0000003.pth", "model_final.pth"]


def test_a_moved_run_removes_its_old_checkpoints(make, tmp_path):
    trainer, checkpointer = make("old")
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    trainer.train(0, 4)
    (tmp_path / "old").rename(tmp_path / "new")
    trainer, checkpointer = make("new")
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.iter + 1, 8)
    assert files(checkpointer) == ["last_checkpoint", "model_0000007.pth", "model_final.pth"]


def test_an_old_checkpoint_is_removed_after_the_new_one_is_saved(make, monkeypatch):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    save = checkpointer.save

    def full(name, **kwargs):
        if name == "model_0000003":
            raise OSError("No space left on device")
        save(name, **kwargs)

    monkeypatch.setattr(checkpointer, "save", full)
    with pytest.raises(OSError, match="No space"):
        trainer.train(0, 10)
    assert files(checkpointer) == ["last_checkpoint", "model_0000001.pth"]


def test_max_to_keep_must_be_at_least_1(make):
    with pytest.raises(ConfigError, match="at least 1"):
        PeriodicCheckpointer(make()[1], 2, max_to_keep=0)


def test_hooks_are_called_around_each_save(make):
    heard = []
    trainer, checkpointer = make()
    hook = CallbackHook(
        before_save=lambda trainer, path: heard.append(("before", path)),
        after_save=lambda trainer, path: heard.append(("after", path)),
    )
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 100), hook])
    trainer.train(0, 2)
    path = f"{checkpointer.save_dir}/model_final.pth"
    assert heard == [("before", path), ("after", path)]


def test_numpy_values_in_a_hooks_state_are_loaded_without_pickle(make):
    class Odd(HookBase):
        def __init__(self):
            self.loaded = None

        def state_dict(self):
            return {
                "best": np.float64(0.5),
                "name": np.str_("loss"),
                "curve": np.arange(3),
                "window": deque([1, 2]),
                "counts": defaultdict(int, a=1),
            }

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 100), Odd()])
    trainer.train(0, 1)
    odd = Odd()
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 100), odd])
    checkpointer.resume_or_load("", resume=True)
    assert odd.loaded["best"] == 0.5
    assert odd.loaded["name"] == "loss"
    assert list(odd.loaded["curve"]) == [0, 1, 2]
    assert list(odd.loaded["window"]) == [1, 2]
    assert odd.loaded["counts"] == {"a": 1}


def test_two_hooks_of_a_class_each_get_their_own_state_back(make):
    def hooks(checkpointer):
        return [PeriodicCheckpointer(checkpointer, 2, max_to_keep=3, file_prefix=prefix) for prefix in "ab"]

    trainer, checkpointer = make()
    trainer.register_hooks(hooks(checkpointer))
    trainer.train(0, 4)
    trainer, checkpointer = make()
    both = hooks(checkpointer)
    trainer.register_hooks(both)
    checkpointer.load(f"{checkpointer.save_dir}/b_final.pth")
    for hook, prefix in zip(both, "ab", strict=True):
        assert [path.rpartition("/")[2] for path in hook.recent_checkpoints] == [
            f"{prefix}_0000001.pth",
            f"{prefix}_0000003.pth",
        ]


def test_the_period_may_be_epochs_or_minutes(make, monkeypatch):
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, "2ep")])
    trainer.train(0, 16)  # of 4 iterations each
    assert files(checkpointer) == ["last_checkpoint", "model_0000007.pth", "model_0000015.pth", "model_final.pth"]

    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def pass_time(trainer):
        now[0] += 20

    trainer, checkpointer = make("timed")
    trainer.register_hooks([CallbackHook(before_step=pass_time), PeriodicCheckpointer(checkpointer, "1min")])
    trainer.train(0, 7)
    assert files(checkpointer) == ["last_checkpoint", "model_0000002.pth", "model_0000005.pth", "model_final.pth"]


def test_a_requested_checkpoint_includes_the_step_of_the_request(make):
    trainer, checkpointer = make()
    ask = CallbackHook(before_step=lambda trainer: trainer.request_save() if trainer.iter == 3 else None)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 0), ask])
    trainer.train(0, 6)
    assert files(checkpointer) == ["last_checkpoint", "model_0000003.pth", "model_final.pth"]
    assert saved(checkpointer, "model_0000003")["iteration"] == 3


@pytest.mark.parametrize("period", [5, 100])
def test_an_interrupted_run_is_saved_once_under_its_iteration_and_not_as_final(make, period):
    writes = []
    trainer, checkpointer = make()
    stop = CallbackHook(
        after_step=lambda trainer: trainer.request_stop("time is over", exit_code=75) if trainer.iter == 4 else None,
        after_save=lambda trainer, path: writes.append(Path(path).name),
    )
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, period), stop])
    trainer.train(0, 12)
    assert writes == ["model_0000004.pth"]
    assert last(checkpointer) == "model_0000004.pth"
    assert saved(checkpointer, "model_0000004")["trainer"]["iteration"] == 4


def test_a_second_ctrl_c_while_an_interrupted_run_ends_saves_no_final_checkpoint(make):
    trainer, checkpointer = make()

    def second(trainer):
        raise KeyboardInterrupt

    stop = CallbackHook(after_step=lambda t: t.request_stop("", exit_code=130) if t.iter == 4 else None)
    trainer.register_hooks([stop, PeriodicCheckpointer(checkpointer, 0), CallbackHook(after_train=second)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 8)
    assert last(checkpointer) == "model_0000004.pth"


def test_the_checkpoint_of_an_interrupted_run_counts_towards_max_to_keep(make):
    trainer, checkpointer = make()
    stop = CallbackHook(after_step=lambda t: t.request_stop("", exit_code=75) if t.iter == 6 else None)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=2), stop])
    trainer.train(0, 12)
    assert files(checkpointer) == ["last_checkpoint", "model_0000005.pth", "model_0000006.pth"]


def test_outdated_files_of_a_killed_run_are_removed_with_the_next_checkpoint(make):
    """Killed after the new checkpoint is complete and before the old one is removed."""

    class Killed(BaseException):
        pass

    def kill(path):
        raise Killed

    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    checkpointer.path_manager.rm = kill
    with pytest.raises(Killed):
        trainer.train(0, 8)
    assert files(checkpointer) == ["last_checkpoint", "model_0000001.pth", "model_0000003.pth"]
    trainer, checkpointer = make()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.iter + 1, 8)
    assert files(checkpointer) == ["last_checkpoint", "model_0000007.pth", "model_final.pth"]


def test_files_saved_without_max_to_keep_are_not_removed_later(make):
    for start, stop, keep in ((0, 4, None), (4, 8, 1)):
        trainer, checkpointer = make()
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=keep)])
        checkpointer.resume_or_load("", resume=True)
        trainer.train(start, stop)
    assert files(checkpointer) == [
        *("last_checkpoint", "model_0000001.pth", "model_0000003.pth", "model_0000007.pth", "model_final.pth")
    ]


def test_fvcores_checkpointer_and_positional_arguments_work(make):
    trainer, checkpointer = make(checkpointer_type=FvcoreCheckpointer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, 8, 2, "net")])
    trainer.train(0, 8)
    assert files(checkpointer) == ["last_checkpoint", "net_0000005.pth", "net_0000007.pth", "net_final.pth"]


# ---------------------------------------------------------------------------- asynchronous


def test_after_save_of_an_asynchronous_save_is_called_when_its_file_is_complete(make, tmp_path):
    trainer, checkpointer = make()
    checkpointer = Checkpointer(trainer.model, str(tmp_path / "run"), asynchronous=True, trainer=trainer)
    there = []
    note = CallbackHook(after_save=lambda trainer, path: there.append((Path(path).name, Path(path).exists())))
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1), note])
    trainer.train(0, 5)
    names = ["model_0000001.pth", "model_0000003.pth", "model_final.pth"]
    assert there == [(name, True) for name in names]
    assert files(checkpointer) == ["last_checkpoint", *names[1:]]
    assert last(checkpointer) == "model_final.pth"


def test_a_failing_run_waits_for_its_last_asynchronous_save(make, tmp_path):
    trainer, checkpointer = make()
    checkpointer = Checkpointer(trainer.model, str(tmp_path / "run"), asynchronous=True, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2), Fails("before_step", 2)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 8)
    assert last(checkpointer) == "model_0000001.pth"


# ---------------------------------------------------------------------------- RollingCheckpointer


def test_rolling_checkpoints_stand_between_the_others_and_only_the_newest_stay(make):
    trainer, checkpointer = make()
    seen = []
    look = CallbackHook(after_step=lambda t: seen.append(files(checkpointer)))
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 4, max_to_keep=2), look])
    trainer.register_hooks([RollingCheckpointer(checkpointer, 2, keep=1)])
    trainer.train(0, 10)  # the last step has the final checkpoint
    assert "rolling_0000001.pth" in seen[2]
    assert "rolling_0000003.pth" not in seen[4]  # the PeriodicCheckpointer saved there
    kept = ["model_0000003.pth", "model_0000007.pth", "model_final.pth", "rolling_0000005.pth"]
    assert files(checkpointer) == ["last_checkpoint", *kept]
    assert last(checkpointer) == "model_final.pth"
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        RollingCheckpointer(checkpointer, 2, keep=0)


def test_a_resume_takes_the_newest_checkpoint_rolling_or_not_and_is_exact(tmp_path):
    options = ("CHECKPOINT.ROLLING.PERIOD", 3, "SOLVER.MAX_ITER", 20)  # CHECKPOINT_PERIOD is 7
    config_trainer(tmp_path / "whole", *options).train()
    kill_at(config_trainer(tmp_path / "run", *options), 13)
    assert {"model_0000006.pth", "rolling_0000011.pth"} == {path.name for path in (tmp_path / "run").glob("*.pth")}
    resumed = config_trainer(tmp_path / "run", *options, resume=True)
    assert resumed.start_iter == 12
    kill_at(resumed, 14)
    resumed = config_trainer(tmp_path / "run", *options, resume=True)
    assert resumed.start_iter == 14
    resumed.train()
    assert_equal_models(tmp_path / "run", tmp_path / "whole")
    assert [path.name for path in (tmp_path / "run").glob("rolling*")] == ["rolling_0000017.pth"]


# ---------------------------------------------------------------------------- ExceptionCheckpointer


class Fails(HookBase):
    """Raises at an event of an iteration."""

    def __init__(self, event, at):
        self.at = at
        setattr(self, event, self.fail)

    def fail(self, *_):
        if self.trainer.iter == self.at:
            raise RuntimeError("broken")


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
@pytest.mark.parametrize(
    ("event", "iteration"), [("before_step", 5), ("after_fetch", 5), ("after_backward", 5), ("after_step", 6)]
)
def test_the_state_at_a_failure_before_the_update_or_after_the_step_is_saved(make, event, iteration, checkpointer_type):
    weights = []
    note = CallbackHook(after_step=lambda trainer: weights.append(trainer.model.fc.weight.detach().clone()))
    trainer, checkpointer = make(checkpointer_type=checkpointer_type)
    hooks = [PeriodicCheckpointer(checkpointer, 4), ExceptionCheckpointer(checkpointer), note, Fails(event, 6)]
    trainer.register_hooks(hooks)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 12)
    state = torch.load(f"{checkpointer.save_dir}/model_exception.pth", weights_only=False)
    assert state["iteration"] == state["trainer"]["iteration"] == iteration
    assert torch.equal(state["model"]["fc.weight"], weights[iteration])
    assert last(checkpointer) == "model_0000003.pth"


@pytest.mark.parametrize("event", ["before_optimizer_step", "after_optimizer_step", "before_zero_grad"])
def test_a_partial_step_is_not_saved(make, event):
    trainer, checkpointer = make()
    trainer.register_hooks([ExceptionCheckpointer(checkpointer), Fails(event, 6)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 12)
    assert files(checkpointer) == []


def test_a_run_can_resume_from_the_state_at_a_failure(make):
    trainer, checkpointer = make()
    trainer.register_hooks([ExceptionCheckpointer(checkpointer), Fails("after_backward", 6)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 12)
    Path(checkpointer.save_dir, "last_checkpoint").write_text("model_exception.pth")
    trainer, checkpointer = make()
    checkpointer.resume_or_load("", resume=True)
    assert trainer.iter == 5


def test_a_completed_or_interrupted_run_saves_no_failure_state(make):
    def interrupt(trainer):
        if trainer.iter == 6:
            raise KeyboardInterrupt

    trainer, checkpointer = make()
    trainer.register_hooks([ExceptionCheckpointer(checkpointer)])
    trainer.train(0, 2)
    trainer.register_hooks([CallbackHook(before_step=interrupt)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(2, 12)
    assert files(checkpointer) == []
