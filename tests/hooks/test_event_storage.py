"""Putting metrics into a storage, and reading them as series, rows, tables and state."""

import math
import sys
import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch

from hookline import hooks
from hookline.hooks import EventStorage, get_event_storage, has_event_storage
from hookline.hooks.history_buffer import MeanWindow


@pytest.fixture
def storage():
    with EventStorage() as storage:
        yield storage


def put_series(storage, name, iterations, smoothing_hint):
    for iteration in iterations:
        storage.put_scalar(name, float(iteration), smoothing_hint=smoothing_hint, cur_iter=iteration)


def test_the_innermost_storage_is_the_active_one_also_in_threads():
    for kind in (RuntimeError, AssertionError):
        with pytest.raises(kind, match="EventStorage"):
            get_event_storage()
    with suppress(ZeroDivisionError), EventStorage() as outer:
        with EventStorage(4) as inner:
            assert get_event_storage() is inner
            assert [outer, inner] == hooks._CURRENT_STORAGE_STACK  # as tests of ported code read it
            thread = threading.Thread(target=lambda: get_event_storage().put_scalar("from_thread", 1))
            thread.start()
            thread.join()
            assert inner.latest()["from_thread"] == (1.0, 4)
        assert get_event_storage() is outer
        raise ZeroDivisionError
    assert not has_event_storage()


NUMBERS = [2, np.float32(2), np.array(2.0), torch.tensor([2]), torch.tensor(2.0, requires_grad=True)]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_any_single_number_is_a_scalar(storage, value):
    storage.put_scalar("a", value)
    storage.put_scalars(b=value, cur_iter=9, smoothing_hint=False)
    if isinstance(value, torch.Tensor):
        value.data.add_(1)  # changes no metric
    assert storage.latest() == {"a": (2.0, 0), "b": (2.0, 9)}
    assert storage.smoothing_hints() == {"a": True, "b": False}
    assert type(storage.latest()["a"][0]) is float


def test_wrong_values_and_names_are_errors_that_name_them(storage):
    for value in (torch.zeros(2), "fast", None, np.zeros(3)):
        with pytest.raises(TypeError, match="'my_metric'"):
            storage.put_scalar("my_metric", value)
    with pytest.raises(ValueError, match='"iteration"'):
        storage.put_scalars(iteration=1.0)
    with pytest.raises(ValueError, match="'avg'"):
        storage.put_scalar("accuracy", 0.5, over_ranks="avg")
    assert storage.latest() == {}
    storage.put_scalar("total_loss", 1)
    with pytest.raises(KeyError, match=r"total_los'.*'total_loss'"):
        storage.history("total_los")


def test_name_scopes_nest_and_end_with_an_exception(storage):
    with storage.name_scope("outer"):
        with suppress(ZeroDivisionError), storage.name_scope("inner/"):
            storage.put_scalars(iteration=2)
            storage.put_image("image", torch.zeros(1, 2, 2))
            raise ZeroDivisionError
        storage.put_scalar("c", 3)
    storage.put_scalar("d", 4)
    assert list(storage.latest()) == ["outer/inner/iteration", "outer/c", "d"]
    assert storage._vis_data[0][0] == "outer/inner/image"


def test_smoothed_metrics_are_read_as_their_median_and_others_as_they_are():
    with EventStorage(start_iter=2) as storage:
        assert storage.iteration == storage.iter == 2
        for value in (1.0, 100.0, 2.0, 3.0):
            storage.put_scalar("loss", value)
            storage.put_scalar("lr", value, smoothing_hint=False)
            storage.step()
        assert storage.latest_with_smoothing_hint(3) == {"loss": (3.0, 5), "lr": (3.0, 5)}
        assert storage.latest_with_smoothing_hint(MeanWindow(3))["loss"] == (35.0, 5)
        storage.put_scalar("loss", 9.0, cur_iter=15)
        assert storage.latest_with_smoothing_hint(11)["loss"] == (6.0, 15)  # of 2, since 11 iterations have 2 values
        assert storage.count_samples("loss", 11) == 2
        assert storage._latest_scalars["lr"] == (3.0, 5)  # names that projects of detectron2 read
        assert storage._history["lr"]._data[-1] == (3.0, 5)
        storage._latest_scalars, storage._iter = {}, 16  # forgets what was put last, and no history
        storage.put_scalar("loss", 4.0)
        assert storage.latest() == {"loss": (4.0, 16)}
        assert storage.latest_with_smoothing_hint(12) == {"loss": (4.0, 16)}  # of 3, 9 and 4
        storage._history = {}
        assert storage.histories() == storage.latest() == {}
        storage.put_scalar("loss", math.nan, cur_iter=16)
        assert math.isnan(storage.latest_with_smoothing_hint()["loss"][0])


def test_rows_have_each_value_once_for_each_reader(storage):
    put_series(storage, "loss", range(20), smoothing_hint=True)
    put_series(storage, "lr", range(20), smoothing_hint=False)  # at each iteration: the last value
    put_series(storage, "accuracy", (4, 19), smoothing_hint=False)  # rare: every value
    rows, since = storage.rows(window_size=20)
    assert rows == [(4, {"accuracy": 4.0}), (19, {"loss": 9.5, "lr": 19.0, "accuracy": 19.0})]
    assert storage.rows(since=since) == ([], since)
    put_series(storage, "lr", range(20, 40), smoothing_hint=False)
    put_series(storage, "accuracy", (24, 31), smoothing_hint=False)
    new, _ = storage.rows(since=since)
    assert new == [(24, {"accuracy": 24.0}), (31, {"accuracy": 31.0}), (39, {"lr": 39.0})]
    assert [iteration for iteration, _ in storage.rows()[0]] == [4, 19, 24, 31, 39], "another reader gets all"
    with EventStorage(40) as resumed:
        resumed.load_state_dict(storage.state_dict())
        assert resumed.rows(since=since)[0] == new


def test_metrics_as_arrays_and_as_a_table_and_without_some(storage):
    for iteration in range(4):
        storage.put_scalar("loss", 1.0 - iteration / 4, cur_iter=iteration)
    storage.put_scalar("test/accuracy", 0.75, smoothing_hint=False, cur_iter=2)
    assert [array.tolist() for array in storage.history("loss").arrays()] == [[0, 1, 2, 3], [1.0, 0.75, 0.5, 0.25]]
    pytest.importorskip("pandas")
    table = storage.to_pandas()
    assert (table.index.name, list(table.index)) == ("iteration", [0, 1, 2, 3])
    assert table["loss"].tolist() == [1.0, 0.75, 0.5, 0.25]
    assert table["test/accuracy"].dropna().to_dict() == {2: 0.75}
    assert list(storage.to_pandas("test/").index) == [2]
    storage.reset("test/")
    assert list(storage.histories()) == ["loss"]
    storage.reset()
    assert storage.latest() == {}
    assert len(storage.to_pandas()) == 0


def test_images_histograms_and_texts_wait_for_writers(storage):
    storage.iter, image = 4, torch.rand(3, 2, 2)
    storage.put_image("image", image)
    storage.put_histogram("hist", torch.tensor([0.0, 1.0, math.nan, 1.0, 4.0, math.inf]), bins=4)
    storage.put_text("text", "hello")
    image.zero_()
    ((name, kept, iteration),) = storage._vis_data
    assert (iteration, name, bool(kept.any()), list(storage._texts)) == (4, "image", True, [("text", "hello", 4)])
    (hist,) = storage._histograms
    assert (hist["global_step"], hist["bucket_counts"], hist["bucket_limits"]) == (4, [1, 2, 0, 1], [1, 2, 3, 4])
    assert (hist["min"], hist["max"], hist["num"], hist["sum"], hist["sum_squares"]) == (0, 4, 4, 6, 18)
    assert "images" not in storage.state_dict(), "no writer takes them"
    storage.saves_media = True
    with EventStorage() as resumed:
        resumed.load_state_dict(storage.state_dict())
        assert [(name, iteration) for name, _, iteration in resumed._vis_data] == [("image", 4)]
    storage.clear_images()  # as writers of detectron2 do
    storage.clear_histograms()
    assert not any((storage._vis_data, storage._histograms))
    storage.clear_media()
    assert not storage._texts


def test_memory_does_not_grow_with_the_length_of_a_run(storage):
    def put(start, stop):
        for iteration in range(start, stop):
            storage.put_scalars(a=0.5, b=float(iteration), cur_iter=iteration, smoothing_hint=iteration % 2 == 0)
        storage.latest()

    put(0, 30_000)
    tracemalloc.start()
    put(30_000, 80_000)
    assert tracemalloc.get_traced_memory()[0] < 1.5 * 2**20  # the 100,000 new values would be 2.3 MiB
    tracemalloc.stop()
    for _ in range(1000):
        storage.put_image("image", torch.zeros(1, 1, 1))
    assert len(storage._vis_data) <= 64


@pytest.mark.parametrize("number", range(20))
def test_another_thread_may_read_in_the_middle_of_a_put(number):
    storage, lines = EventStorage(), iter(range(20))

    def read(frame, event, argument):
        if event == "line" and next(lines) == number:
            storage.histories()
        return read

    storage.put_scalar("loss", 1.0, cur_iter=1)
    storage.histories()
    former = sys.gettrace()
    sys.settrace(lambda frame, *_: read if frame.f_code is EventStorage.put_scalar.__code__ else None)
    try:
        storage.put_scalar("loss", 2.0, cur_iter=2)
    finally:
        sys.settrace(former)
    storage.put_scalar("loss", 3.0, cur_iter=3)
    # At most the value that is being put is lost.
    assert storage.history("loss").values() in ([(1.0, 1), (2.0, 2), (3.0, 3)], [(1.0, 1), (3.0, 3)])
