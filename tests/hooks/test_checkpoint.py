import logging
import math
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from torch import nn

from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    HookBase,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.fc(x).pow(2).mean()}


@pytest.fixture
def make(tmp_path):
    def make(folder="run", checkpointer_type=Checkpointer):
        torch.manual_seed(0)
        model = Net()
        trainer = SimpleTrainer(model, [torch.ones(1, 2)] * 4, torch.optim.SGD(model.parameters(), lr=0.1))
        (tmp_path / folder).mkdir(exist_ok=True)
        return trainer, checkpointer_type(model, str(tmp_path / folder), trainer=trainer)

    return make


@pytest.fixture
def log(caplog, monkeypatch):
    logger = logging.getLogger("hookline")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.DEBUG, "hookline")
    return caplog


def files(checkpointer):
    from pathlib import Path

    return sorted(path.name for path in Path(checkpointer.save_dir).iterdir())


def saved(checkpointer, name):
    return torch.load(f"{checkpointer.save_dir}/{name}.pth", weights_only=True)


def last(checkpointer):
    from pathlib import Path

    return Path(checkpointer.save_dir, "last_checkpoint").read_text()


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


def test_the_prefix_of_the_files_can_be_chosen(make):
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
def test_what_is_saved_is_the_state_all_hooks_are_in_whatever_their_order(make, checkpointer_first):
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


def test_a_moved_run_still_removes_its_own_old_checkpoints(make, tmp_path):
    trainer, checkpointer = make("old")
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    trainer.train(0, 4)
    (tmp_path / "old").rename(tmp_path / "new")
    trainer, checkpointer = make("new")
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.iter + 1, 8)
    assert files(checkpointer) == ["last_checkpoint", "model_0000007.pth", "model_final.pth"]


def test_an_old_checkpoint_goes_only_when_the_new_one_is_saved(make, monkeypatch):
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


def test_keeping_no_checkpoint_is_an_error(make):
    with pytest.raises(ValueError, match="at least 1"):
        PeriodicCheckpointer(make()[1], 2, max_to_keep=0)


def test_hooks_hear_of_each_save(make):
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


# ---------------------------------------------------------------------------- BestCheckpointer


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


def test_no_finite_value_is_no_best(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [math.nan] * 4))
    trainer.train(0, 8)
    assert "model_best.pth" not in files(checkpointer)


@pytest.mark.parametrize("checkpointer_type", [Checkpointer, FvcoreCheckpointer])
def test_a_resume_goes_on_from_the_last_and_not_from_the_best_checkpoint(make, checkpointer_type):
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


def test_the_file_of_the_best_can_be_named(make):
    trainer, checkpointer = make()
    trainer.register_hooks(best_hooks(checkpointer, [1.0], period=0, file_prefix="top"))
    trainer.train(0, 2)
    assert "top.pth" in files(checkpointer)


def test_a_metric_put_by_any_hook_is_looked_at_every_period(make):
    trainer, checkpointer = make()
    put = CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("score", trainer.iter, False))
    hook = BestCheckpointer(4, checkpointer, "score")
    trainer.register_hooks([put, hook])
    trainer.train(0, 6)
    assert saved(checkpointer, "model_best")["iteration"] == 5
    assert hook.best_metric == 5.0


def test_a_metric_that_nobody_puts_is_warned_of_once_with_the_nearest(make, log):
    trainer, checkpointer = make()
    trainer.register_hooks([EvalHook(1, lambda: {"accuracy": 1.0}), BestCheckpointer(1, checkpointer, "acuracy")])
    trainer.train(0, 4)
    warnings = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'acuracy'" in warnings[0]
    assert "did you mean 'accuracy'" in warnings[0]


def test_a_mode_other_than_max_or_min_is_an_error(make):
    with pytest.raises(ValueError, match="not 'maximum'"):
        BestCheckpointer(1, make()[1], "a", "maximum")
