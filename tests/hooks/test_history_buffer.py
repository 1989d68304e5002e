import math
import sys

import numpy as np
import pytest
import torch

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


def test_without_an_iteration_values_are_counted():
    history = HistoryBuffer()
    for value in (5.0, 6.0):
        history.update(value)
    assert history.values() == [(5.0, 0), (6.0, 1)]


def test_a_window_longer_than_the_history_takes_all_of_it():
    history = filled([1.0, 2.0, 6.0])
    assert history.median(100) == 2.0
    assert history.avg(100) == 3.0


def test_keeps_a_bounded_number_of_values_and_the_mean_of_all():
    history = filled([float(i) for i in range(1000)], max_length=10)
    assert len(history) == 10
    assert history.values() == [(float(i), i) for i in range(990, 1000)]
    assert history.median(10_000) == 994.5
    assert history.avg(10_000) == 994.5
    assert history.global_avg() == 499.5


def test_memory_does_not_grow_with_the_number_of_values():
    def size(history):
        return sum(sys.getsizeof(getattr(history, name)) for name in ("_values", "_iters"))

    assert size(filled([0.0] * 100_000, max_length=100)) < 10_000


def test_one_nan_in_the_window_makes_the_median_nan():
    history = filled([1.0, 2.0, math.nan, 3.0, 4.0])
    assert math.isnan(history.median(3))
    assert history.median(2) == 3.5


def test_counts_the_values_put_after_an_iteration():
    history = HistoryBuffer()
    for iteration in (0, 5, 10, 15):
        history.update(1.0, iteration)
    assert history.count_since(5) == 2
    assert history.count_since(-1) == 4
    assert history.count_since(15) == 0


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_newest_values_are_kept(length):
    history = HistoryBuffer(length)
    for iteration in range(5 * length + 1):
        history.update(float(iteration), iteration)
        kept = min(length, iteration + 1)
        assert [it for _, it in history.values()] == list(range(iteration + 1 - kept, iteration + 1))


def test_replacing_values_updates_the_mean():
    history = HistoryBuffer()
    history.extend([1.0, 2.0, 3.0], [10, 11, 12])
    history.replace({11: 5.0, 12: 7.0})
    assert history.values() == [(1.0, 10), (5.0, 11), (7.0, 12)]
    assert history.global_avg() == 13 / 3
    history.replace({})
    assert history.latest() == 7.0


def test_the_state_includes_the_mean_of_dropped_values():
    history, restored = filled([100.0] * 50 + [1.0] * 10, max_length=10), HistoryBuffer(10)
    restored.load_state_dict(history.state_dict())
    assert len(restored) == 10
    assert restored.global_avg() == history.global_avg() == pytest.approx(5010 / 60)
    for buffer in (history, restored):
        buffer.update(7.0)
    assert restored.global_avg() == history.global_avg()
    assert restored.latest_iter() == history.latest_iter() == 60


def test_any_number_is_a_value_and_an_iteration():
    history = HistoryBuffer()
    for value, iteration in ((np.float32(1), 3), (torch.tensor(2.0), 4.0), (3, np.int64(5))):
        history.update(value, iteration)
    assert history.values() == history._data == [(1.0, 3), (2.0, 4), (3.0, 5)]
    assert type(history.global_avg()) is float
    with pytest.raises(ValueError, match="high"):
        history.update("high", 6)
    assert history.latest_iter() == 5


def test_without_values_the_mean_is_not_a_number():
    history = HistoryBuffer()
    assert math.isnan(history.avg(20))
    assert math.isnan(history.median(20))
    assert history.global_avg() == 0.0
