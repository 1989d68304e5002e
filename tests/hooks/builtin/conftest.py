import pytest
from small_runs import checkpointed_trainer


@pytest.fixture
def make(tmp_path):
    """Create a trainer and its checkpointer in a folder."""

    def make(folder="run"):
        return checkpointed_trainer(tmp_path / folder)

    return make
