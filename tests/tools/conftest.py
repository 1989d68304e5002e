import pytest
from run_tools import run_tool


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    """Run a script of tools/ in an empty folder; return its exit code, standard output and standard error."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda name, *arguments: run_tool(name, arguments, capfd)
