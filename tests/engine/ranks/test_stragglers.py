import pytest

from hookline.engine.ranks.stragglers import RankTimes, Stragglers, find_straggler


def ranks(*data, step=0.1, forward=(), hooks=()):
    found = []
    for rank, seconds in enumerate(data):
        parts = {"data_time": seconds}
        if forward:
            parts["forward_time"] = forward[rank]
        if hooks:
            parts["hooks"] = hooks[rank]
        found.append(RankTimes(step, parts, "Slow", f"host{rank}"))
    return found


def test_the_rank_with_the_largest_excess_over_the_median_is_the_straggler():
    found = find_straggler(ranks(0.02, 0.05, 0.02, 0.02, forward=(0.02, 0.02, 0.09, 0.02)))
    assert found == (2, "forward_time", 0.09, 0.02)


@pytest.mark.parametrize(
    ("times", "step"),
    [
        ((0.02, 0.02, 0.02), 0.1),
        ((0.02, 0.02, 0.035), 0.1),  # 15 % of the step
        ((0.0, 0.0, 0.009), 0.01),  # 9 ms
        ((0.05, 0.05, 0.0), 0.1),  # one is faster
    ],
)
def test_small_differences_are_ignored(times, step):
    assert find_straggler(ranks(*times, step=step)) is None


def test_a_straggler_is_logged_when_two_comparisons_in_a_row_find_it_and_when_it_changes(log):
    stragglers = Stragglers()
    slow, other, none = ranks(0, 0.05, 0), ranks(0.05, 0, 0), ranks(0, 0, 0)
    logged = []
    for iteration, times in enumerate([slow, none, slow, slow, slow, other, other, none, none, none]):
        log.clear()
        stragglers.compare(times, iteration)
        logged.append(log.messages)
    assert [bool(lines) for lines in logged] == [False, False, False, True, False, False, True, False, True, False]
    assert logged[3][0].startswith("Rank 1 (host host1) is a straggler at iteration 3: its data loading takes 0.05 s a")
    assert logged[6][0].startswith("Rank 0 (host host0) is a straggler")
    assert logged[8] == ["No straggler any more, at iteration 8"]


def test_times_are_those_since_the_last_measurement():
    stragglers = Stragglers()
    stragglers.measure(10.0, 4, {}, {"A": 1.0})
    found = stragglers.measure(12.0, 8, {"data_time": 0.1, "time": 0.4}, {"A": 1.5, "B": 3.0})
    assert found.step == 0.5
    assert found.parts == {"data_time": 0.1, "hooks": 0.875}
    assert found.hook == "B"
