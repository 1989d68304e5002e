"""Programs of docs/: those of examples.md are short, and give the same result on one rank and on two; those that use
another library run where it is installed."""

import re
import runpy
import sys
from collections import Counter

import pytest
import torch
from loggers import unchanged_logging
from ranks import complete
from snippets import ROOT, Page

PROGRAMS = {s.file: s.text for s in Page(ROOT / "docs" / "examples.md").snippets if s.file}


def test_the_programs_have_at_most_thirty_lines():
    assert PROGRAMS.keys() >= {"weighted.py", "mixed.py", "tokens.py", "generation.py"}
    assert all(len(text.splitlines()) <= 30 for text in PROGRAMS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weighted.py", "mixed.py", "tokens.py"])
def test_two_ranks_end_with_the_loss_of_one(name, tmp_path):
    (tmp_path / name).write_text(PROGRAMS[name])
    losses = []
    for number in ("1", "2"):
        output = complete([sys.executable, tmp_path / name], tmp_path, RANKS=number, CUDA_VISIBLE_DEVICES="")
        losses.append(float(re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def run(page, name, folder, monkeypatch):
    (text,) = (s.text for s in Page(ROOT / "docs" / page).snippets if s.file == name)
    (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    with unchanged_logging():
        return runpy.run_path(name)


def test_optuna_prunes_trials(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    study = run("tutorials/sweep.md", "prune.py", tmp_path, monkeypatch)["study"]
    states = Counter(trial.state.name for trial in study.trials)
    assert states["COMPLETE"] + states["PRUNED"] == 8
    assert states["COMPLETE"] >= 2
    assert states["PRUNED"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_runs_and_ends_trials(tmp_path):
    pytest.importorskip("ray.tune")
    (text,) = (s.text for s in Page(ROOT / "docs/tutorials/sweep.md").snippets if s.file == "report.py")
    (tmp_path / "report.py").write_text(text)
    output = complete([sys.executable, tmp_path / "report.py"], tmp_path, HOME=str(tmp_path))
    assert re.search(r"^{'lr': [\d.e-]+}$", output, re.MULTILINE)
    logs = [path.read_text() for path in tmp_path.glob("ray_results/*/*/output/log.txt")]
    assert len(logs) == 4
    assert all("test/accuracy: " in log and "ERROR" not in log for log in logs)  # Ray may kill a trial that it ended


def test_mixup_makes_probabilities(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    mix = run("data.md", "mixup.py", tmp_path, monkeypatch)["mix"]
    x, y = mix([(torch.rand(3, 4, 4), label) for label in (0, 1, 1)])
    assert x.shape == (3, 3, 4, 4)
    assert y.shape == (3, 10)
    assert y.sum(1).tolist() == pytest.approx([1, 1, 1])
