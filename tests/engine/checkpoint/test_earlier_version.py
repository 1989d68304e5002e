"""Checkpoints of the version before load, and their runs continue exactly."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import mlp_config, trainer_of

from hookline.hooks import CallbackHook

# Of 2.13 are the checkpoints. Earlier ones draw other numbers for dropout.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
FOLDER = Path(__file__).parents[2] / "data/checkpoints"
STOPPING = {"NAME": "EarlyStopping", "ARGS": {"metric": "synthetic/accuracy", "patience": 2, "min_delta": 1}}
BEST = ["CHECKPOINT.BEST.METRIC", "synthetic/accuracy"]
# Of each run: its own keys, the name of the kept checkpoint, and the number of its finished iterations.
RUNS = {
    "plain": (["SOLVER.MAX_ITER", "4ep", "SOLVER.CHECKPOINT_PERIOD", 6], "model_0000005", 6),
    "completed": (["SOLVER.MAX_ITER", 8], "model_final", 8),
    "stopped": (["SOLVER.MAX_ITER", 40, "TEST.EVAL_PERIOD", 4, "HOOKS", [STOPPING]], "model_final", 12),
    "best": (
        ["SOLVER.MAX_ITER", 12, "SOLVER.CHECKPOINT_PERIOD", 6, "TEST.EVAL_PERIOD", 3, *BEST],
        "model_0000005",
        6,
    ),
    "averaged": (
        [
            *("SOLVER.MAX_ITER", 12, "SOLVER.CHECKPOINT_PERIOD", 6, "SOLVER.ACCUMULATION_STEPS", 2),
            *("HOOKS", [{"NAME": "EMA", "ARGS": {"decay": 0.9}}]),
            *("SOLVER.OPTIMIZERS", {"first": {"PARAMS": "1", "BASE_LR": 0.1}, "last": {"PARAMS": "4"}}),
        ],
        "model_0000005",
        6,
    ),
}


def make(folder, name, *overrides, resume=True):
    """Return a trainer of one of the runs, as it was when the checkpoints were made."""
    given = [
        *("MODEL.DEVICE", "cpu", "MODEL.ARGS", {"hidden": (4,), "dropout": 0.2}, "DATALOADER.BATCH_SIZE", 16),
        *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 64}}], "TEST.METRICS", ["Accuracy"]),
        *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 16}}], "SOLVER.OPTIMIZER.NAME", "AdamW"),
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.WARMUP_ITERS", 0, "SOLVER.BASE_LR", 0.01),
        *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 2, "SEED", 1),
    ]
    return trainer_of(mlp_config(folder, *given, *RUNS[name][0], *overrides), resume)


def resumed(folder, name, *overrides):
    file = f"{RUNS[name][1]}.pth"
    shutil.copy(FOLDER / f"{name}.pth", folder / file)
    (folder / "last_checkpoint").write_text(file)
    return make(folder, name, *overrides)


@pytest.mark.parametrize(("name", "length"), [("plain", 16), ("completed", 12), ("best", 12), ("averaged", 12)])
def test_a_run_continues_as_if_it_had_never_stopped(tmp_path, name, length):
    trainer = resumed(tmp_path, name, "SOLVER.MAX_ITER", length)
    assert trainer.start_iter == RUNS[name][2]
    assert trainer.train().iteration == length
    if name != "completed" and TORCH >= (2, 13):  # its schedule was that of a shorter run
        whole = make(tmp_path / "whole", name, resume=False)
        whole.train()
        # Another release of torch rounds in another way; a lost step or rate makes a far larger difference.
        torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "reason"), [("completed", "completed"), ("stopped", "early stopping")])
def test_a_run_that_had_ended_trains_no_step(tmp_path, name, reason):
    trainer, steps = resumed(tmp_path, name), []
    trainer.register_hooks([CallbackHook(before_step=lambda t: steps.append(t.iter))])
    result = trainer.train()
    assert (result.reason.split(":")[0], result.iteration, result.exit_code) == (reason, RUNS[name][2], 0)
    assert steps == []
