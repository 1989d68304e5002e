"""Copies in memory of a single process; several are in distributed/test_elastic.py."""

import json

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import Trainer
from hookline.hooks import HookBase, InMemoryCheckpointer


class Fails(HookBase):
    def before_step(self):
        if self.trainer.iter == 11:
            raise RuntimeError("a failure")


def model():
    return nn.Sequential(nn.Dropout(), nn.Linear(3, 1))


def trainer_of(folder, *hooks, in_memory=True):
    memory = folder.parent / "memory"
    memory.mkdir(exist_ok=True)
    entry = {"NAME": "InMemoryCheckpointer", "ARGS": {"period": 4, "folder": str(memory)}}
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    config = {"LOG.PROGRESS_BAR": False, "LOG.PERIOD": 3, "LOG.WRITERS": ["JSONWriter"], "SOLVER.CHECKPOINT_PERIOD": 6}
    hooks = [*hooks, *([entry] if in_memory else [])]
    config |= {"MODEL.DEVICE": "cpu", "SOLVER.BASE_LR": 0.1}
    options = {"loss": nn.functional.mse_loss, "length": 20, "batch_size": 4, "seed": 2, "config": config}
    return Trainer(model, (x, x[:, :1]), hooks=hooks, output_dir=folder, **options)


def rows(folder):
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return [{name: value for name, value in line.items() if "time" not in name and "eta" not in name} for line in lines]


def fail(folder):
    trainer = trainer_of(folder, Fails())
    with pytest.raises(RuntimeError, match="a failure"):
        trainer.train()
    [copy] = (folder.parent / "memory").glob("*/*")
    assert copy.name.startswith("7-")
    return copy


def test_a_failed_run_resumes_exactly_from_the_copy(tmp_path):
    trainer_of(tmp_path / "whole", in_memory=False).train()
    fail(tmp_path / "run")
    trainer = trainer_of(tmp_path / "run")
    result = trainer.train(resume=True)
    assert (trainer.start_iter, result.iteration) == (8, 20)
    weights = [torch.load(tmp_path / name / "model_final.pth")["model"] for name in ("whole", "run")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert not list((tmp_path / "memory").iterdir())


def test_a_damaged_copy_is_not_used(tmp_path):
    state = fail(tmp_path / "run") / "state.pth"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    trainer = trainer_of(tmp_path / "run")
    trainer.resume_or_load()
    assert trainer.start_iter == 6


def test_an_older_copy_is_not_used(tmp_path):
    fail(tmp_path / "run")
    with pytest.raises(RuntimeError, match="a failure"):
        trainer_of(tmp_path / "run", Fails(), in_memory=False).train(resume=True)
    trainer = trainer_of(tmp_path / "run", in_memory=False)
    trainer.max_iter = 10
    trainer.train(resume=True)
    trainer = trainer_of(tmp_path / "run")
    trainer.resume_or_load()
    assert trainer.start_iter == 10


def test_copies_of_another_run_in_the_same_folder_are_not_used(tmp_path):
    fail(tmp_path / "run")
    with pytest.raises(RuntimeError, match="a failure"):
        trainer_of(tmp_path / "run", Fails(), in_memory=False).train()
    trainer = trainer_of(tmp_path / "run")
    trainer.resume_or_load()
    assert trainer.start_iter == 6


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    trainer = trainer_of(tmp_path / "run", in_memory=False)
    with pytest.raises(ConfigError, match=r"InMemoryCheckpointer.folder: \S+nothing is not a folder on rank 0"):
        InMemoryCheckpointer(trainer.checkpointer, folder=str(tmp_path / "nothing"))


def test_a_link_in_place_of_the_folder_is_an_error(tmp_path):
    folder = fail(tmp_path / "run").parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    trainer = trainer_of(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"hookline-\S+ belongs to another user"):
        trainer.train(resume=True)
    assert trainer.start_iter == 6
