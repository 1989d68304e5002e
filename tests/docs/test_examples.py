"""The programs of docs/examples.md are short, and give the same result on one rank and on two."""

import os
import re
import subprocess
import sys

import pytest
from snippets import ROOT, Page

PROGRAMS = {s.file: s.text for s in Page(ROOT / "docs" / "examples.md").snippets if s.file}


def test_the_programs_have_at_most_thirty_lines():
    assert PROGRAMS.keys() >= {"weighted.py", "mixed.py", "tokens.py", "adapter.py", "generation.py"}
    assert all(len(text.splitlines()) <= 30 for text in PROGRAMS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weighted.py", "mixed.py", "tokens.py"])
def test_two_ranks_end_with_the_loss_of_one(name, tmp_path):
    (tmp_path / name).write_text(PROGRAMS[name])
    losses = []
    for ranks in ("1", "2"):
        environment = dict(os.environ, RANKS=ranks, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(float(re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
