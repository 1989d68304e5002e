"""Two runs that part: the iteration and the cause are named."""

import json
import re

import pytest
import torch
from small_runs import config_trainer
from starts import contents
from torch.utils.data import Dataset

from hookline.cli import main
from hookline.hooks import CallbackHook

RUN = (
    *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 5, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 10),
    *("DATASETS.TEST", [], "DATALOADER.BATCH_SIZE", 4, "SOLVER.CHECKPOINT_PERIOD", 4),
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


def draws():
    """Draw a random number before the forward pass of a step."""
    return CallbackHook(before_forward=lambda trainer, batch: torch.rand(1) if trainer.iter == 6 else None)


def stops():
    return CallbackHook(after_step=lambda trainer: trainer.request_stop() if trainer.iter == 4 else None)


def train(folder, *overrides, hooks=(), **images):
    data = [{"NAME": f"{__name__}:Images", "ARGS": images}]
    hooks = [f"{__name__}:{name}" for name in hooks]
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


@pytest.mark.parametrize(
    ("hooks", "code", "lines"),
    [
        ([], 0, ["Config: the same", "The runs are equal.\n"]),
        (["stops"], 0, ["The runs are equal up to iteration 4, the last one of "]),
        (
            *(["draws"], 1),
            [
                *("Metrics: the first difference is at iteration 9: ", "Replayed both runs from model_0000003.pth."),
                "The first step that differs is 6. It differs first in the output of dropout (Dropout).",
            ],
        ),
    ],
    ids=["equal", "ended earlier", "dropout"],
)
def test_the_first_difference_of_two_runs_is_named(run, tmp_path, capsys, hooks, code, lines):
    train(tmp_path, hooks=hooks)
    found, text = diverge(capsys, run, tmp_path)
    assert found == code
    assert [line for line in lines if line not in text] == []


def test_one_changed_sample_is_named_and_no_file_changes(run, tmp_path, capsys):
    train(tmp_path, changed=CHANGED)
    before = contents(run), contents(tmp_path)
    code, text = diverge(capsys, run, tmp_path, "--most", "100")
    assert code == 1
    assert "DATASETS.TRAIN" in text
    assert "It differs first in the batch." in text
    assert re.findall(r"input of sample (\d+) \(sum\)", text) == [str(CHANGED)]
    assert (contents(run), contents(tmp_path)) == before


@pytest.mark.slow
def test_a_difference_that_the_replays_do_not_have(run, tmp_path, capsys):
    train(tmp_path)
    rows = (tmp_path / "metrics.json").read_text().splitlines()
    changed = {**json.loads(rows[1]), "loss": 7.0}
    (tmp_path / "metrics.json").write_text("\n".join([rows[0], json.dumps(changed), *rows[2:]]) + "\n")
    code, text = diverge(capsys, run, tmp_path)
    assert code == 1
    assert "The metrics of both replays are equal" in text
    assert f"hookline replay {run} --iter 9 compares a run with its own metrics" in text
    code, text = diverge(capsys, run, tmp_path, "--no-replay")
    assert (code, "Replayed" in text) == (1, False)
