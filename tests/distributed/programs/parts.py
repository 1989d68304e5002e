"""Models, data and runs that several programs use."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, comm
from hookline.engine.data import ArrayDataset
from hookline.engine.modeling import ModelAdapter

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT / "tests/distributed/strategies")]  # programs import both
CPU = torch.device("cpu")
LOSS = ModelAdapter(nn.CrossEntropyLoss())
CLIP = ["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"]


def points(size, seed=0):
    """Inputs (size, 6) and labels below 3."""
    generator = torch.Generator().manual_seed(seed)
    return ArrayDataset(torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))


def plain():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Items(nn.Module):
    """Returns a mean over items: samples whose first input is positive.

    Args:
        least: the smallest divisor. With 0, the loss and gradient of a share without items are NaN.
    """

    def __init__(self, least=1):
        super().__init__()
        self.layer, self.least = nn.Linear(6, 3), least

    def forward(self, batch):
        x, y = batch
        mask = x[:, 0] > 0
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=self.least), "num_items": mask.sum()}


def run_of(folder, *options, resume=False):
    """The trainer of a run of configs/synthetic/mlp.yaml; options are keys and values."""
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs/synthetic/mlp.yaml"))
    given = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", folder, "SEED", 3, "LOG.PERIOD", 1, "LOG.WRITERS", ["JSONWriter"]]
    cfg.merge_from_list([str(value) for value in (*given, *options)])
    torch.manual_seed(3 + comm.get_rank())
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def write_result(folder, result):
    """Write what ``run_ranks`` returns for this rank."""
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(result))


def whole(state):
    """A state dict with whole tensors in place of sharded ones."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
