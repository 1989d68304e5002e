"""Usual jobs as scripts of a newcomer: each runs as it is, and is no longer than with the best of other trainers."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from loggers import unchanged_logging

FOLDER = Path(__file__).parent
# Lines of code, at most, and what else must be installed.
JOBS = {
    "bert": (18, "transformers"),
    "folder": (30, "timm torchvision PIL"),
    "gpt": (21, ""),
    "unet": (18, ""),
    "vae": (25, ""),
    "byol": (40, ""),
    "reinforce": (16, ""),
    "folds": (23, "optuna sklearn"),
    "lora": (14, "transformers peft"),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_short_and_runs(job, tmp_path, monkeypatch):
    most, packages = JOBS[job]
    text = re.sub(r'\A""".*?"""', "", (FOLDER / f"{job}.py").read_text(), flags=re.DOTALL)
    assert len([line for line in text.splitlines() if line.strip()]) <= most
    for package in packages.split():
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with unchanged_logging():
        found = runpy.run_path(str(FOLDER / f"{job}.py"))
    assert CHECKS[job](found) in (None, True)


def results(found):
    return found["trainer"].evaluate()["test"]


def check_predictions(found):
    rows = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert rows[0].keys() == {"index", "file", "class_name", "probability"}


def check_reward(found):
    rewards = found["trainer"].storage.history("reward")
    assert rewards.avg(50) > 0.9


def check_adapter(found):
    names = torch.load("output/lora/model_final.pth")["model"].keys()
    assert names
    assert all("lora" in name or "classifier" in name for name in names)


CHECKS = {
    "bert": lambda found: results(found)["accuracy"] > 0.9,
    "folder": check_predictions,
    "gpt": lambda found: found["trainer"].storage.history("loss").latest() < 3,
    "unet": lambda found: results(found)["dice"] < 0.1 < results(found)["ce"] + 0.1,
    "vae": lambda found: results(found).keys() == {"loss", "reconstruction", "kl"},
    "byol": lambda found: found["features"].shape == (16, 32),
    "reinforce": check_reward,
    "folds": lambda found: found["study"].best_value > 0.8,
    "lora": check_adapter,
}
