"""The schedulers of timm, if it is installed: a config's run has the rates of a loop written by hand."""

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError
from hookline.hooks import HookBase

schedulers = pytest.importorskip("timm.scheduler", exc_type=ImportError)
EPOCHS, STEPS = 4, 3
DATA = (torch.randn(24, 2), torch.zeros(24, 1))


class Rates(HookBase):
    def __init__(self, stop_at=None):
        self.used, self.stop_at = [], stop_at

    def after_optimizer_step(self):
        self.used.append(self.trainer.optimizer.param_groups[0]["lr"])

    def after_step(self):
        if self.trainer.iter == self.stop_at:
            self.trainer.request_stop("enough")


def by_hand(name, args):
    optimizer, rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), []
    scheduler = getattr(schedulers, name)(optimizer, **args)
    for update in range(EPOCHS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step_update(update + 1)
        if (update + 1) % STEPS == 0:
            scheduler.step((update + 1) // STEPS)
    return rates


def trained(folder, name, args, stop_at=None, resume=False):
    trainer = Trainer(
        nn.Linear(2, 1),
        DATA,
        loss=nn.MSELoss(),
        length=f"{EPOCHS}ep",
        batch_size=8,
        optimizer="SGD",
        lr=0.1,
        lr_scheduler={"NAME": f"timm.scheduler:{name}", "ARGS": args},
        hooks=[rates := Rates(stop_at)],
        output_dir=folder,
        seed=1,
        config={"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False},
    )
    trainer.train(resume=resume)
    return rates.used


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("CosineLRScheduler", {"t_initial": 3, "warmup_t": 1, "warmup_lr_init": 0.01}),
        ("CosineLRScheduler", {"t_initial": 9, "warmup_t": 2, "warmup_lr_init": 0.01, "t_in_epochs": False}),
        ("StepLRScheduler", {"decay_t": 2, "decay_rate": 0.5}),
        ("MultiStepLRScheduler", {"decay_t": [2, 3], "decay_rate": 0.5}),
        ("TanhLRScheduler", {"t_initial": 4}),
        ("PolyLRScheduler", {"t_initial": 12, "t_in_epochs": False}),
    ],
)
def test_rates_are_those_of_a_loop_by_hand_also_after_a_resume(name, args, tmp_path):
    expected = by_hand(name, args)
    assert len(set(expected)) > 1
    assert trained(tmp_path / "whole", name, args) == pytest.approx(expected, abs=1e-12)
    first = trained(tmp_path / "parts", name, args, stop_at=6)
    assert first + trained(tmp_path / "parts", name, args, resume=True) == pytest.approx(expected, abs=1e-12)


def test_the_length_of_the_run_is_an_argument(tmp_path):
    args = {"t_initial": "end", "lr_min": 0.01}
    assert trained(tmp_path, "CosineLRScheduler", args) == pytest.approx(
        by_hand("CosineLRScheduler", {**args, "t_initial": EPOCHS})
    )


def test_the_one_that_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"timm's 'timm.scheduler:PlateauLRScheduler' cannot be resumed"):
        trained(tmp_path, "PlateauLRScheduler", {})
