"""Digests of a run's state: in their own file, the same after a kill, read without waiting in the step."""

import json

import pytest
import torch
from small_runs import config_trainer, kill_at

from hookline.hooks import Fingerprints, HookBase

NAMES = ["batch", "parameters", "buffers", "optimizer", "generators"]


def run(folder, *overrides, period=3, resume=False):
    hooks = [{"NAME": "Fingerprints", "ARGS": {"period": period}}]
    return config_trainer(folder, "SOLVER.MAX_ITER", 20, "HOOKS", hooks, *overrides, resume=resume)


def rows(folder):
    return [json.loads(line) for line in (folder / "fingerprints.json").read_text().splitlines()]


def test_a_killed_and_resumed_run_writes_the_same_lines(tmp_path):
    run(tmp_path / "one").train()
    written = rows(tmp_path / "one")
    assert [row["iteration"] for row in written] == [2, 5, 8, 11, 14, 17, 19]
    assert all(list(row)[1:] == NAMES for row in written)
    assert len({row["parameters"] for row in written}) == len(written)
    kill_at(run(tmp_path / "other"), 12)
    run(tmp_path / "other", resume=True).train()
    assert rows(tmp_path / "other") == written


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda trainer: torch.rand(1), {"generators"}),
        (lambda trainer: trainer.batch[0].add_(1), {"batch"}),
        (lambda trainer: trainer.optimizer.param_groups[0].update(momentum=0.1), {"optimizer"}),
        (lambda trainer: next(trainer.model.parameters()).data.mul_(2), {"parameters"}),
        (lambda trainer: next(trainer.model.buffers()).add_(1), {"buffers"}),
    ],
    ids=["generators", "batch", "optimizer", "parameters", "buffers"],
)
def test_a_change_is_seen_in_its_digest(tmp_path, change, first):
    class Change(HookBase):
        uses_outputs = True

        def after_step(self):
            if self.trainer.iter == 2:
                change(self.trainer)

    for name in ("one", "other"):
        trainer = run(tmp_path / name, "SOLVER.MAX_ITER", 3)
        if name == "other":
            hook = trainer.find_hook(Fingerprints)
            trainer.remove_hook(hook)
            trainer.register_hooks([Change(), hook])
        trainer.train()
    (one,), (other,) = rows(tmp_path / "one"), rows(tmp_path / "other")
    assert {name for name in NAMES if one[name] != other[name]} == first


def test_a_new_run_moves_the_file_away_with_the_run(tmp_path):
    for _ in range(2):
        run(tmp_path).train()
    assert rows(tmp_path) == rows(tmp_path / "previous_001")


def test_a_trial_run_writes_nothing(tmp_path):
    run(tmp_path, "FAST_DEV_RUN", 1).train()
    assert not (tmp_path / "fingerprints.json").exists()
