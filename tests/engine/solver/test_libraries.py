"""Schedulers of timm and pytorch-accelerated, where installed: a config's run has the rates of a loop by hand."""

import pytest
import torch
from metric_runs import at
from small_runs import SMALL_IMAGES, config_trainer
from torch import nn

from hookline.config import ConfigError
from hookline.hooks import CallbackHook

TIMM, ACCELERATED = "timm.scheduler", "pytorch_accelerated.schedulers"
EPOCHS, STEPS = 4, 3


def by_hand(library, name, args):
    module = pytest.importorskip(library, exc_type=ImportError)
    optimizer, rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), []
    scheduler = getattr(module, name)(optimizer, **args)
    for update in range(EPOCHS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if library == ACCELERATED:
            scheduler.step()
            continue
        scheduler.step_update(update + 1)
        if (update + 1) % STEPS == 0:
            scheduler.step((update + 1) // STEPS)
    return rates


def trained(folder, name, args, stop_at=None, resume=False):
    """Return the rates of a run."""
    used = []
    settings = ["SOLVER.LR_SCHEDULER_NAME", name, "SOLVER.LR_SCHEDULER_ARGS", args, "SOLVER.MAX_ITER", f"{EPOCHS}ep"]
    settings += ["DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "size": 8 * STEPS}}]]
    trainer = config_trainer(folder, *settings, resume=resume)
    note = CallbackHook(after_optimizer_step=lambda t: used.append(t.optimizer.param_groups[0]["lr"]))
    trainer.register_hooks([note, at(stop_at, lambda t: t.request_stop("enough", exit_code=75))])
    trainer.train()
    return used


@pytest.mark.parametrize(
    ("library", "name", "args", "resolved"),
    [
        (TIMM, "CosineLRScheduler", {"t_initial": 3, "warmup_t": 1, "warmup_lr_init": 0.01}, {}),
        (TIMM, "CosineLRScheduler", {"t_initial": 9, "warmup_t": 2, "t_in_epochs": False}, {}),
        (TIMM, "CosineLRScheduler", {"t_initial": "end", "lr_min": 0.01}, {"t_initial": EPOCHS}),
        (TIMM, "MultiStepLRScheduler", {"decay_t": [2, 3], "decay_rate": 0.5}, {}),
        (
            ACCELERATED,
            "CosineLrScheduler",
            {"total_num_epochs": "epochs", "num_update_steps_per_epoch": "iters_per_epoch", "num_warmup_epochs": 1},
            {"total_num_epochs": EPOCHS, "num_update_steps_per_epoch": STEPS},
        ),
        (ACCELERATED, "WSDLrScheduler", {"total_steps": "end", "num_warmup_steps": 2}, {"total_steps": EPOCHS * STEPS}),
    ],
)
def test_rates_are_those_of_a_loop_by_hand_also_after_a_resume(library, name, args, resolved, tmp_path):
    expected = by_hand(library, name, {**args, **resolved})
    assert len(set(expected)) > 1
    path = f"{library}:{name}"
    assert trained(tmp_path / "whole", path, args) == pytest.approx(expected, abs=1e-12)
    first = trained(tmp_path / "parts", path, args, stop_at=6)
    assert first + trained(tmp_path / "parts", path, args, resume=True) == pytest.approx(expected, abs=1e-12)


def test_the_one_that_cannot_be_resumed_is_refused(tmp_path):
    pytest.importorskip(TIMM, exc_type=ImportError)
    with pytest.raises(ConfigError, match="PlateauLRScheduler"):
        trained(tmp_path, f"{TIMM}:PlateauLRScheduler", {})
