"""Code as it is written for detectron2's engine, with only the imports changed (see DESIGN.md)."""

import json
import logging
import math
import os
import time
from unittest import mock

import pytest
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from fvcore.common.checkpoint import PeriodicCheckpointer as FvcorePeriodicCheckpointer
from torch import nn

from hookline.config import CfgNode, configurable, get_cfg
from hookline.engine import AMPTrainer, DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, default_writers, hooks
from hookline.engine.checkpoint import Checkpointer, DetectionCheckpointer
from hookline.engine.data import build_train_loader
from hookline.engine.evaluation import DatasetEvaluator, DatasetEvaluators, inference_on_dataset, print_csv_format
from hookline.engine.modeling import META_ARCH_REGISTRY
from hookline.hooks import (
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    JSONWriter,
    get_event_storage,
    has_event_storage,
)


@META_ARCH_REGISTRY.register()
class _CompatModel(nn.Module):
    def __init__(self, cfg=None):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        if not self.training:
            return self.fc(x)
        return {"loss": (self.fc(x) - x).pow(2).sum()}


@META_ARCH_REGISTRY.register()
class _ConfigurableModel(_CompatModel):
    @configurable
    def __init__(self, *, base_lr):
        super().__init__()
        self.base_lr = base_lr

    @classmethod
    def from_config(cls, cfg):
        return {"base_lr": cfg.SOLVER.BASE_LR}


def endless(device="cpu"):
    while True:
        yield torch.rand(3, 3, device=device)


def simple_trainer(seed=0):
    torch.manual_seed(seed)
    model = _CompatModel()
    return SimpleTrainer(model, endless(), torch.optim.SGD(model.parameters(), 0.1))


# ---------------------------------------------------------------------------- trainers


def test_a_simple_trainer_runs_on_an_endless_generator():
    trainer = simple_trainer()
    trainer.train(0, 10)
    assert trainer.iter == 10
    assert trainer.storage.history("total_loss").latest() == trainer.storage.history("loss").latest()


def test_the_data_loader_can_be_reset_between_and_during_runs():
    trainer = simple_trainer()
    trainer.train(0, 3)
    trainer.reset_data_loader(lambda: endless())
    trainer.train(0, 3)

    class Reset(HookBase):
        def after_step(self):
            if self.trainer.iter == 1:
                self.trainer.reset_data_loader(lambda: iter([torch.ones(1, 3)] * 3))

    trainer.register_hooks([Reset()])
    trainer.train(0, 4)
    assert trainer.iter == 4


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

    class Order(HookBase):
        def __init__(self):
            self.seen = []

        def before_train(self):
            self.seen.append(("before_train", self.trainer.iter))

        def before_step(self):
            self.seen.append(("before_step", self.trainer.iter, self.trainer.storage.iter))

        def after_step(self):
            self.seen.append(("after_step", self.trainer.iter))

        def after_train(self):
            self.seen.append(("after_train", self.trainer.iter))

    model, order = _CompatModel(), Order()
    trainer = Mine(model, endless(), torch.optim.SGD(model.parameters(), 0.1))
    trainer.register_hooks([order, None])
    trainer.train(1, 3)
    assert order.seen == [
        ("before_train", 1),
        ("before_step", 1, 1),
        ("after_step", 1),
        ("before_step", 2, 2),
        ("after_step", 2),
        ("after_train", 3),
    ]
    assert len(trainer.storage.history("my_loss")) == 2
    assert not has_event_storage()


def test_a_subclass_writes_its_step_with_the_trainers_parts():
    class Clipped(SimpleTrainer):
        def run_step(self):
            assert self.model.training
            start = time.perf_counter()
            data = next(self._data_loader_iter)
            data_time = time.perf_counter() - start
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
            self.optimizer.zero_grad()
            losses.backward()
            self.after_backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._write_metrics(loss_dict, data_time)
            self._write_metrics(loss_dict, data_time, prefix="again_")
            self.optimizer.step()

    class Backward(HookBase):
        times = 0

        def after_backward(self):
            self.times += 1

    model, backward = _CompatModel(), Backward()
    trainer = Clipped(model, endless(), torch.optim.SGD(model.parameters(), 0.1))
    trainer.register_hooks([backward])
    trainer.train(0, 5)
    assert backward.times == 5
    assert {"loss", "total_loss", "data_time", "again_loss", "again_total_loss"} <= set(trainer.storage.histories())


def test_amp_trainer_trains_in_bfloat16():
    seen = []

    class Net(_CompatModel):
        def forward(self, x):
            seen.append(self.fc(x).dtype)
            return super().forward(x)

    torch.manual_seed(0)
    model = Net()
    before = model.fc.weight.detach().clone()
    trainer = AMPTrainer(model, endless(), torch.optim.SGD(model.parameters(), 0.01), precision=torch.bfloat16)
    assert trainer.grad_scaler is None
    trainer.train(0, 10)
    assert set(seen) == {torch.bfloat16}
    assert model.fc.weight.dtype == torch.float32
    assert not torch.equal(model.fc.weight, before)


@pytest.mark.parametrize("period", [1, 4])
def test_losses_are_gathered_every_so_many_iterations(period):
    model = _CompatModel()
    trainer = SimpleTrainer(model, endless(), torch.optim.SGD(model.parameters(), 0.1), gather_metric_period=period)
    trainer.train(0, 12)
    assert [i for _, i in trainer.storage.history("loss").values()] == list(range(period - 1, 12, period))


def test_gradients_can_be_read_after_the_step_if_they_are_cleared_before_it():
    class Norm(HookBase):
        norms = ()

        def after_step(self):
            self.norms = (*self.norms, self.trainer.model.fc.weight.grad.norm().item())

    model, norm = _CompatModel(), Norm()
    trainer = SimpleTrainer(model, endless(), torch.optim.SGD(model.parameters(), 0.1), zero_grad_before_forward=True)
    trainer.register_hooks([norm])
    trainer.train(0, 3)
    assert len(norm.norms) == 3
    assert min(norm.norms) > 0


# ---------------------------------------------------------------------------- writers


def test_writer_hooks_write_rows_and_lines(tmp_path):
    trainer = simple_trainer()
    max_iter = 50
    json_file = str(tmp_path / "metrics.json")
    printer = CommonMetricPrinter(max_iter)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    printer.logger.addHandler(handler)
    printer.logger.setLevel(logging.INFO)
    try:
        trainer.register_hooks(
            [hooks.EvalHook(0, lambda: {"metric": 100}), hooks.PeriodicWriter([printer, JSONWriter(json_file)])]
        )
        trainer.train(0, max_iter)
    finally:
        printer.logger.removeHandler(handler)
        printer.logger.setLevel(logging.NOTSET)
    with open(json_file) as file:
        rows = [json.loads(line) for line in file]
    assert [row["iteration"] for row in rows] == [19, 39, 49, 50]
    assert rows[-1]["metric"] == 100
    assert all("metric" not in row and "total_loss" in row for row in rows[:-1])
    assert len(lines) == 3
    assert "eta: 0:00:00" in lines[-1]


def test_default_writers_write_what_is_put(tmp_path):
    writers = default_writers(str(tmp_path), 3)
    with EventStorage(0) as storage:
        for _ in range(3):
            storage.put_scalars(total_loss=1.0, lr=0.1)
            storage.step()
        storage.iter = 2
        for writer in writers:
            writer.write()
            writer.close()
    assert json.loads((tmp_path / "metrics.json").read_text().splitlines()[-1])["total_loss"] == 1.0


def test_a_writer_of_ones_own_reads_the_latest_metrics():
    class Mine(EventWriter):
        def __init__(self, window_size=20):
            self._window_size, self._last_write, self.rows = window_size, -1, []

        def write(self):
            storage = get_event_storage()
            new_last_write = self._last_write
            for name, (value, iteration) in storage.latest_with_smoothing_hint(self._window_size).items():
                if iteration > self._last_write:
                    self.rows.append((iteration, name, value))
                    new_last_write = max(new_last_write, iteration)
            self._last_write = new_last_write

    class Steps(TrainerBase):
        def run_step(self):
            self.storage.put_scalar("number", float(self.iter))

    writer, trainer = Mine(), Steps()
    trainer.register_hooks([hooks.PeriodicWriter([writer], period=10)])
    trainer.train(0, 20)
    assert writer.rows == [(9, "number", 4.5), (19, "number", 9.5)]


# ---------------------------------------------------------------------------- hooks


@pytest.mark.parametrize(("max_iter", "period", "calls"), [(30, 15, 2), (31, 15, 3), (20, 0, 1)])
def test_eval_hook_evaluates_so_often(max_iter, period, calls):
    evaluate = mock.Mock(return_value={"metric": 3.0})
    trainer = simple_trainer()
    trainer.register_hooks([hooks.EvalHook(period, evaluate)])
    trainer.train(0, max_iter)
    assert evaluate.call_count == calls


@pytest.mark.parametrize(
    ("mode", "metrics", "saves"),
    [
        ("max", [0.3, 0.4, 0.35, 0.5], 3),
        ("min", [1.0, 0.8, 0.9, 0.9], 2),
        ("min", [math.nan, 0.8, 0.9, 0.9], 1),
    ],
)
def test_best_checkpointer_saves_so_often(tmp_path, mode, metrics, saves):
    trainer = simple_trainer()
    checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)
    evaluate = mock.Mock(side_effect=[{"metric": metric} for metric in metrics])
    trainer.register_hooks(
        [hooks.EvalHook(10, evaluate), hooks.BestCheckpointer(10, checkpointer, "metric", mode=mode)]
    )
    with mock.patch.object(checkpointer, "save") as save:
        trainer.train(0, 40)
    assert save.call_count == saves


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
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "validation_loss" in row] == [4, 9]


def test_a_callback_hook_is_made_of_functions():
    seen = []
    trainer = simple_trainer()
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda t: seen.append(t.iter), before_train=None)])
    trainer.train(0, 3)
    assert seen == [0, 1, 2]


# ---------------------------------------------------------------------------- checkpoints


def test_checkpoint_and_schedule_are_resumed(tmp_path):
    def make():
        trainer = simple_trainer()
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3)
        checkpointer = DetectionCheckpointer(trainer.model, str(tmp_path), opt=trainer.optimizer, trainer=trainer)
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


def test_fvcores_own_checkpointer_saves_and_resumes_a_trainer(tmp_path):
    trainer = simple_trainer()
    checkpointer = FvcoreCheckpointer(trainer.model, str(tmp_path), trainer=trainer)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 5, max_to_keep=1)])
    trainer.train(0, 12)
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_0000009.pth", "model_final.pth"]

    again = simple_trainer(seed=1)
    checkpointer = FvcoreCheckpointer(again.model, str(tmp_path), trainer=again)
    assert checkpointer.resume_or_load("", resume=True)["iteration"] == 11
    assert again.iter == 11
    assert torch.equal(again.model.fc.weight, trainer.model.fc.weight)


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


# ---------------------------------------------------------------------------- the default trainer


def compat_cfg(tmp_path, name="_CompatModel"):
    cfg = get_cfg()
    cfg.MODEL.NAME = name
    cfg.MODEL.DEVICE = "cpu"
    cfg.OUTPUT_DIR = str(tmp_path)
    cfg.SOLVER.MAX_ITER = 10
    cfg.SOLVER.WARMUP_ITERS = 0
    return cfg


class CompatTrainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        return endless()


def test_the_default_trainer_builds_a_registered_model_that_takes_cfg(tmp_path):
    cfg = compat_cfg(tmp_path)
    trainer = CompatTrainer(cfg)
    assert isinstance(trainer.model, _CompatModel)
    assert isinstance(trainer.cfg, CfgNode)
    scheduler = trainer.scheduler
    trainer.resume_or_load(resume=False)
    trainer.train()
    assert trainer.iter == trainer.max_iter == 10
    assert scheduler.last_epoch == 10
    assert {"metrics.json", "model_final.pth", "last_checkpoint"} <= set(os.listdir(tmp_path))
    assert trainer._trainer.model is trainer.model


def test_the_default_trainer_builds_a_configurable_model(tmp_path):
    cfg = compat_cfg(tmp_path, "_ConfigurableModel")
    cfg.SOLVER.BASE_LR = 0.25
    assert CompatTrainer(cfg).model.base_lr == 0.25


def test_a_project_overrides_loader_evaluator_and_hooks(tmp_path):
    class Distance(DatasetEvaluator):
        def __init__(self, name):
            self._name = name

        def reset(self):
            self._sum, self._count = 0.0, 0

        def process(self, inputs, outputs):
            self._sum += (outputs - inputs).abs().sum().item()
            self._count += len(inputs)

        def evaluate(self):
            return {self._name: {"distance": self._sum / self._count}}

    class LogRate(HookBase):
        rates = ()

        def after_step(self):
            self.rates = (*self.rates, self.trainer.optimizer.param_groups[0]["lr"])

    class Trainer(CompatTrainer):
        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            return [torch.ones(2, 3), torch.zeros(2, 3)]

        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return DatasetEvaluators([Distance(dataset_name)])

        def build_hooks(self):
            ret = super().build_hooks()
            ret.insert(-1, LogRate())
            return ret

    cfg = compat_cfg(tmp_path)
    cfg.DATASETS.TEST = ("my_set",)
    cfg.TEST.EVAL_PERIOD = 5
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "my_set/distance" in row] == [4, 10]
    (rate,) = [hook for hook in trainer._hooks if isinstance(hook, LogRate)]
    assert len(rate.rates) == 10
    results = Trainer.test(cfg, trainer.model)
    assert results["my_set"]["distance"] == rows[-1]["my_set/distance"]
    print_csv_format(results)


def test_a_project_evaluates_a_model_by_itself():
    class Count(DatasetEvaluator):
        def reset(self):
            self.batches = 0

        def process(self, inputs, outputs):
            assert not outputs.requires_grad
            self.batches += 1

        def evaluate(self):
            return {"batches": self.batches}

    model = _CompatModel()
    assert inference_on_dataset(model, [torch.ones(2, 3)] * 4, Count()) == {"batches": 4}
    assert model.training


def test_the_training_loader_is_built_from_a_config(tmp_path):
    cfg = compat_cfg(tmp_path)
    cfg.DATASETS.TRAIN = ("synthetic",)
    cfg.DATALOADER.BATCH_SIZE = 32
    x, y = next(iter(build_train_loader(cfg)))
    assert (x.shape, y.shape) == ((32, 8), (32,))


def test_a_default_trainer_is_resumed(tmp_path):
    cfg = compat_cfg(tmp_path)
    CompatTrainer(cfg).train()
    cfg = compat_cfg(tmp_path)
    cfg.SOLVER.MAX_ITER = 15
    trainer = CompatTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 10
    trainer.train()
    assert trainer.iter == 15
