"""Code as it is written for detectron2's engine, with only the imports changed (see docs/porting/detectron2.md)."""

import contextlib
import os
import weakref

import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from fvcore.common.checkpoint import PeriodicCheckpointer as FvcorePeriodicCheckpointer
from metric_runs import iterations_of, rows_of
from small_runs import mlp_config, net_trainer, same

from hookline.engine import DefaultTrainer, HookBase, hooks
from hookline.engine.checkpoint import Checkpointer, DetectionCheckpointer
from hookline.hooks import JSONWriter


def test_a_hook_computes_a_validation_loss_and_stands_before_the_writer(tmp_path):
    class ValidationLoss(HookBase):
        def __init__(self, period, data):
            self._period, self._data = period, data

        def after_step(self):
            next_iter = self.trainer.iter + 1
            if next_iter % self._period == 0 or next_iter == self.trainer.max_iter:
                with torch.no_grad():
                    loss = sum(self.trainer.model(self._data).values())
                self.trainer.storage.put_scalar("validation_loss", loss, smoothing_hint=False)

    path = tmp_path / "metrics.json"
    trainer = net_trainer(hooks=[hooks.IterationTimer(), hooks.PeriodicWriter([JSONWriter(str(path))], period=5)])
    trainer.register_hooks([ValidationLoss(5, torch.rand(3, 3))])
    trainer._hooks = trainer._hooks[:-2] + trainer._hooks[-2:][::-1]
    trainer.train(0, 10)
    assert [type(hook).__name__ for hook in trainer._hooks] == ["IterationTimer", "ValidationLoss", "PeriodicWriter"]
    assert [row["iteration"] for row in rows_of(path) if "validation_loss" in row] == [4, 9]


def test_a_writer_hook_with_its_own_schedule_keeps_all_rows(tmp_path):
    class Writes(hooks.PeriodicWriter):
        def after_step(self):
            if (self.trainer.iter + 1) % 5 == 0:
                for writer in self._writers:
                    writer.write()

    path = tmp_path / "metrics.json"
    for start in (0, 10):
        net_trainer(hooks=[Writes([JSONWriter(str(path))])]).train(start, start + 10)
    assert iterations_of(path) == [4, 9, 14, 19]


@pytest.mark.parametrize("checkpointer_type", [FvcoreCheckpointer, DetectionCheckpointer])
def test_checkpoint_and_schedule_are_resumed(tmp_path, checkpointer_type):
    def make():
        trainer = net_trainer()
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3)
        checkpointer = checkpointer_type(trainer.model, str(tmp_path), opt=trainer.optimizer, trainer=trainer)
        trainer.register_hooks([hooks.LRScheduler(scheduler=scheduler), hooks.PeriodicCheckpointer(checkpointer, 10)])
        return trainer, scheduler, checkpointer

    trainer, scheduler, checkpointer = make()
    trainer.train(0, 12)
    assert scheduler.last_epoch == 12
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.1 * 0.1**4)
    del trainer, checkpointer

    trainer, scheduler, checkpointer = make()
    checkpointer.resume_or_load("non_exist.pth")
    assert trainer.iter == 11  # the last finished iteration: go on with 12
    assert scheduler.last_epoch == 12
    assert trainer.optimizer.param_groups[0]["lr"] == rate
    trainer.train(trainer.iter + 1, 15)
    assert scheduler.last_epoch == 15


@pytest.mark.parametrize("checkpointer_type", [FvcoreCheckpointer, Checkpointer])
def test_fvcores_own_periodic_checkpointer_steps_in_a_hook(tmp_path, checkpointer_type):
    class Save(HookBase):
        def __init__(self, periodic):
            self.periodic = periodic

        def after_step(self):
            self.periodic.step(self.trainer.iter)

    trainer = net_trainer()
    checkpointer = checkpointer_type(trainer.model, str(tmp_path), trainer=trainer)
    trainer.register_hooks([Save(FvcorePeriodicCheckpointer(checkpointer, 4, max_iter=10, max_to_keep=2))])
    trainer.train(0, 10)
    assert {"model_0000003.pth", "model_0000007.pth", "model_final.pth"} <= set(os.listdir(tmp_path))
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert saved["iteration"] == saved["trainer"]["iteration"] == 9


def test_fvcores_checkpointer_saves_the_best(tmp_path):
    trainer, results = net_trainer(), iter([0.3, 0.4, 0.35, 0.5])
    checkpointer = FvcoreCheckpointer(trainer.model, str(tmp_path), trainer=trainer)
    best = hooks.BestCheckpointer(10, checkpointer, "metric", load_at_end=True)
    periodic = hooks.PeriodicCheckpointer(checkpointer, 5, max_to_keep=1)
    trainer.register_hooks([hooks.EvalHook(10, lambda: {"metric": next(results)}), best, periodic])
    trainer.train(0, 40)
    files = {name for name in os.listdir(tmp_path) if name.startswith("model_")}
    kept = {"model_best.pth", f"model_best_{best.best_iter:07d}.pth", "model_0000039.pth", "model_final.pth"}
    assert (files, (tmp_path / "last_checkpoint").read_text()) == (kept, "model_final.pth")
    assert same(trainer.model, torch.load(tmp_path / "model_best.pth", weights_only=True)["model"])


@pytest.mark.parametrize("named", [False, True])
def test_a_default_trainer_resumes_and_evaluates_with_fvcores_checkpointer(tmp_path, named):
    class Trainer(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.checkpointer = FvcoreCheckpointer(self.model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
            self.remove_hook(hooks.PeriodicCheckpointer)
            self.register_hooks([hooks.PeriodicCheckpointer(self.checkpointer, 2)])

    def train(resume, fails=False):
        cfg = mlp_config(tmp_path / ("whole" if resume is None else "run"))
        cfg.SEED = 1
        trainer = Trainer(cfg)
        if fails:
            trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: 1 / (trainer.iter - 3))])
        trainer.resume_or_load(resume=resume or False)
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            trainer.train()
        return trainer

    whole = train(None)
    train(False, fails=True)
    resumed = train(str(tmp_path / "run/model_0000001.pth") if named else True)
    assert resumed.start_iter == 2
    assert same(whole.model, resumed.model)


class Upload(hooks.PeriodicCheckpointer):
    def after_train(self):
        pass


class Plain(DetectionCheckpointer):
    def save(self, name, **kwargs):
        torch.save({"model": self.model.state_dict(), **kwargs}, f"{self.save_dir}/{name}.pth")


@pytest.mark.parametrize(
    ("hook", "checkpointer"), [(Upload, DetectionCheckpointer), (hooks.PeriodicCheckpointer, Plain)]
)
def test_checkpoint_hooks_and_checkpointers_with_methods_of_their_own_save_the_end(tmp_path, hook, checkpointer):
    trainer = net_trainer()
    trainer.register_hooks([hook(checkpointer(trainer.model, str(tmp_path)), 4)])
    trainer.train(0, 10)
    assert {"model_0000003.pth", "model_0000007.pth", "model_final.pth"} <= set(os.listdir(tmp_path))
