import pytest
from fvcore.common.history_buffer import HistoryBuffer as FvcoreBuffer

from hookline.hooks import HistoryBuffer


@pytest.mark.parametrize("max_length", [10, 10_000])
def test_it_returns_what_fvcores_buffer_returns_also_after_a_resume(max_length):
    ours, restored, theirs = HistoryBuffer(max_length), HistoryBuffer(max_length), FvcoreBuffer(max_length)
    for iteration in range(1000):
        for buffer in (ours, theirs):
            buffer.update(100.0 / (1 + iteration), iteration)
    restored.load_state_dict(ours.state_dict())
    for buffer in (ours, restored, theirs):
        buffer.update(7.0)
    for buffer in (ours, restored):
        assert len(buffer) == len(theirs.values()) == min(max_length, 1001)
        assert buffer.values() == theirs.values()
        assert (buffer.latest(), buffer.latest_iter()) == (7.0, 1000)
        for window in (2, 3, 10_000):
            assert buffer.median(window) == pytest.approx(theirs.median(window))
            assert buffer.avg(window) == pytest.approx(theirs.avg(window))
        assert buffer.global_avg() == pytest.approx(theirs.global_avg())  # of dropped values, too
