"""The command ``hookline`` itself: its table, help, mistakes."""

import subprocess
import sys

import pytest
from run_folders import make_run

import hookline
from hookline.cli import COMMANDS, main


def test_the_overview_lists_every_command_in_a_line(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == overview
    assert max(map(len, overview.splitlines())) <= 80
    lines = [line.split()[0] for line in overview.splitlines() if line.startswith("  ")]
    assert lines == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: hookline {command} ")
    assert "example:" in lines
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80


def test_help_and_reading_runs_do_not_import_torch(tmp_path):
    make_run(tmp_path / "run", config={})
    code = (
        "import sys; from hookline.cli import main\n"
        "for words in (['train', '--help'], ['compare', 'run']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hookline {hookline.__version__}\n"


def test_it_runs_as_a_module_and_output_that_nobody_reads_ends_quietly():
    command = f"{sys.executable} -m hookline config diff digits/mlp.yaml digits/convnet.yaml | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 0, "")
