"""The command ``hookline`` itself: its table, help, mistakes."""

import os
import subprocess
import sys
import time

import pytest

from hookline.cli import COMMANDS, main


def code_of(*words):
    """The exit code of a command line."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code or 0


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
    assert code_of(command, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: hookline {command} ")
    assert "example:" in lines
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80


def test_help_does_not_import_torch_and_is_fast():
    code = (
        "import sys; from hookline.cli import main\n"
        "try: main(['train', '--help'])\n"
        "finally: assert not {'torch', 'numpy', 'yaml'} & set(sys.modules), set(sys.modules)"
    )
    times = []
    for _ in range(3):
        start = time.process_time(), os.times().children_user
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        times.append(os.times().children_user - start[1])
    assert min(times) < 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "error: unknown command 'trian'; did you mean 'train'?\n"),
        (["frobnicate"], "error: unknown command 'frobnicate'; hookline --help lists the commands\n"),
        (["--verison"], "error: unknown option '--verison'; hookline --help lists the commands\n"),
        (["train", "--config-fle", "x"], "did you mean '--config-file'?\n"),
        (["train", "--num-gpus", "two"], "error: argument --num-gpus: invalid int value: 'two'\n"),
        (["new"], "error: the following arguments are required: FOLDER\n"),
        (["config", "explian"], "error: "),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(words, message, capsys):
    assert code_of(*words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert err.endswith(message) or message == "error: "


def test_the_version(capsys):
    import hookline

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hookline {hookline.__version__}\n"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "hookline", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'train'" in done.stderr


def test_output_that_nobody_reads_ends_quietly():
    command = f"{sys.executable} -m hookline config explain | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 0, "")
