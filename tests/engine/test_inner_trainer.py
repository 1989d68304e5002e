"""The usual shapes of trainers written for detectron2. Each is trained, saved, resumed and evaluated."""

import itertools
import os
import time
import weakref

import pytest
import torch
from ranks import rows
from small_runs import Collect, batches
from torch import nn

from hookline.config import get_cfg
from hookline.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, comm, hooks
from hookline.engine.checkpoint import DetectionCheckpointer
from hookline.hooks import CallbackHook, EventStorage, get_event_storage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, branch=""):
        if not self.training:
            return self.fc(x)
        losses = {"loss_a": self.fc(x).pow(2).mean(), "loss_b": self.fc(x).abs().mean()}
        return (losses, branch) if branch else losses


class Parts:
    """What a project overrides to bring its own model, data and evaluator."""

    @classmethod
    def build_model(cls, cfg):
        return Net()

    @classmethod
    def build_train_loader(cls, cfg):
        return itertools.cycle(batches(size=4))

    @classmethod
    def build_test_loader(cls, cfg, dataset_name):
        return [torch.ones(4, 3)] * 2

    @classmethod
    def build_evaluator(cls, cfg, dataset_name):
        return Collect("count")


class WithoutInit(Parts, DefaultTrainer):
    """Builds its parts itself. Subclasses say where they go."""

    saves_trainer = True

    def __init__(self, cfg):
        self.init()
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        self.put(model, self.build_train_loader(cfg), optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        saved = {"trainer": weakref.proxy(self)}
        if not self.saves_trainer:
            saved = {"optimizer": optimizer, "scheduler": self.scheduler}
        self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, **saved)
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())

    def init(self):
        super(DefaultTrainer, self).__init__()

    def put(self, model, data_loader, optimizer):
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer


class WithoutAnyInit(WithoutInit):
    def init(self):
        self._hooks = []


class Inner(WithoutInit):
    def put(self, model, data_loader, optimizer):
        self._trainer = AMPTrainer(model, data_loader, optimizer, precision=torch.bfloat16)


class Accumulating(SimpleTrainer):
    """Two batches for each update; counts them in its state."""

    batches_read = 0

    def run_step(self):
        assert self.model.training
        start = time.perf_counter()
        self.optimizer.zero_grad()
        for _ in range(2):
            losses = self.model(next(self._data_loader_iter))
            (sum(losses.values()) / 2).backward()
            self.after_backward()
            self.batches_read += 1
        self._write_metrics(losses, time.perf_counter() - start)
        self.storage.put_scalar("batches_read", self.batches_read, smoothing_hint=False)
        self.optimizer.step()

    def state_dict(self):
        return {**super().state_dict(), "batches_read": self.batches_read}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.batches_read = state_dict["batches_read"]


class InnerReplaced(Parts, DefaultTrainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self._trainer = Accumulating(model=self.model, data_loader=self.data_loader, optimizer=self.optimizer)


class OuterStep(Parts, DefaultTrainer):
    """Calls the inner trainer's step, as detectron2's DefaultTrainer does."""

    def run_step(self):
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def state_dict(self):
        return {**super().state_dict(), "_trainer": self._trainer.state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._trainer.load_state_dict(state_dict["_trainer"])


class Raw(TrainerBase):
    """A step without a SimpleTrainer."""

    def __init__(self, model, data_loader, optimizer):
        self._hooks = []
        self.model, self.optimizer = model, optimizer
        self._data_loader_iter = iter(data_loader)

    def run_step(self):
        losses = self.model(next(self._data_loader_iter))
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        get_event_storage().put_scalars(**{name: loss.item() for name, loss in losses.items()})
        self.optimizer.step()


class InnerRaw(WithoutInit):
    def put(self, model, data_loader, optimizer):
        self._trainer = Raw(model, data_loader, optimizer)


class OwnLoop(WithoutInit):
    """Has its own loop, step, metrics and hooks; the checkpoints hold no state of the trainer."""

    saves_trainer = False

    def put(self, model, data_loader, optimizer):
        self._trainer = SimpleTrainer(model, data_loader, optimizer)

    def train(self):
        self.train_loop(self.start_iter, self.max_iter)
        return self._last_eval_results

    def train_loop(self, start_iter, max_iter):
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.run_step()
                    self.after_step()
            finally:
                self.after_train()

    def run_step(self):
        self._trainer.iter = self.iter
        assert self.model.training
        start = time.perf_counter()
        data = next(self._trainer._data_loader_iter)
        record, _ = self.model(data, branch="supervised")
        losses = sum(record.values())
        record["data_time"] = time.perf_counter() - start
        self._write_metrics(record)
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()

    def _write_metrics(self, metrics_dict):
        metrics = {name: float(torch.as_tensor(value).detach()) for name, value in metrics_dict.items()}
        (metrics,) = comm.gather(metrics)
        self.storage.put_scalar("data_time", metrics.pop("data_time"))
        self.storage.put_scalars(total_loss=sum(metrics.values()), **metrics)

    def build_hooks(self):
        def evaluate():
            self._last_eval_results = self.test(self.cfg, self.model)
            return self._last_eval_results

        return [
            hooks.IterationTimer(),
            hooks.LRScheduler(self.optimizer, self.scheduler),
            None,
            hooks.PeriodicCheckpointer(self.checkpointer, self.cfg.SOLVER.CHECKPOINT_PERIOD),
            hooks.EvalHook(self.cfg.TEST.EVAL_PERIOD, evaluate),
            hooks.PeriodicWriter(self.build_writers(), period=2),
        ]


SHAPES = [WithoutInit, WithoutAnyInit, Inner, InnerReplaced, OuterStep, InnerRaw, OwnLoop]


@pytest.fixture
def make(tmp_path):
    def make(shape, *opts):
        cfg = get_cfg()
        cfg.MODEL.DEVICE = "cpu"
        cfg.OUTPUT_DIR = str(tmp_path)
        cfg.DATASETS.TEST = ("val",)
        cfg.TEST.EVALUATOR = "COCOeval"  # an unknown name is not checked if build_evaluator is overridden
        cfg.TEST.EVAL_PERIOD = 3
        cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = 6, 4
        cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = (), 0
        cfg.SEED = 1
        cfg.merge_from_list(list(opts))
        torch.manual_seed(0)
        return shape(cfg)

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_shape_is_trained_saved_resumed_and_evaluated(make, tmp_path, shape):
    trainer = make(shape)
    before = trainer.model.fc.weight.clone()
    trainer.resume_or_load(resume=False)
    trainer.train()
    weights, rate = trainer.model.fc.weight, trainer.scheduler.last_epoch
    assert not torch.equal(weights, before)
    assert (trainer.iter, rate) == (6, 6)
    assert {"model_0000003.pth", "model_final.pth"} <= set(os.listdir(tmp_path))
    assert rows(tmp_path)[-1]["iteration"] == 6
    assert rows(tmp_path)[-1]["count/batches"] == 2
    assert {"loss_a", "loss_b", "lr"} <= {name for row in rows(tmp_path) for name in row}

    again = make(shape, "SOLVER.MAX_ITER", 9)
    again.resume_or_load(resume=True)
    assert again.start_iter == 6
    assert torch.equal(again.model.fc.weight, weights)
    assert again.scheduler.last_epoch == 6
    again.train()
    assert again.iter == 9
    assert again.scheduler.last_epoch == 9
    iterations = [row["iteration"] for row in rows(tmp_path)]
    assert iterations == sorted(set(iterations))
    assert iterations[-1] == 9
    assert shape.test(again.cfg, again.model) == {"count": {"batches": 2}}


def test_an_inner_trainers_events_metrics_and_state_are_used(make, tmp_path):
    trainer, seen = make(InnerReplaced), []
    note = CallbackHook(after_backward=lambda trainer: seen.append(trainer.model.fc.weight.grad is not None))
    trainer.register_hooks([note])
    trainer.train()
    assert seen == [True] * 12
    assert rows(tmp_path)[-2]["batches_read"] == 12
    again = make(InnerReplaced, "SOLVER.MAX_ITER", 9)
    again.resume_or_load(resume=True)
    assert again._trainer.batches_read == 12
    again.model = Net()
    assert again._trainer.model is again.model
    again._trainer.reset_data_loader(lambda: iter([torch.ones(1, 3)] * 12))
    assert again.data_loader is again._trainer.data_loader
    again.train()
    assert again._trainer.batches_read == 18
    with pytest.raises(TypeError, match="_trainer must be a trainer"):
        make(WithoutInit)._trainer = Net()


@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer, Accumulating])
def test_a_trainer_base_calls_the_step_of_another_trainer(kind):
    class Outer(TrainerBase):
        def __init__(self):
            super().__init__()
            model = Net()
            self.inner = kind(model, batches(size=4), torch.optim.SGD(model.parameters(), 0.1))

        def run_step(self):
            self.inner.run_step()

    trainer = Outer()
    for end in (3, 5):  # a second run has its own storage
        trainer.train(end - 2, end)
        assert trainer.storage.latest()["loss_a"][1] == end - 1


def test_a_failure_in_an_own_loop_leaves_no_final_checkpoint(make, tmp_path):
    class Failing(OwnLoop):
        def run_step(self):
            if self.iter == 5:
                raise ValueError("broken")
            super().run_step()

    trainer = make(Failing)
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert trainer.failed
    assert "model_0000003.pth" in os.listdir(tmp_path)
    assert "model_final.pth" not in os.listdir(tmp_path)


def test_an_own_loop_ends_when_it_should_stop(make, tmp_path):
    class Saving(OwnLoop):
        saves_trainer = True

    def stopped(exit_code, resume):
        trainer = make(Saving)
        trainer.resume_or_load(resume=resume)
        stop = CallbackHook(after_step=lambda t: t.request_stop("enough", exit_code=exit_code) if t.iter > 0 else None)
        trainer.register_hooks([stop])
        with pytest.raises(SystemExit if exit_code else RuntimeError) as info:
            trainer.train()
        return trainer, str(info.value)

    assert stopped(75, resume=False)[1] == "75"
    assert os.listdir(tmp_path).count("model_0000001.pth") == 1
    assert "model_final.pth" not in os.listdir(tmp_path)
    trainer, message = stopped(0, resume=True)
    assert trainer.start_iter == 2
    assert "ends the training loop of Saving" in message
    assert "model_final.pth" in os.listdir(tmp_path)


CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.01, "SOLVER.BASE_LR", 1.0)
CLIP = (*CLIP, "SOLVER.MOMENTUM", 0.0, "SOLVER.WEIGHT_DECAY", 0.0, "SOLVER.MAX_ITER", 1)


def change_in_one_step(trainer):
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    after = [p.detach() for p in trainer.model.parameters()]
    return torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])


@pytest.mark.parametrize("shape", [*SHAPES, type("Plain", (Parts, DefaultTrainer), {})], ids=lambda s: s.__name__)
def test_gradients_are_clipped_in_every_shape(make, shape):
    change = change_in_one_step(make(shape, *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"))
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_an_optimizer_that_clips_the_full_model_itself_is_left_alone(make):
    norms = []

    class Clips(torch.optim.SGD):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.01).item())
            return super().step(closure)

    class Full(WithoutInit):
        @classmethod
        def build_optimizer(cls, cfg, model):
            assert cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE == "full_model"
            return Clips(model.parameters(), cfg.SOLVER.BASE_LR)

    change = change_in_one_step(make(Full, *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"))
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert len(norms) == 1
    assert norms[0] > 0.02


def test_what_is_set_on_an_inner_trainer_counts_for_both(make):
    class Stops(SimpleTrainer):
        def run_step(self):
            super().run_step()
            if self.iter == 1:
                self.request_stop("enough")

    class Trainer(WithoutInit):
        def put(self, model, data_loader, optimizer):
            self._trainer = Stops(model, data_loader, optimizer)

    trainer = make(Trainer)
    trainer._trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 0.0)
    shapes = []
    trainer.on("after_step", uses_outputs=True)(lambda t: shapes.append((t.batch.shape, sorted(t.outputs))))
    before = trainer.model.fc.weight.clone()
    assert trainer.train().reason == "enough"
    assert trainer.iter == 2
    assert torch.equal(trainer.model.fc.weight, before)
    assert trainer.optimizer is trainer._trainer.optimizer
    assert shapes == [((4, 3), ["loss_a", "loss_b"])] * 2


class Flat(Collect):
    def evaluate(self):
        return {"acc": len(self.seen) / 2}


def test_flat_results_of_one_test_set_stay_flat(make, tmp_path):
    class Trainer(Parts, DefaultTrainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return Flat()

    trainer = make(Trainer, "TEST.EXPECTED_RESULTS", [["", "acc", 1.0, 0.0]])
    trainer.train()
    assert Trainer.test(trainer.cfg, trainer.model) == {"acc": 1.0}
    assert rows(tmp_path)[-1]["acc"] == 1.0
    cfg = trainer.cfg.clone()
    cfg.defrost()
    cfg.DATASETS.TEST = ("a", "b")
    assert Trainer.test(cfg, trainer.model) == {"a": {"acc": 1.0}, "b": {"acc": 1.0}}


def test_a_test_set_without_an_evaluator_is_skipped_with_a_warning(make, log):
    class Trainer(Parts, DefaultTrainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            raise NotImplementedError

    trainer = make(Trainer)
    assert Trainer.test(trainer.cfg, trainer.model) == {}
    assert "val is not evaluated: build_evaluator() raises NotImplementedError" in log.messages
    trainer.train()
