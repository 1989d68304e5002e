"""tools/benchmarks/run.py."""

import re
import sys

import pytest
from ranks import ROOT, complete
from run_tools import run_tool

FOLDER = ROOT / "tools/benchmarks"


def test_help_names_each_benchmark(capsys):
    code, output, _ = run_tool("benchmarks/run.py", ["--help"], capsys)
    assert code == 0
    names = {path.stem for path in FOLDER.glob("*.py")} - {"run", "measure", "tasks"}
    assert set(re.findall(r"^  (\w+) ", output.split("\nnames:\n")[1], re.MULTILINE)) == names


@pytest.mark.slow
def test_steps_are_compared_with_the_loop_by_hand(tmp_path):
    for options in ([], ["--checkout", ROOT]):
        words = ("step", "digits", "--steps", "3", "--rounds", "1", *options)
        output = complete([sys.executable, FOLDER / "run.py", *words], tmp_path)
        title, header, *lines = output.splitlines()
        assert title.startswith("step, digits: ")
        assert header.split() == ["step", "ratio"]
        for line, row in zip(lines, ("by hand", "lean", "default"), strict=True):
            assert re.fullmatch(rf"{row} +[\d.]+ [µm]?s +[\d.]+", line), line
