"""tools/benchmarks/run.py."""

import re
import sys

import pytest
from ranks import ROOT, finish, fork

FOLDER = ROOT / "tools/benchmarks"


def run(folder, *arguments):
    return finish(fork([sys.executable, FOLDER / "run.py", *arguments], folder))


def test_help_names_each_benchmark(tmp_path):
    code, output = run(tmp_path, "--help")
    assert code == 0
    names = {path.stem for path in FOLDER.glob("*.py")} - {"run", "measure", "tasks"}
    assert set(re.findall(r"^  (\w+) ", output.split("\nnames:\n")[1], re.MULTILINE)) == names


@pytest.mark.slow
def test_steps_are_compared_with_the_loop_by_hand_and_with_another_checkout(tmp_path):
    code, output = run(tmp_path, "step", "digits", "--steps", "3", "--rounds", "1", "--against", ROOT)
    assert code == 0, output
    lines = output.splitlines()
    assert [line.split(":")[0] for line in lines if ":" in line] == ["step, digits"]
    for row in ("by hand", "lean", "default"):
        (line,) = (line for line in lines if line.startswith(row))
        assert len(re.findall(r"[\d.]+ [µm]?s ", line + " ")) == 2, line
    assert "this/other" in output
