import pytest
from run_tools import run_command


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run ``hookline`` in an empty folder; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lambda *words: run_command(words, capsys)
