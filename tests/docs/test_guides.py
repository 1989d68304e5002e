"""The programs of docs/porting/: those of the other systems, where they are installed, are as accurate as ours."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import Page

FOLDER = Path(__file__).parents[2] / "docs" / "porting"
PACKAGES = {
    "huggingface": "transformers accelerate",
    "lightning": "lightning torchmetrics",
    "pytorch-accelerated": "pytorch_accelerated torchmetrics",
    "mmengine": "mmengine",
    "fastnlp": "fastNLP",
}


def programs(name):
    """The page's programs by their file's name; data, model and our program are on a page of their own."""
    pages = (Page(FOLDER / "program.md"), Page(FOLDER / f"{name}.md"))
    return {snippet.file: snippet.text for page in pages for snippet in page.snippets if snippet.file}


def accuracy(folder, program, *options):
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    command = [sys.executable, program, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "predicted: [" in done.stdout
    return float(re.findall(r"accuracy: ([\d.]+)$", done.stdout, re.MULTILINE)[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PACKAGES)
def test_both_programs_are_as_accurate(name, tmp_path):
    for package in PACKAGES[name].split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for file, text in programs(name).items():
        (tmp_path / file).write_text(text)
    ours, theirs = accuracy(tmp_path, "ours.py"), accuracy(tmp_path, "theirs.py")
    assert ours > 0.94
    assert abs(ours - theirs) < 0.03
    assert accuracy(tmp_path, "ours.py", "--resume") == ours
    assert accuracy(tmp_path, "theirs.py", "--resume") > 0.94
