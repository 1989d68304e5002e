"""Two runs that part: the iteration and the cause are named."""

import json
import re

import pytest
import torch
from small_runs import config_trainer
from torch.utils.data import Dataset

from hookline.cli import main
from hookline.config import get_cfg
from hookline.engine import replay
from hookline.hooks import HookBase

RUN = (
    *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 10, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 20),
    *("DATASETS.TEST", [], "DATALOADER.BATCH_SIZE", 4),
)
CHANGED = 11


class Images(Dataset):
    """Images with random noise, of which one may be another."""

    def __init__(self, noise=0.1, changed=-1):
        self.images = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        self.noise, self.changed = noise, changed

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.images[index] + self.noise * torch.randn(1, 4, 4) + (index == self.changed), index % 4


class Draws(HookBase):
    """Draws a random number before the forward pass of a step."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_forward(self, batch):
        if self.trainer.iter == self.iteration:
            torch.rand(1)


class Stops(HookBase):
    def after_step(self):
        if self.trainer.iter == 9:
            self.trainer.request_stop()


class Measures(HookBase):
    """Writes a metric in the last step."""

    def __init__(self, value):
        self.value = value

    def after_step(self):
        if self.trainer.iter == 19:
            self.trainer.storage.put_scalar("measured", self.value)


def train(folder, *overrides, hooks=(), value=1.0, **images):
    data = [{"NAME": f"{__name__}:Images", "ARGS": images}]
    hooks = [{"NAME": f"{__name__}:Measures", "ARGS": {"value": value}}, *hooks]
    config_trainer(folder, *RUN, "DATASETS.TRAIN", data, "HOOKS", hooks, *overrides).train()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(folder)
    return folder


def diverge(capsys, run, other, *options):
    """Return the exit code and the printed report."""
    capsys.readouterr()
    code = main(["diverge", str(run), str(other), *options])
    return code, capsys.readouterr().out


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_equal_runs(run, tmp_path, capsys):
    train(tmp_path)
    code, text = diverge(capsys, run, tmp_path)
    assert code == 0
    assert "Config: the same" in text
    assert "values are equal to the bit\nThe runs are equal.\n" in text


def test_a_run_that_ended_earlier(run, tmp_path, capsys):
    train(tmp_path, hooks=[f"{__name__}:Stops"])
    code, text = diverge(capsys, run, tmp_path)
    assert code == 0
    assert f"The runs are equal up to iteration 9, the last one of {tmp_path}." in text


def test_a_changed_augmentation(run, tmp_path, capsys):
    train(tmp_path, noise=0.2)
    code, text = diverge(capsys, run, tmp_path)
    assert code == 1
    assert "DATASETS.TRAIN" in text
    assert (
        "Replayed both runs from the beginning.\nThe first step that differs is 0. It differs first in the batch."
        in text
    )
    assert "\n  output of features.0 (Conv2d)\n    min " in text


def test_one_changed_sample(run, tmp_path, capsys):
    train(tmp_path, changed=CHANGED)
    before = content(run), content(tmp_path)
    code, text = diverge(capsys, run, tmp_path, "--most", "100")
    assert code == 1
    assert "It differs first in the batch." in text
    assert re.findall(r"input of sample (\d+) \(sum\)", text) == [str(CHANGED)]
    iteration = re.search(r"The first step that differs is (\d+)", text)[1]
    assert main(["samples", str(run), "--iter", iteration]) == 0
    assert str(CHANGED) in capsys.readouterr().out.split()
    assert (content(run), content(tmp_path)) == before


def test_another_dropout_draw(run, tmp_path, capsys):
    train(tmp_path, hooks=[{"NAME": f"{__name__}:Draws", "ARGS": {"iteration": 12}}])
    code, text = diverge(capsys, run, tmp_path)
    assert code == 1
    assert "Metrics: the first difference is at iteration 19: " in text
    assert "Replayed both runs from model_0000006.pth." in text
    assert "The first step that differs is 12. It differs first in the output of dropout (Dropout)." in text


def test_a_metric_of_a_hook_in_a_run_with_a_key_of_its_project(run, tmp_path):
    train(tmp_path, value=2.0)
    with open(tmp_path / "config.yaml", "a") as file:
        file.write("PROJECT: 1\n")
    cfg = get_cfg()
    cfg.PROJECT = 0
    equal, text = replay.diverge(str(run), str(tmp_path), cfg=cfg)
    assert not equal
    assert "the first difference is at iteration 19: measured is 1.0 and 2.0" in text
    assert "The first step that differs is 19. It differs in a metric of a hook." in text


def test_a_difference_that_the_replays_do_not_have(run, tmp_path, capsys):
    train(tmp_path)
    rows = (tmp_path / "metrics.json").read_text().splitlines()
    changed = {**json.loads(rows[1]), "loss": 7.0}
    (tmp_path / "metrics.json").write_text("\n".join([rows[0], json.dumps(changed), *rows[2:]]) + "\n")
    code, text = diverge(capsys, run, tmp_path)
    assert code == 1
    assert "The metrics of both replays are equal" in text
    assert f"hookline replay {run} --iter 19 compares a run with its own metrics" in text
    code, text = diverge(capsys, run, tmp_path, "--no-replay")
    assert (code, "Replayed" in text) == (1, False)


def test_bad_input(run, tmp_path, capsys):
    train(tmp_path / "silent", "LOG.WRITERS", [])
    train(tmp_path / "other")
    (tmp_path / "other" / "metrics.json").write_text('{"iteration": 3, "total_loss": 1.0}\n')
    for arguments, message in (
        ([str(tmp_path)], "no run to compare (it has no config.yaml)"),
        ([str(tmp_path / "silent")], "no run to compare (it has no metrics.json)"),
        ([str(tmp_path / "other")], "nothing to compare"),
        ([str(run), "--trainer", "mine:Trainer"], "there is no module 'mine'"),
        ([str(run), "--trainer", "os:path"], "os:path is no subclass of DefaultTrainer"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["diverge", str(run), *arguments])
        assert message in capsys.readouterr().err
