"""The learning rate range test and the search for the largest batch."""

import math

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, Trainer, default_argument_parser, default_setup
from hookline.engine.program.find import find_batch_size, find_lr
from hookline.hooks.common import capture_rng


class Quadratic(nn.Module):
    """Its loss falls up to a learning rate of 1, and rises beyond it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 1.0]))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": (self.w * x).square().sum() / 2 + 0 * self.bias.sum()}


def ones():
    return [torch.ones(2)] * 70


class Full(Quadratic):
    """Is out of memory from 14 samples on."""

    def forward(self, x):
        if len(x) > 13:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def quadratic(folder, *options):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", f"{__name__}:Quadratic", "MODEL.DEVICE", "cpu", "DATASETS.TRAIN", [f"{__name__}:ones"]),
            *("DATALOADER.BATCH_SIZE", 1, "SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.BASE_LR", 0.1, "SEED", 1),
            *("SOLVER.WEIGHT_DECAY", 0.0, "SOLVER.MOMENTUM", 0.0, "OUTPUT_DIR", str(folder / "run"), *options),
        ]
    )
    return cfg


def test_the_rate_rises_exponentially_and_a_rising_loss_ends_the_sweep(tmp_path):
    cfg, rng = quadratic(tmp_path, "HOOKS", ["ProgressBar"]), capture_rng()
    before = cfg.dump()
    sweep = find_lr(cfg, 1e-4, 1e4, num_iter=80, smoothing=0.5)
    assert sweep.lrs[:2] == pytest.approx([1e-4, 1e-4 * 10 ** (8 / 79)])
    assert 2.0 < sweep.lrs[-1] < 100  # it diverges from 2.0 on
    assert sweep.losses[0] == 2.5
    assert min(sweep.losses) < 1e-3
    assert 0.01 < sweep.suggestion < 1.0
    assert len(find_lr(cfg, 1e-9, 1e-8, num_iter=20).lrs) == 20  # a flat loss
    endless = find_lr(cfg, 1e-4, 1e30, num_iter=40, stop_factor=None)
    assert all(map(math.isfinite, endless.losses))  # one that is not ends the sweep
    assert len(endless.lrs) < 40
    assert cfg.dump() == before
    assert repr(capture_rng()) == repr(rng)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"smoothing in \[0, 1\)"):
        find_lr(cfg, smoothing=1.0)


class Noisy(Quadratic):
    """Its loss depends more on the batch than on the rate."""

    def forward(self, x):
        return {"loss": super().forward(x)["loss"] + 3 * torch.rand(())}


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_the_suggestion_does_not_follow_noise(tmp_path, seed):
    sweep = find_lr(quadratic(tmp_path, "MODEL.NAME", f"{__name__}:Noisy", "SEED", seed), 1e-7, 10)
    assert 0.005 < sweep.suggestion < 1.0


def test_an_object_would_be_changed_so_its_class_is_needed(tmp_path):
    options = {"length": 3, "output_dir": tmp_path / "run", "optimizer": "SGD"}
    made = Trainer(Quadratic(), ones, **options)
    with pytest.raises(ConfigError, match=r"pass its class"):
        find_lr(made.lengths.user_cfg)
    with pytest.raises(ConfigError, match=r"not a Trainer"):
        find_lr(made)
    assert len(find_lr(Trainer(Quadratic, ones, **options).lengths.user_cfg, num_iter=9).lrs) > 5


def test_a_run_after_a_search_is_written_also_if_that_failed(tmp_path):
    class Failing(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            raise RuntimeError("in the model")

    cfg = quadratic(tmp_path, "SOLVER.MAX_ITER", 2, "LOG.WRITERS", [])
    with pytest.raises(RuntimeError, match="in the model"):
        find_lr(cfg, trainer=Failing)
    DefaultTrainer(cfg).train()
    args = default_argument_parser().parse_args(["--resume"])
    default_setup(cfg, args)
    find_lr(cfg, num_iter=3)
    with pytest.raises(ConfigError, match="--resume: this script ignores the option"):
        DefaultTrainer(cfg).train()
    assert (tmp_path / "run" / "config.yaml").exists()
    assert not (tmp_path / "run" / "previous_001").exists()


def test_groups_keep_the_ratio_of_their_rates(tmp_path):
    class Noted(DefaultTrainer):
        def optimizer_step(self):
            seen.append(sorted({group["lr"] for group in self.optimizer.param_groups}))
            super().optimizer_step()

    seen = []
    find_lr(quadratic(tmp_path, "SOLVER.BIAS_LR_FACTOR", 10.0), 1e-3, 1e-1, num_iter=3, trainer=Noted)
    assert seen == [pytest.approx([rate, 10 * rate]) for rate in (1e-3, 1e-2, 1e-1)]


def test_the_largest_batch_fits_into_the_memory_and_a_larger_one_does_not(tmp_path, monkeypatch, log):
    cfg = quadratic(tmp_path, "MODEL.NAME", f"{__name__}:Full", "DATALOADER.BATCH_SIZE", 10)
    monkeypatch.setattr(DefaultTrainer, "device_type", "cuda")
    assert find_batch_size(cfg, most=40) == 13
    assert "A batch of 20 samples does not fit" in log.text
    assert find_batch_size(cfg, most=12) == 12
    cfg.MODEL.NAME = f"{__name__}:Quadratic"
    assert find_batch_size(cfg, most=1000) == 70  # all samples
    assert list(tmp_path.iterdir()) == []
