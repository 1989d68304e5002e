"""Code as it is written for detectron2's engine, with only the imports changed (see docs/porting/detectron2.md)."""

import contextlib
import json
import logging
import os
import weakref

import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from fvcore.common.checkpoint import PeriodicCheckpointer as FvcorePeriodicCheckpointer
from small_runs import mlp_config
from torch import nn

from hookline.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, hooks
from hookline.engine.checkpoint import Checkpointer, DetectionCheckpointer
from hookline.hooks import CommonMetricPrinter, JSONWriter, get_event_storage, has_event_storage


class _CompatModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        if not self.training:
            return self.fc(x)
        return {"loss": (self.fc(x) - x).pow(2).sum()}


def endless():
    while True:
        yield torch.rand(3, 3)


def simple_trainer():
    torch.manual_seed(0)
    model = _CompatModel()
    return SimpleTrainer(model, endless(), torch.optim.SGD(model.parameters(), 0.1))


def rows_in(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


# ---------------------------------------------------------------------------- trainers


def test_a_subclass_of_the_base_defines_its_own_step():
    class Mine(TrainerBase):
        def __init__(self, model, data, optimizer):
            super().__init__()
            self.model, self.data, self.optimizer = model, iter(data), optimizer

        def run_step(self):
            assert self.model.training
            loss = sum(self.model(next(self.data)).values())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            get_event_storage().put_scalar("my_loss", loss)

    model = _CompatModel()
    trainer = Mine(model, endless(), torch.optim.SGD(model.parameters(), 0.1))
    trainer.register_hooks([None])
    trainer.train(1, 3)
    assert len(trainer.storage.history("my_loss")) == 2
    assert not has_event_storage()


def test_losses_are_gathered_at_a_period_and_gradients_stay_until_the_next_step():
    norms = []
    model = _CompatModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = SimpleTrainer(model, endless(), optimizer, gather_metric_period=4, zero_grad_before_forward=True)
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda t: norms.append(model.fc.weight.grad.norm().item()))])
    trainer.train(0, 12)
    assert [i for _, i in trainer.storage.history("loss").values()] == [3, 7, 11]
    assert min(norms) > 0


# ---------------------------------------------------------------------------- writers


def test_writer_hooks_write_rows_and_lines(tmp_path, caplog):
    trainer, printer = simple_trainer(), CommonMetricPrinter(50)
    writers = [printer, JSONWriter(str(tmp_path / "metrics.json"))]
    trainer.register_hooks([hooks.EvalHook(0, lambda: {"metric": 100}), hooks.PeriodicWriter(writers)])
    with caplog.at_level(logging.INFO, printer.logger.name):
        trainer.train(0, 50)
    lines = [record.getMessage() for record in caplog.records if record.name == printer.logger.name]
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows] == [19, 39, 49, 50]
    assert rows[-1]["metric"] == 100
    assert all("metric" not in row and "total_loss" in row for row in rows[:-1])
    assert len(lines) == 3
    assert "eta: 0:00:00" in lines[-1]


# ---------------------------------------------------------------------------- hooks


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

    trainer = simple_trainer()
    trainer.register_hooks(
        [hooks.IterationTimer(), hooks.PeriodicWriter([JSONWriter(str(tmp_path / "metrics.json"))], period=5)]
    )
    trainer.register_hooks([ValidationLoss(5, torch.rand(3, 3))])
    trainer._hooks = trainer._hooks[:-2] + trainer._hooks[-2:][::-1]
    trainer.train(0, 10)
    assert [type(hook).__name__ for hook in trainer._hooks] == ["IterationTimer", "ValidationLoss", "PeriodicWriter"]
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows if "validation_loss" in row] == [4, 9]


# ---------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("checkpointer_type", [FvcoreCheckpointer, DetectionCheckpointer])
def test_checkpoint_and_schedule_are_resumed(tmp_path, checkpointer_type):
    def make():
        trainer = simple_trainer()
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

    trainer = simple_trainer()
    checkpointer = checkpointer_type(trainer.model, str(tmp_path), trainer=trainer)
    trainer.register_hooks([Save(FvcorePeriodicCheckpointer(checkpointer, 4, max_iter=10, max_to_keep=2))])
    trainer.train(0, 10)
    assert {"model_0000003.pth", "model_0000007.pth", "model_final.pth"} <= set(os.listdir(tmp_path))
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert saved["iteration"] == saved["trainer"]["iteration"] == 9


@pytest.mark.parametrize(
    ("mode", "values", "calls"), [("max", [0.3, 0.4, 0.35, 0.5], 3), ("min", [float("nan"), 0.8, 0.9, 0.9], 1)]
)
def test_fvcores_checkpointer_saves_the_best(tmp_path, monkeypatch, mode, values, calls):
    trainer, results, names = simple_trainer(), iter(values), []
    checkpointer = FvcoreCheckpointer(trainer.model, str(tmp_path), trainer=trainer)
    save = checkpointer.save
    monkeypatch.setattr(checkpointer, "save", lambda name, **extra: [names.append(name), save(name, **extra)])
    best = hooks.BestCheckpointer(10, checkpointer, "metric", mode=mode, load_at_end=True)
    periodic = hooks.PeriodicCheckpointer(checkpointer, 5, max_to_keep=1)
    trainer.register_hooks([hooks.EvalHook(10, lambda: {"metric": next(results)}), best, periodic])
    trainer.train(0, 40)
    assert sum(name.startswith("model_best") for name in names) == calls
    files = {name for name in os.listdir(tmp_path) if name.startswith("model_")}
    kept = {"model_best.pth", f"model_best_{best.best_iter:07d}.pth", "model_0000039.pth", "model_final.pth"}
    assert (files, (tmp_path / "last_checkpoint").read_text()) == (kept, "model_final.pth")
    best_weights = torch.load(tmp_path / "model_best.pth", weights_only=True)["model"]
    assert torch.equal(trainer.model.fc.weight, best_weights["fc.weight"])


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
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


# ---------------------------------------------------------------------------- subclasses that do without super()


def test_a_writer_hook_with_its_own_schedule_keeps_all_rows(tmp_path):
    class Writes(hooks.PeriodicWriter):
        def after_step(self):
            if (self.trainer.iter + 1) % 5 == 0:
                for writer in self._writers:
                    writer.write()

    for start in (0, 10):
        trainer = simple_trainer()
        trainer.register_hooks([Writes([JSONWriter(str(tmp_path / "metrics.json"))])])
        trainer.train(start, start + 10)
    assert [row["iteration"] for row in rows_in(tmp_path)] == [4, 9, 14, 19]


def test_checkpoint_hooks_and_checkpointers_with_methods_of_their_own_save_the_end(tmp_path):
    class Upload(hooks.PeriodicCheckpointer):
        def after_train(self):
            pass

    class Plain(DetectionCheckpointer):
        def save(self, name, **kwargs):
            torch.save({"model": self.model.state_dict(), **kwargs}, f"{self.save_dir}/{name}.pth")

    for kind, checkpointer in ((Upload, DetectionCheckpointer), (hooks.PeriodicCheckpointer, Plain)):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        trainer = simple_trainer()
        trainer.register_hooks([kind(checkpointer(trainer.model, str(folder)), 4)])
        trainer.train(0, 10)
        assert {"model_0000003.pth", "model_0000007.pth", "model_final.pth"} <= set(os.listdir(folder))


def test_a_hook_that_calls_train_of_its_own_trainer_is_an_error():
    trainer = simple_trainer()
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: trainer.train(0, 3))])
    with pytest.raises(RuntimeError, match=r"train\(\) was called by its own hook"):
        trainer.train(0, 3)


def test_a_model_left_in_eval_mode_is_an_error():
    trainer = simple_trainer()
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: trainer.model.eval() and None)])
    with pytest.raises(AssertionError, match="eval mode"):
        trainer.train(0, 3)
    assert trainer.iter == 1


def test_a_model_that_was_evaluated_between_two_calls_trains():
    trainer, modes = simple_trainer(), []
    note = hooks.CallbackHook(before_step=lambda t: modes.extend(module.training for module in t.model.modules()))
    trainer.register_hooks([note])
    trainer.train(0, 1)
    trainer.model.eval()
    trainer.train(1, 2)
    next(trainer.model.children()).eval()
    trainer.train(2, 3)
    assert sorted(modes) == [False] + [True] * (len(modes) - 1)


def test_a_trainer_may_delete_its_loader_before_it_sets_another():
    trainer = simple_trainer()
    loader = trainer.data_loader
    del trainer.data_loader
    trainer.data_loader = loader
    trainer.train(0, 2)
    assert trainer.iter == 2
