import pytest

from hookline.hooks import HistoryBuffer


def filled(values, max_length=10_000):
    history = HistoryBuffer(max_length)
    for iteration, value in enumerate(values):
        history.update(value, iteration)
    return history


def test_matches_fvcores_buffer():
    history = filled([4.0, 1.0, 3.0, 2.0])
    assert history.latest() == 2.0
    assert history.latest_iter() == 3
    assert history.median(3) == 2.0
    assert history.avg(2) == 2.5
    assert history.global_avg() == 2.5
    assert history.values() == [(4.0, 0), (1.0, 1), (3.0, 2), (2.0, 3)]
    assert len(history) == 4


def test_keeps_a_bounded_number_of_values_and_the_mean_of_all():
    history = filled([float(i) for i in range(1000)], max_length=10)
    assert len(history) == 10
    assert history.values() == [(float(i), i) for i in range(990, 1000)]
    assert history.median(10_000) == history.avg(10_000) == 994.5
    assert history.global_avg() == 499.5


def test_the_state_includes_the_mean_of_dropped_values():
    history, restored = filled([100.0] * 50 + [1.0] * 10, max_length=10), HistoryBuffer(10)
    restored.load_state_dict(history.state_dict())
    assert len(restored) == 10
    assert restored.global_avg() == history.global_avg() == pytest.approx(5010 / 60)
    for buffer in (history, restored):
        buffer.update(7.0)
    assert restored.global_avg() == history.global_avg()
    assert restored.latest_iter() == history.latest_iter() == 60
