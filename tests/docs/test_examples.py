"""The programs of docs/examples.md are short, and give the same result on one rank and on two."""

import re
import sys

import pytest
from ranks import finish, fork
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
    for number in ("1", "2"):
        code, output = finish(fork([sys.executable, tmp_path / name], tmp_path, RANKS=number, CUDA_VISIBLE_DEVICES=""))
        assert code == 0, output
        losses.append(float(re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
