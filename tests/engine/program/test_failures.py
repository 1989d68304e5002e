"""A run that fails, or whose loss spikes, names the command that replays the step, and the command finds the cause."""

import json
import random
import shlex

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hookline.cli import main

BAD = 11
CONFIG = {
    "MODEL": {"NAME": "MLP", "DEVICE": "cpu", "LOSS": {"NAME": "CrossEntropyLoss"}},
    "DATALOADER": {"BATCH_SIZE": 8, "NUM_WORKERS": 2},
    "SOLVER": {"MAX_ITER": 40, "BASE_LR": 0.01},
    "CHECKPOINT": {"ROLLING": {"PERIOD": 4}},
    "LOG": {"PERIOD": 1, "PROGRESS_BAR": False, "WRITERS": ["JSONWriter"]},
    "SEED": 0,
}


class Cropped(Dataset):
    """Random crops of 40 images. One image is bad at its right edge, which few crops contain."""

    def __init__(self, bad="infinite"):
        self.images = torch.randn(40, 1, 4, 16, generator=torch.Generator().manual_seed(0))
        self.bad = bad

    def __len__(self):
        return 40

    def __getitem__(self, index):
        left = random.randrange(13)
        image = self.images[index][:, :, left : left + 4] + 0.1 * torch.randn(1, 4, 4)
        if index == BAD and left > 8:
            if self.bad == "unreadable":
                raise ValueError("a truncated image")
            image[:, :, -1] = torch.inf
        return image, index % 4

    def describe(self, index):
        return f"image_{index}.png"


class Net(nn.Module):
    """Fails for inputs that are not finite."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        if not x.isfinite().all():
            error = RuntimeError("bad inputs")
            error.iteration = "an attribute of its own"
            raise error
        return self.layer(x.flatten(1))


@pytest.fixture(autouse=True)
def _started_by_a_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["hookline"])


def train(folder, bad="infinite", **options):
    tree = {
        key: {**value, **options.get(key, {})} if isinstance(value, dict) else value for key, value in CONFIG.items()
    }
    tree["MODEL"].setdefault("ARGS", {"in_features": 16, "num_classes": 4})
    tree["DATASETS"] = {"TRAIN": [{"NAME": f"{__name__}:Cropped", "ARGS": {"bad": bad}}]}
    tree["HOOKS"], tree["OUTPUT_DIR"] = options.get("HOOKS", []), str(folder / "run")
    (folder / "config.yaml").write_text(json.dumps(tree))
    return main(["train", "--config-file", str(folder / "config.yaml")])


def run_named(line, capsys):
    """Run the command at the end of a line; return its report and what it printed."""
    words = shlex.split(line.partition("ook at this step: ")[2])
    capsys.readouterr()
    assert main(words[words.index("replay") :]) == 0
    run, iteration = words[words.index("replay") + 1], words[words.index("--iter") + 1]
    with open(f"{run}/replay_{iteration}/report.json", encoding="utf-8") as file:
        return json.load(file, parse_constant=pytest.fail), capsys.readouterr().out


NAMED = f"  {BAD}  image_{BAD}.png  4 values of its input are NaN or infinite"
IN_ONE_PROCESS = {"DATALOADER": {"NUM_WORKERS": 0}}


SLOW, NET = pytest.mark.slow, {"NAME": f"{__name__}:Net", "ARGS": {}}


@pytest.mark.parametrize(
    ("bad", "options", "error", "sign"),
    [
        ("infinite", {}, FloatingPointError, NAMED),
        pytest.param("unreadable", IN_ONE_PROCESS, ValueError, f"while reading sample {BAD} of Cropped", marks=SLOW),
        pytest.param("infinite", {"MODEL": NET, **IN_ONE_PROCESS}, RuntimeError, NAMED, marks=SLOW),
    ],
    ids=["nan", "loader", "model"],
)
def test_the_last_line_of_an_error_in_epoch_3_finds_the_sample(tmp_path, capsys, bad, options, error, sign):
    with pytest.raises(error) as raised:
        train(tmp_path, bad, **options)
    report, text = run_named(raised.value.__notes__[-1], capsys)
    assert report["iteration"] // 5 == 3
    assert report["checkpoint"] == "rolling_0000015.pth"
    assert report["compared"]["values"] >= 9
    assert report["compared"]["first_difference"] is None
    assert report["error"].startswith(f"{error.__name__}: ")
    assert BAD in [sample["index"] for sample in report["samples"]]
    assert sign in text


def test_spikes_skipped_updates_and_a_stop_at_a_nan_name_the_command(tmp_path, capsys, log):
    spike = {"NAME": "LossSpike", "ARGS": {"window": 5}}
    train(tmp_path, SOLVER={"NONFINITE_LOSS": "skip", "MAX_ITER": 21}, HOOKS=[spike], **IN_ONE_PROCESS)
    skipped, spiked = (line for line in log.text.splitlines() if "Look at this step: " in line)
    assert skipped.partition("Look")[2] == spiked.partition("Look")[2]
    report, _ = run_named(spiked, capsys)
    assert report["compared"]["first_difference"] is None
    assert report["losses"]["loss"] == [None]
    log.clear()
    train(tmp_path, SOLVER={"NONFINITE_LOSS": "stop"}, **IN_ONE_PROCESS)
    [line] = (line for line in log.text.splitlines() if "Look at this step: " in line)
    assert line.endswith("--iter 19")
