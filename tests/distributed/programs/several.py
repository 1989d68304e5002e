"""Several optimizers that take turns, on several ranks: whole runs, and stopped and resumed ones."""

import os

import torch
from results import write_result
from torch import nn
from torch.nn.functional import softplus

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.data import DATASET_REGISTRY
from hookline.engine.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class Gan(nn.Module):
    """Its generator makes the same fake samples in each step, so that ranks do not draw different noise."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, real, optimizer=None):
        fake = self.generator(real[:, :4])
        if optimizer == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        return {"loss": softplus(self.critic(fake.detach())).mean() + softplus(-self.critic(real)).mean()}


@DATASET_REGISTRY.register()
def six_numbers():
    return list(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)))


def trainer_of(folder, strategy, max_iter, resume=False):
    cfg = get_cfg()
    args = {"find_unused_parameters": True} if strategy == "ddp" else {}
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "Gan", "MODEL.DEVICE", "cpu", "DATASETS.TRAIN", ["six_numbers"], "SEED", 1),
            *("DATALOADER.BATCH_SIZE", 8, "SOLVER.MAX_ITER", max_iter, "SOLVER.LR_SCHEDULER_NAME", "ConstantLR"),
            *("SOLVER.WARMUP_ITERS", 0, "SOLVER.OPTIMIZER.NAME", "Adam", "SOLVER.BASE_LR", 0.01, "LOG.WRITERS", []),
            *("SOLVER.OPTIMIZERS.critic", {"PARAMS": "critic"}, "SOLVER.OPTIMIZERS.generator", {}),
            *("PARALLEL.NAME", strategy, "PARALLEL.ARGS", args, "OUTPUT_DIR", folder, "LOG.PROGRESS_BAR", False),
        ]
    )
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def weights(trainer):
    return [getattr(p, "full_tensor", lambda p=p: p)().tolist() for p in trainer.model.parameters()]


def main(folder, strategy):
    whole = trainer_of(os.path.join(folder, "whole"), strategy, 9)
    whole.train()
    trainer_of(os.path.join(folder, "parts"), strategy, 5).train()
    resumed = trainer_of(os.path.join(folder, "parts"), strategy, 9, resume=True)
    resumed.train()
    write_result(folder, {"whole": weights(whole), "resumed": weights(resumed), "start": resumed.start_iter})
