import pytest
from small_runs import checkpointed_trainer

from hookline.engine.checkpoint import Checkpointer


@pytest.fixture
def make(tmp_path):
    """Create a trainer and its checkpointer in a folder."""

    def make(folder="run", checkpointer_type=Checkpointer):
        return checkpointed_trainer(tmp_path / folder, checkpointer_type)

    return make
