"""Runs from a config, stopped and resumed: with any optimizer and schedule they equal a whole run."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import ExponentialLR

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.export.inspection import inspect_checkpoint
from hookline.hooks import CallbackHook


class TwoNumbers:
    """A scheduler with the interface of timm's, which sets the rate from both numbers."""

    def __init__(self, optimizer, t_initial: int):
        self.optimizer, self.t_initial, self.epoch, self.update = optimizer, t_initial, 0, 0

    def step(self, epoch, metric=None):
        self.epoch = epoch

    def step_update(self, num_updates, metric=None):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + num_updates + 10 * self.epoch / self.t_initial)

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict):
        self.epoch = state_dict["epoch"]


class Updates:
    """A scheduler with the interface of pytorch-accelerated's, whose state does not have its count."""

    def __init__(self, optimizer, total_steps: int):
        self.optimizer, self.total_steps, self.updates = optimizer, total_steps, -1

    def step(self):
        self.updates += 1
        self.step_update(self.updates)

    def step_update(self, num_updates):
        self.optimizer.param_groups[0]["lr"] = 0.1 * (1 - num_updates / self.total_steps)

    def state_dict(self):
        return {"total_steps": self.total_steps}

    def load_state_dict(self, state_dict):
        self.total_steps = state_dict["total_steps"]


class Pair(nn.Module):
    """A GAN: the name of the optimizer says whose loss is wanted."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, batch, optimizer=None):
        real, _ = batch
        fake = self.generator(torch.randn(len(real), 2))
        if optimizer == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        return {"loss": softplus(self.critic(fake.detach())).mean() + softplus(-self.critic(real)).mean()}


CASES = {
    "linear": ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR"],
    "restarts": ["SOLVER.LR_SCHEDULER_NAME", "WarmupCosineRestartsLR", "SOLVER.LR_SCHEDULER_ARGS.first_cycle", "1ep"],
    "step per epoch": [
        *("SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:ExponentialLR", "SOLVER.LR_SCHEDULER_ARGS.gamma", 0.5),
        *("SOLVER.LR_SCHEDULER_INTERVAL", "epoch"),
    ],
    "step per evaluation": [
        *("SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:StepLR", "SOLVER.LR_SCHEDULER_ARGS.step_size", "1ep"),
        *("SOLVER.LR_SCHEDULER_INTERVAL", "evaluation", "TEST.EVAL_PERIOD", "0.5ep"),
    ],
    "rules": [
        *("SOLVER.PARAM_GROUPS", [{"REGEX": "bias", "LR_FACTOR": 3, "WEIGHT_DECAY": 0.1}], "LOG.GRAD_NORM", True),
        *("SOLVER.LAYER_DECAY.FACTOR", 0.5, "SOLVER.LAYER_DECAY.LAYERS", ["Linear"]),
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR"),
    ],
    "several optimizers": [
        *("SOLVER.OPTIMIZERS.first", {"PARAMS": "1", "OPTIMIZER": {"NAME": "Adam"}}),
        *("SOLVER.OPTIMIZERS.rest", {"LR_SCHEDULER_NAME": "WarmupStepLR", "LR_SCHEDULER_ARGS": {"step_size": "1ep"}}),
    ],
    "turns": [
        *("MODEL.NAME", f"{__name__}:Pair", "MODEL.LOSS.NAME", "", "SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR"),
        *("DATASETS.TEST", (), "TEST.METRICS", []),
        *("SOLVER.OPTIMIZERS.critic", {"PARAMS": "critic"}),
        *("SOLVER.OPTIMIZERS.generator", {"OPTIMIZER": {"NAME": "Adam"}, "EVERY": 2}),
    ],
    "accumulation": [
        "HOOKS",
        [{"NAME": "GradientAccumulationScheduler", "ARGS": {"schedule": {"1ep": 2, "9": 5}}}],
        "SOLVER.LR_SCHEDULER_NAME",
        "WarmupLinearLR",
    ],
    "freezing": [
        *("HOOKS", [{"NAME": "ModelFreezer", "ARGS": {"layers": ["1", "4"], "until": ["1ep", 10], "since": [0, 7]}}]),
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.PARAM_GROUPS", [{"PARAMS": "1", "LR_FACTOR": 0.1}]),
    ],
    "updates": ["SOLVER.LR_SCHEDULER_NAME", f"{__name__}:Updates", "SOLVER.LR_SCHEDULER_ARGS.total_steps", "end"],
    "timm": ["SOLVER.LR_SCHEDULER_NAME", f"{__name__}:TwoNumbers", "SOLVER.LR_SCHEDULER_ARGS.t_initial", "end"],
}


class OwnOptimizers(DefaultTrainer):
    """``build_optimizer`` returns a list."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        return [torch.optim.Adam(model[1].parameters(), lr=0.01), torch.optim.SGD(model[4].parameters(), lr=0.1)]


class OwnSchedules(OwnOptimizers):
    """``build_optimizer`` returns a dict, and ``build_lr_scheduler`` too."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        return dict(zip(("body", "head"), super().build_optimizer(cfg, model), strict=True))

    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer):
        return {"head": ExponentialLR(optimizer["head"], 0.9)}


def make(folder, case, max_iter="3ep", resume=False, cls=DefaultTrainer):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
            *("MODEL.ARGS", {"in_features": 4, "num_classes": 3, "hidden": [5], "dropout": 0.5}),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 60, "shape": [4], "num_classes": 3}}]),
            *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 20, "shape": [4], "num_classes": 3}}]),
            *("DATALOADER.BATCH_SIZE", 10, "SOLVER.MAX_ITER", max_iter, "SOLVER.BASE_LR", 0.1, "SEED", 3),
            *("SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (), "TEST.METRICS", ["Loss"], "LOG.WRITERS", []),
            *("LOG.PROGRESS_BAR", False, "OUTPUT_DIR", str(folder)),
        ]
    )
    cfg.merge_from_list(CASES[case])
    trainer = cls(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def state(trainer):
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    return [*(parameter.tolist() for parameter in trainer.model.parameters()), rates]


@pytest.mark.parametrize("cls", [OwnOptimizers, OwnSchedules])
def test_optimizers_and_schedules_of_a_subclass_are_stepped_and_resumed(cls, tmp_path):
    check_that_a_resumed_run_equals_a_whole_one("linear", tmp_path, cls)
    latest = make(tmp_path / "whole", "linear", "4ep", resume=True, cls=cls).train().metrics
    names = {name for name in latest if name.startswith("lr")}
    assert names == ({"lr/0", "lr/1"} if cls is OwnOptimizers else {"lr/head"})


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_a_whole_one(case, tmp_path):
    check_that_a_resumed_run_equals_a_whole_one(case, tmp_path)


def check_that_a_resumed_run_equals_a_whole_one(case, tmp_path, cls=DefaultTrainer):
    whole = make(tmp_path / "whole", case, cls=cls)
    whole.train()
    stopped = make(tmp_path / "parts", case, cls=cls)
    stopped.register_hooks([])
    stop_at(stopped, 8)
    stopped.train()
    assert stopped.iter == 9
    resumed = make(tmp_path / "parts", case, resume=True, cls=cls)
    assert resumed.start_iter == 9
    resumed.train()
    assert state(resumed) == state(whole)
    first = make(tmp_path / "first", case, cls=cls)
    assert [group["lr"] for group in first.optimizer.param_groups] != state(whole)[-1]  # the schedule did something


def stop_at(trainer, iteration):
    def stop(trainer):
        if trainer.iter == iteration:
            trainer.request_stop("enough", exit_code=75)

    trainer.register_hooks([CallbackHook(after_step=stop)])


def test_the_schedule_is_what_the_config_says(tmp_path):
    trainer = make(tmp_path, "step per epoch")
    assert isinstance(trainer.scheduler, ExponentialLR)
    trainer.train()
    assert trainer.scheduler.last_epoch == 3
    assert torch.tensor(trainer.scheduler.get_last_lr()) == pytest.approx(torch.tensor([0.1 / 8]))


def test_a_checkpoint_of_several_optimizers_can_be_inspected(tmp_path):
    make(tmp_path, "turns").train()
    described = inspect_checkpoint(str(tmp_path / "model_final.pth"))["optimizer"]
    assert described["kind"] == "critic and generator"
    assert described["tensors"] > 0
