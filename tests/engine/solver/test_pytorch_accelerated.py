"""The schedulers of pytorch-accelerated, if it is installed: a run has the rates of its trainer."""

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.hooks import CallbackHook

schedulers = pytest.importorskip("pytorch_accelerated.schedulers", exc_type=ImportError)
EPOCHS, STEPS = 4, 3
DATA = (torch.randn(24, 2), torch.zeros(24, 1))


def by_hand(name, args):
    optimizer, rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), []
    scheduler = getattr(schedulers, name)(optimizer, **args)
    for _ in range(EPOCHS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def trained(folder, name, args, stop_at=None, resume=False):
    used = []

    def after_step(trainer):
        if trainer.iter == stop_at:
            trainer.request_stop("enough", exit_code=75)

    trainer = Trainer(
        nn.Linear(2, 1),
        DATA,
        loss=nn.MSELoss(),
        length=f"{EPOCHS}ep",
        batch_size=8,
        optimizer="SGD",
        lr=0.1,
        lr_scheduler={"NAME": f"pytorch_accelerated.schedulers:{name}", "ARGS": args},
        hooks=[
            CallbackHook(
                after_optimizer_step=lambda trainer: used.append(trainer.optimizer.param_groups[0]["lr"]),
                after_step=after_step,
            )
        ],
        output_dir=folder,
        seed=1,
        config={"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False},
    )
    trainer.train(resume=resume)
    return used


@pytest.mark.parametrize(
    ("name", "args", "numbers"),
    [
        (
            "CosineLrScheduler",
            {"total_num_epochs": "epochs", "num_update_steps_per_epoch": "iters_per_epoch", "num_warmup_epochs": 1},
            {"total_num_epochs": EPOCHS, "num_update_steps_per_epoch": STEPS},
        ),
        ("WSDLrScheduler", {"total_steps": "end", "num_warmup_steps": 2}, {"total_steps": EPOCHS * STEPS}),
    ],
)
def test_rates_are_those_of_its_trainer_also_after_a_resume(name, args, numbers, tmp_path):
    expected = by_hand(name, {**args, **numbers})
    assert len(set(expected)) > 2
    assert trained(tmp_path / "whole", name, args) == pytest.approx(expected, abs=1e-12)
    first = trained(tmp_path / "parts", name, args, stop_at=6)
    assert first + trained(tmp_path / "parts", name, args, resume=True) == pytest.approx(expected, abs=1e-12)
