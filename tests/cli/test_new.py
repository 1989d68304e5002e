"""``hookline new``."""

import os
import re
import shlex

import pytest
from snippets import run_python

from hookline.cli import main

FILES = ["config.yaml", "data.py", "hook.py", "model.py", "test_project.py"]


def test_five_files_are_written_and_the_next_commands_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloned" / ".git").mkdir(parents=True)
    (tmp_path / "cloned" / "README.md").write_text("mine")
    for folder in ("my_project", "deeper/my-project", "cloned", "a name with spaces"):
        before = os.listdir(folder) if os.path.isdir(folder) else []
        assert main(["new", folder]) == 0
        assert sorted(os.listdir(folder)) == sorted([*before, *FILES])
        assert f"  cd {shlex.quote(folder)}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_project_trains_and_its_test_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["new", "my_project"])
    commands = re.findall(r"^  (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert commands[0] == "cd my_project"
    folder = tmp_path / "my_project"
    for command in commands[1:]:
        words = shlex.split(command)
        words = words[1:] if words[0] == "python" else ["-m", *words]
        done = run_python(words, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert (folder / "output" / "model_best.pth").exists()
    assert "weight_norm" in (folder / "output" / "metrics.json").read_text()
