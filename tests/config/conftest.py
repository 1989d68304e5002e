import pytest


@pytest.fixture
def write(tmp_path):
    """Write a file; return its path."""

    def write(text, name="a.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write
