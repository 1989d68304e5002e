import math

import pytest
from metric_runs import TotalLosses, rows_of

from hookline.hooks import CallbackHook, JSONWriter, PeriodicWriter
from hookline.hooks.builtin.loss_spike import LossSpike


def noise(iteration):
    return 2.0 + 0.1 * math.sin(7.3 * iteration)


def losses(jumps, *hooks):
    """A trainer with a noisy loss that jumps at some iterations."""
    return TotalLosses(lambda iteration: jumps.get(iteration, noise(iteration)), *hooks)


@pytest.mark.parametrize(
    ("jumps", "count"),
    [
        ({50: 30.0, 73: 8.0}, 2),
        (dict.fromkeys(range(50, 90, 5), 100.0), 8),  # the first do not hide later ones
        ({3: 100.0}, 0),  # before the window is half full
        ({3: math.nan, 4: math.inf, 40: math.nan}, 3),  # at any time
        ({iteration: 10 * noise(iteration) for iteration in range(50, 100)}, 12),  # the new normal after half a window
    ],
)
def test_jumps_are_counted_and_noise_is_not(jumps, count):
    hook = LossSpike(window=20)
    losses(jumps, hook, PeriodicWriter([], 10)).train(0, 100)
    assert hook.count == count


def test_every_row_has_the_count_and_spikes_are_logged_once(tmp_path, log):
    path = tmp_path / "metrics.json"
    writer = PeriodicWriter([JSONWriter(str(path))], 10)
    losses({50: 30.0, 51: math.inf, 52: 40.0}, LossSpike(window=20), writer).train(0, 80)
    counts = [(row["iteration"], row["loss_spikes"]) for row in rows_of(path)]
    assert counts == [(it, 0.0 if it < 50 else 3.0) for it in range(9, 80, 10)]
    [line] = [line for line in log.messages if "jumped" in line]
    assert "jumped to 30 at iteration 50 (and 2 more" in line


def test_action_stop_stops_the_run_unless_it_is_complete():
    result = losses({50: 30.0}, LossSpike(window=20, action="stop"), PeriodicWriter([], 10)).train(0, 100)
    assert (result.iteration, result.reason) == (60, "total_loss jumped to 30 at iteration 50")
    hook = LossSpike(window=20, action="stop")
    assert losses({99: 30.0}, hook, PeriodicWriter([], 0)).train(0, 100).iteration == 100
    assert hook.count == 1


def test_action_save_requests_a_checkpoint():
    saves, hook = [], LossSpike(window=20, action="save")
    note = CallbackHook(on_save=lambda t: "save" in t.requests and saves.append(t.iter))
    losses({50: 30.0}, hook, note, PeriodicWriter([], 10)).train(0, 70)
    assert saves == [59]
