import pytest
from small_runs import checkpointed_trainer


@pytest.fixture
def make(tmp_path):
    """Create a trainer and its checkpointer in a folder."""

    def make(folder="run"):
        return checkpointed_trainer(tmp_path / folder)

    return make


class Clock:
    """The time of all clocks, which only the test advances."""

    now = 1000.0

    def takes(self, seconds):
        """A function after which so many seconds are over."""

        def spend(*_):
            self.now += seconds

        return spend


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"time.{name}", lambda: clock.now)
    return clock
