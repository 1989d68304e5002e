"""Trainers built around detectron2's DefaultTrainer and its inner trainer."""

import gc
import weakref

import pytest
import torch
from small_runs import mlp_config
from torch import nn

from hookline.engine import DefaultTrainer, PeriodicCheckpointer, PeriodicWriter, SimpleTrainer, TrainerBase, hooks
from hookline.engine.checkpoint import DetectionCheckpointer
from hookline.engine.defaults import default_argument_parser, default_setup, default_writers
from hookline.engine.solver import maybe_add_gradient_clipping
from hookline.engine.train_loop import AMPTrainer, HookBase


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return {"loss_a": self.fc(x).pow(2).mean(), "loss_b": self.fc(x).abs().mean()}


def loader():
    while True:
        yield torch.rand(4, 3)


@pytest.fixture
def cfg(tmp_path):
    return mlp_config(tmp_path)


@pytest.mark.parametrize("call", ["base", "super"])
def test_a_trainer_that_builds_its_own_inner_trainer_runs(cfg, call):
    class Ported(DefaultTrainer):
        def __init__(self, cfg):
            if call == "base":
                TrainerBase.__init__(self)
            else:
                super(DefaultTrainer, self).__init__()
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            self._trainer = SimpleTrainer(model, loader(), optimizer)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, optimizer=optimizer)
            self.start_iter = 0
            self.max_iter = cfg.SOLVER.MAX_ITER
            self.cfg = cfg
            self.register_hooks([hooks.IterationTimer(), hooks.LRScheduler()])

    trainer = Ported(cfg)
    before = trainer.model.fc.weight.clone()
    SimpleTrainer.train(trainer, trainer.start_iter, trainer.max_iter)
    assert not torch.equal(trainer.model.fc.weight, before)
    assert trainer.storage.latest()["loss_a"][1] == 4
    assert trainer.scheduler.last_epoch == 5


def test_a_run_step_that_calls_the_inner_trainers_runs(cfg):
    class Ported(DefaultTrainer):
        def run_step(self):
            self._trainer.iter = self.iter
            self._trainer.run_step()

    trainer = Ported(cfg)
    assert trainer.train().iteration == 5
    assert trainer._trainer.model is trainer.model


def test_the_inner_trainer_shares_its_parts_with_the_trainer(cfg):
    trainer = DefaultTrainer(cfg)
    trainer.model = Net()
    assert trainer._trainer.model is trainer.model
    assert isinstance(trainer._trainer, SimpleTrainer)
    del trainer._trainer._data_loader_iter
    trainer._trainer._data_loader_iter = iter(trainer.data_loader)
    trainer._trainer.iter = 3
    assert trainer.iter == 3


def test_the_data_iterator_may_be_replaced():
    class Ported(SimpleTrainer):
        def __init__(self, model, data_loader, optimizer):
            super().__init__(model, data_loader, optimizer)
            self._data_loader_iter = iter(self.data_loader)

        def run_step(self):
            data = next(self._data_loader_iter)
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
            self.optimizer.zero_grad()
            losses.backward()
            self._write_metrics(loss_dict, 0.0)
            self.optimizer.step()

    model = Net()
    trainer = Ported(model, loader(), torch.optim.SGD(model.parameters(), 0.1))
    assert trainer.train(0, 3).iteration == 3


def test_a_writer_may_use_the_file_handle(tmp_path):
    class Ported(hooks.JSONWriter):
        def write(self):
            super().write()
            self._file_handle.write("{}\n")
            self._file_handle.flush()

    model = Net()
    trainer = SimpleTrainer(model, loader(), torch.optim.SGD(model.parameters(), 0.1))
    trainer.register_hooks([PeriodicWriter([Ported(str(tmp_path / "m.json"))], period=5)])
    trainer.train(0, 5)
    assert (tmp_path / "m.json").read_text().count("{}\n") >= 1


def test_names_can_be_imported_from_where_detectron2_has_them():
    everything = (
        AMPTrainer,
        HookBase,
        PeriodicCheckpointer,
        default_argument_parser,
        default_setup,
        default_writers,
        maybe_add_gradient_clipping,
    )
    assert all(callable(thing) for thing in everything)


def test_after_backward_of_a_hook_on_a_default_trainer_is_called(cfg):
    seen = []

    class Gradients(HookBase):
        def after_backward(self):
            seen.append(all(p.grad is not None for p in self.trainer.model.parameters()))

    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Gradients()])
    trainer.train()
    assert seen == [True] * 5


def test_only_classes_with_an_init_of_their_own_get_the_support(cfg):
    class Plain(DefaultTrainer):
        pass

    class Ported(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)

    names = [cls.__name__ for cls in Plain.__mro__]
    assert names == ["Plain", "DefaultTrainer", "SimpleTrainer", "TrainerBase", "object"]
    assert [cls.__name__ for cls in Ported.__mro__][2] == "PortedTrainer"


def test_an_inner_trainer_may_be_set_from_outside(cfg):
    class Counting(SimpleTrainer):
        steps = 0

        def run_step(self):
            super().run_step()
            self.steps += 1

    trainer = DefaultTrainer(cfg)
    trainer._trainer = Counting(trainer.model, trainer.data_loader, trainer.optimizer)
    assert type(trainer).__name__ == "DefaultTrainer"
    assert isinstance(trainer, DefaultTrainer)
    trainer.train()
    assert trainer.steps == cfg.SOLVER.MAX_ITER


def test_bases_and_declarations_of_ported_classes(cfg):
    class Both(DefaultTrainer, SimpleTrainer):
        _trainer = None

        def __init__(self, cfg):
            TrainerBase.__init__(self)
            assert self.device is None
            assert self.precision is None
            model = Net()
            self._trainer = SimpleTrainer(model, loader(), torch.optim.SGD(model.parameters(), 0.1))
            self.max_iter, self.cfg = 4, cfg

    trainer = Both(cfg)
    SimpleTrainer.train(trainer, 0, 4)
    assert trainer._trainer.iter == trainer.iter == 4


def test_an_inner_trainer_does_not_keep_its_trainer_alive(cfg):
    class Ported(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            self._trainer = SimpleTrainer(self.model, self.data_loader, self.optimizer)
            self.register_hooks([hooks.EvalHook(2, lambda: self.evaluate())])  # a cycle, as detectron2's projects have

    trainer = weakref.ref(Ported(cfg))
    gc.collect()
    assert trainer() is None
