import math
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hookline import hooks
from hookline.config import ConfigError
from hookline.engine import Trainer
from hookline.hooks import EventStorage, HookBase, get_event_storage, has_event_storage
from hookline.hooks.history_buffer import MeanWindow, fetch_tensors


@pytest.fixture
def storage():
    with EventStorage() as storage:
        yield storage


def put_series(storage, name, iterations, smoothing_hint):
    for iteration in iterations:
        storage.put_scalar(name, float(iteration), smoothing_hint=smoothing_hint, cur_iter=iteration)


def test_a_metric_named_iteration_is_rejected(storage):
    with pytest.raises(ValueError, match='cannot be named "iteration"'):
        storage.put_scalar("iteration", 1.0)
    with pytest.raises(ValueError, match='cannot be named "iteration"'):
        storage.put_scalars(loss=1.0, iteration=1.0)
    with storage.name_scope("inner"):
        storage.put_scalars(iteration=1.0)
    assert list(storage.latest()) == ["inner/iteration"]


# ---------------------------------------------------------------------------- the storage in use


def test_the_innermost_storage_is_the_active_one():
    assert not has_event_storage()
    with EventStorage() as outer:
        assert get_event_storage() is outer
        with EventStorage() as inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer
    assert not has_event_storage()


def test_tests_of_ported_code_see_the_stack_of_storages():
    with EventStorage() as outer, EventStorage() as inner:
        assert [outer, inner] == hooks._CURRENT_STORAGE_STACK
    assert hooks._CURRENT_STORAGE_STACK == []


def test_get_event_storage_outside_a_run_raises_an_error():
    with pytest.raises(RuntimeError, match="with EventStorage"):
        get_event_storage()


def test_a_storage_is_inactive_after_an_exception():
    with pytest.raises(ZeroDivisionError), EventStorage():
        raise ZeroDivisionError
    assert not has_event_storage()


def test_threads_of_a_run_see_its_storage(storage):
    thread = threading.Thread(target=lambda: get_event_storage().put_scalar("from_thread", 1))
    thread.start()
    thread.join()
    assert storage.latest()["from_thread"] == (1.0, 0)


def test_iterations_start_at_start_iter_and_advance_by_step():
    with EventStorage(start_iter=7) as storage:
        assert (storage.iter, storage.iteration) == (7, 7)
        storage.step()
        storage.put_scalar("a", 1)
        assert storage.latest() == {"a": (1.0, 8)}
        storage.iter = 3
        assert storage.iteration == 3


# ---------------------------------------------------------------------------- putting


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(2.0, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_any_single_number_is_a_scalar(storage, value):
    storage.put_scalar("a", value)
    storage.put_scalars(b=value)
    assert storage.latest() == {"a": (2.0, 0), "b": (2.0, 0)}
    assert type(storage.latest()["a"][0]) is float


def test_a_later_in_place_change_of_a_tensor_does_not_change_the_metric(storage):
    value = torch.tensor(1.0)
    storage.put_scalar("a", value)
    value.add_(1)
    assert storage.latest()["a"][0] == 1.0


@pytest.mark.parametrize("value", [torch.zeros(2), "fast", None, [1, 2], np.zeros(3)], ids=repr)
def test_a_value_that_is_not_one_number_raises_an_error_with_the_name(storage, value):
    with pytest.raises(TypeError, match="'my_metric'"):
        storage.put_scalar("my_metric", value)
    with pytest.raises(TypeError, match="'other_metric'"):
        storage.put_scalars(other_metric=value)
    assert storage.latest() == {}


def test_put_scalars_passes_iteration_and_hint_to_all(storage):
    storage.put_scalars(a=1, b=2, cur_iter=9, smoothing_hint=False)
    assert storage.latest() == {"a": (1.0, 9), "b": (2.0, 9)}
    assert storage.smoothing_hints() == {"a": False, "b": False}


def test_name_scopes_nest(storage):
    with storage.name_scope("outer"):
        storage.put_scalar("a", 1)
        with storage.name_scope("inner/"):
            storage.put_scalars(b=2)
            storage.put_image("image", torch.zeros(1, 2, 2))
            storage.put_histogram("hist", torch.arange(4.0))
            storage.put_text("text", "hello")
        storage.put_scalar("c", 3)
    storage.put_scalar("d", 4)
    assert list(storage.latest()) == ["outer/a", "outer/inner/b", "outer/c", "d"]
    assert storage._vis_data[0][0] == "outer/inner/image"
    assert storage._histograms[0]["tag"] == "outer/inner/hist"
    assert storage._texts[0][0] == "outer/inner/text"


def test_the_outer_name_scope_is_restored_after_an_exception(storage):
    with storage.name_scope("outer"):
        with pytest.raises(ValueError, match="inside"), storage.name_scope("inner"):
            raise ValueError("inside")
        storage.put_scalar("a", 1)
    storage.put_scalar("b", 1)
    assert list(storage.latest()) == ["outer/a", "b"]


# ---------------------------------------------------------------------------- reading


def test_an_unknown_metric_raises_an_error_with_the_nearest_name(storage):
    storage.put_scalar("total_loss", 1)
    with pytest.raises(KeyError, match=r"total_los'.*did you mean 'total_loss'"):
        storage.history("total_los")


def test_smoothed_metrics_are_read_as_their_median_and_others_as_they_are(storage):
    for iteration, value in enumerate([1.0, 100.0, 2.0, 3.0]):
        storage.iter = iteration
        storage.put_scalar("loss", value)
        storage.put_scalar("lr", value, smoothing_hint=False)
    assert storage.latest()["loss"] == (3.0, 3)
    assert storage.latest_with_smoothing_hint(3) == {"loss": (3.0, 3), "lr": (3.0, 3)}
    assert storage.latest_with_smoothing_hint(20)["loss"] == (2.5, 3)
    assert storage.latest_with_smoothing_hint(MeanWindow(3))["loss"] == (35.0, 3)
    assert storage.count_samples("loss", 3) == 3


def test_a_window_counts_iterations_and_not_values(storage):
    for iteration in (0, 10, 20, 21):
        storage.put_scalar("loss", float(iteration), cur_iter=iteration)
    assert storage.latest_with_smoothing_hint(5)["loss"] == (20.5, 21)
    assert storage.count_samples("loss", 5) == 2


def test_nan_stays_visible(storage):
    for iteration, value in enumerate([1.0, math.nan, 2.0, math.inf]):
        storage.put_scalars(loss=torch.tensor(value), fine=1.0, cur_iter=iteration)
    assert math.isnan(storage.latest_with_smoothing_hint()["loss"][0])
    rows, _ = storage.rows()
    assert math.isnan(rows[-1][1]["loss"])


# ---------------------------------------------------------------------------- rows


def test_a_smoothed_metric_is_one_row_at_its_last_iteration(storage):
    put_series(storage, "loss", range(20), smoothing_hint=True)
    rows, since = storage.rows(window_size=20)
    assert rows == [(19, {"loss": 9.5})]
    assert storage.rows(since=since) == ([], since)


def test_a_series_put_at_each_iteration_is_one_row_at_the_last(storage):
    put_series(storage, "lr", range(20), smoothing_hint=False)
    rows, since = storage.rows()
    assert rows == [(19, {"lr": 19.0})]
    put_series(storage, "lr", range(20, 40), smoothing_hint=False)
    assert storage.rows(since=since)[0] == [(39, {"lr": 39.0})]


def test_every_value_of_a_sparse_metric_is_a_row(storage):
    put_series(storage, "accuracy", (3, 8, 13), smoothing_hint=False)
    rows, since = storage.rows()
    assert rows == [(3, {"accuracy": 3.0}), (8, {"accuracy": 8.0}), (13, {"accuracy": 13.0})]
    put_series(storage, "accuracy", (18,), smoothing_hint=False)
    assert storage.rows(since=since)[0] == [(18, {"accuracy": 18.0})]


def test_metrics_of_an_iteration_share_its_row_and_rows_ascend(storage):
    put_series(storage, "loss", range(10), smoothing_hint=True)
    put_series(storage, "accuracy", (4, 9), smoothing_hint=False)
    rows, _ = storage.rows(window_size=1)
    assert rows == [(4, {"accuracy": 4.0}), (9, {"accuracy": 9.0, "loss": 9.0})]


def test_two_readers_each_get_every_value(storage):
    put_series(storage, "accuracy", (1, 3), smoothing_hint=False)
    first, since = storage.rows()
    put_series(storage, "accuracy", (5,), smoothing_hint=False)
    assert [row[0] for row in first + storage.rows(since=since)[0]] == [1, 3, 5]
    assert [row[0] for row in storage.rows()[0]] == [1, 3, 5]


# ---------------------------------------------------------------------------- images, histograms, texts


def test_images_histograms_and_texts_wait_for_writers(storage):
    storage.iter = 4
    image = torch.rand(3, 2, 2)
    storage.put_image("image", image)
    storage.put_histogram("hist", torch.tensor([0.0, 1.0, 1.0, 4.0]), bins=4)
    storage.put_text("text", "hello")
    image.zero_()
    ((name, kept, iteration),) = storage._vis_data
    assert (iteration, name) == (4, "image")
    assert kept.sum() > 0
    (hist,) = storage._histograms
    assert hist["global_step"] == 4
    assert list(storage._texts) == [("text", "hello", 4)]
    assert hist["bucket_counts"] == [1, 2, 0, 1]
    assert hist["bucket_limits"] == [1, 2, 3, 4]
    assert (hist["min"], hist["max"], hist["num"], hist["sum"], hist["sum_squares"]) == (0, 4, 4, 6, 18)
    storage.clear_media()
    assert not storage._vis_data
    assert not storage._histograms
    assert not storage._texts


def test_a_custom_writer_can_clear_images_and_histograms(storage):
    storage.put_image("image", torch.rand(3, 2, 2))
    storage.put_histogram("hist", torch.rand(4))
    assert [(name, iteration) for name, _, iteration in storage._vis_data] == [("image", 0)]
    storage.clear_images()
    storage.clear_histograms()
    assert not storage._vis_data
    assert not storage._histograms


# ---------------------------------------------------------------------------- state


def test_unwritten_values_are_kept_over_a_resume(storage):
    put_series(storage, "accuracy", (3, 7, 15), smoothing_hint=False)
    _, taken = storage.rows()
    put_series(storage, "accuracy", (20, 24, 31), smoothing_hint=False)
    with EventStorage(32) as resumed:
        resumed.load_state_dict(storage.state_dict())
        assert resumed.rows(since=taken) == storage.rows(since=taken)
        assert [iteration for iteration, _ in resumed.rows(since=taken)[0]] == [20, 24, 31]


def test_a_state_has_as_many_values_as_the_longest_window(storage):
    put_series(storage, "loss", range(10_500), smoothing_hint=True)
    with EventStorage(10_500) as resumed:
        resumed.load_state_dict(storage.state_dict())
        assert resumed.rows(MeanWindow(10_000))[0] == [(10_499, {"loss": 5499.5})]


def test_a_state_has_images_only_if_a_writer_takes_them(storage):
    storage.put_image("image", torch.zeros(1, 2, 2))
    assert "images" not in storage.state_dict()
    storage.saves_media = True
    with EventStorage() as resumed:
        resumed.load_state_dict(storage.state_dict())
        assert [(name, iteration) for name, _, iteration in resumed._vis_data] == [("image", 0)]


# ---------------------------------------------------------------------------- memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_length_of_a_run():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    values = {f"metric_{i}": float(i) for i in range(10)}
    with EventStorage() as storage:

        def put(start, stop):
            for iteration in range(start, stop):
                storage.put_scalars(**values, cur_iter=iteration, smoothing_hint=iteration % 2 == 0)
            storage.latest()

        put(0, 40_000)
        before = resident()
        put(40_000, 200_000)
        assert resident() - before < 8 * 2**20  # 1.6 million values kept would be 25 MiB at the very least
        for i in range(1000):
            storage.put_image("image", torch.zeros(1, 1, 1))
            storage.put_scalar("sparse", 1.0, smoothing_hint=False, cur_iter=3 * i)
        assert len(storage._vis_data) <= 64


def test_replaced_values_are_read():
    with EventStorage() as storage:
        for iteration, loss in enumerate((1.0, float("nan"), 3.0)):
            storage.iter = iteration
            storage.put_scalar("loss", loss)
        assert math.isnan(storage.latest_with_smoothing_hint()["loss"][0])
        storage.replace("loss", {0: 2.0, 1: 4.0, 2: 6.0})
        assert storage.latest_with_smoothing_hint()["loss"][0] == 4.0
        assert storage.rows()[0] == [(2, {"loss": 4.0})]


def test_replaced_values_without_smoothing_are_written():
    with EventStorage() as storage:
        for storage.iter in (0, 3, 7):
            storage.put_scalar("rare", float(storage.iter), smoothing_hint=False, over_ranks="mean")
        storage.put_scalar("other", 1.0, smoothing_hint=False)
        assert storage.over_ranks == {"rare": "mean"}
        assert storage.rows()[0][1] == (3, {"rare": 3.0})
        storage.replace("rare", {3: 5.0, 7: 6.0})
        assert storage.rows()[0] == [(0, {"rare": 0.0}), (3, {"rare": 5.0}), (7, {"rare": 6.0, "other": 1.0})]


def test_an_unknown_way_to_combine_ranks_is_an_error():
    with EventStorage() as storage, pytest.raises(ValueError, match="must be one of mean, sum, max, min, not 'avg'"):
        storage.put_scalar("accuracy", 0.5, over_ranks="avg")


def test_values_from_a_device_are_not_rounded():
    values = {"num_items": torch.tensor(2**24 + 1), "loss": torch.tensor(0.5), "double": torch.tensor(0.1).double() / 3}
    expected = {name: value.item() for name, value in values.items()}
    fetch_tensors([(0, values, True)])
    assert values == expected
    assert all(type(value) is float for value in values.values())


@pytest.mark.parametrize("junk", ["x", {}, {"histories": {"loss": {"values": "x"}}}, {"histories": 3}])
def test_a_state_of_something_else_is_rejected(junk):
    with pytest.raises(ConfigError, match="the metrics in the checkpoint cannot be loaded"):
        EventStorage().load_state_dict(junk)


def test_private_names_of_detectron2_can_be_read():
    with EventStorage(3) as storage:
        storage.put_scalars(a=1.0, b=torch.tensor(2.0))
        assert storage._latest_scalars["b"] == (2.0, 3)
        assert "a" in storage._history
        assert storage.history("a")._data[-1] == (1.0, 3)


def test_histories_by_prefix_and_reset():
    storage = EventStorage(0)
    storage.put_scalars(**{"train/loss": 1.0, "val/loss": float("nan")})
    assert list(storage.histories("val/")) == ["val/loss"]
    storage.reset("val/")
    assert list(storage.histories()) == ["train/loss"]
    assert storage.rows()[0] == [(0, {"train/loss": 1.0})]
    storage.put_scalar("val/loss", 2.0)
    assert storage.latest()["val/loss"] == (2.0, 0)
    storage.reset()
    assert storage.latest() == {}
    assert storage.rows() == ([], storage.rows()[1])


def test_a_histogram_leaves_out_values_that_are_not_finite(caplog):
    storage = EventStorage(0)
    for name, values in (("empty", []), ("some", [1.0, float("nan"), 3.0, float("inf")]), ("none", [float("nan")])):
        storage.put_histogram(name, torch.tensor(values), bins=2)
    (found,) = storage._histograms
    assert (found["tag"], found["num"], found["max"], found["bucket_counts"]) == ("some", 2, 3.0, [1.0, 1.0])
    assert "some: 2 of 4 values are NaN or infinite" in caplog.text


# ---------------------------------------------------------------------------- tables


@pytest.fixture
def filled():
    storage = EventStorage()
    for iteration in range(4):
        storage.put_scalar("loss", 1.0 - iteration / 4, cur_iter=iteration)
    storage.put_scalar("test/accuracy", 0.5, smoothing_hint=False, cur_iter=2)
    storage.put_scalar("test/accuracy", 0.75, smoothing_hint=False, cur_iter=2)
    return storage


def test_a_history_as_arrays(filled):
    iterations, values = filled.history("loss").arrays()
    assert iterations.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [1.0, 0.75, 0.5, 0.25]


def test_metrics_as_a_table(filled):
    pytest.importorskip("pandas")
    table = filled.to_pandas()
    assert list(table.columns) == ["loss", "test/accuracy"]
    assert (table.index.name, list(table.index)) == ("iteration", [0, 1, 2, 3])
    assert table["loss"].tolist() == [1.0, 0.75, 0.5, 0.25]
    assert table["test/accuracy"].dropna().to_dict() == {2: 0.75}
    assert list(filled.to_pandas("test/").index) == [2]
    assert len(EventStorage().to_pandas()) == 0


# ---------------------------------------------------------------------------- outside of training


class Puts(HookBase):
    def __init__(self):
        self.events = []

    def put(self, event):
        self.events.append(event)
        self.trainer.storage.put_scalar("seen", 1.0)

    def before_eval(self):
        self.put("before_eval")

    def after_eval(self, results):
        self.put("after_eval")

    def before_predict(self):
        self.put("before_predict")

    def after_predict(self, results):
        self.put("after_predict")


def test_hooks_may_put_metrics_in_an_evaluation_or_prediction_outside_of_training(tmp_path):
    data = TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
    hook = Puts()
    trainer = Trainer(nn.Linear(2, 1), test_data=data, loss=nn.MSELoss(), hooks=[hook], output_dir=tmp_path)
    trainer.evaluate()
    trainer.predict()
    assert hook.events == ["before_eval", "after_eval", "before_predict", "after_predict"]
