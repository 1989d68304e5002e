"""tools/benchmarks/run.py, in processes of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools/benchmarks"


def run(*arguments):
    command = [sys.executable, FOLDER / "run.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_help_names_each_benchmark():
    code, out, _ = run("--help")
    assert code == 0
    names = {path.stem for path in FOLDER.glob("*.py")} - {"run", "measure", "tasks"}
    assert set(re.findall(r"^  (\w+) ", out.split("\nnames:\n")[1], re.MULTILINE)) == names


@pytest.mark.slow
def test_steps_are_compared_with_the_loop_by_hand_and_with_another_checkout():
    code, out, err = run("step", "tiny", "digits", "--steps", "3", "--rounds", "1", "--against", ROOT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines if ":" in line] == ["step, tiny", "step, digits"]
    for row in ("by hand", "lean", "default"):
        found = [line for line in lines if line.startswith(row)]
        assert len(found) == 2, out
        for line in found:
            assert len(re.findall(r"[\d.]+ [µm]?s ", line + " ")) == 2, line
    assert "this/other" in out
