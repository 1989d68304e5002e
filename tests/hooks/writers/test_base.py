import json
import math
import os
import time

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from hookline.engine import TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import (
    CallbackHook,
    EventStorage,
    EventWriter,
    HookBase,
    JSONWriter,
    PeriodicCheckpointer,
    PeriodicWriter,
    TensorboardXWriter,
    get_event_storage,
)


class Losses(TrainerBase):
    """The loss is the iteration."""

    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


class Puts(HookBase):
    """Puts ``name`` = 1 at an event, at one iteration or at each."""

    def __init__(self, event, name, at=None):
        self.name, self.at = name, at
        setattr(self, event, self.put)

    def put(self, *args):
        if self.at is None or self.trainer.iter == self.at:
            self.trainer.storage.put_scalar(self.name, 1.0, smoothing_hint=False)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(rows, name):
    return [row["iteration"] for row in rows if name in row]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    events.Reload()
    return events


def steps(folder, name):
    return [event.step for event in scalars(folder).Scalars(name)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.json"


class Detectron2Writer(EventWriter):
    """Reads images and histograms like detectron2's TensorBoard writer."""

    def __init__(self):
        self.images, self.histograms = [], []

    def write(self):
        storage = get_event_storage()
        if len(storage._vis_data) >= 1:
            for name, image, step in storage._vis_data:
                self.images.append((name, tuple(image.shape), step))
            storage.clear_images()
        if len(storage._histograms) >= 1:
            for parameters in storage._histograms:
                self.histograms.append(parameters)
            storage.clear_histograms()


def run(path, start=0, stop=50, period=20, hooks=(), last_hooks=()):
    trainer = Losses()
    trainer.register_hooks([*hooks, PeriodicWriter([JSONWriter(str(path))], period), *last_hooks])
    trainer.train(start, stop)
    return read(path)


# ---------------------------------------------------------------------------- metrics.json


def test_rows_are_written_every_period_and_at_the_last_step(path):
    rows = run(path)
    assert [row["iteration"] for row in rows] == [19, 39, 49]
    assert [row["loss"] for row in rows] == [9.5, 29.5, 39.5]


def test_a_line_has_the_iteration_and_then_the_metrics_by_name(path):
    with EventStorage(3) as storage:
        storage.put_scalars(b=2, a=1, smoothing_hint=False)
        JSONWriter(str(path)).write()
    assert path.read_text() == '{"iteration": 3, "a": 1.0, "b": 2.0}\n'


@pytest.mark.parametrize("at", [5, 19, 49])
@pytest.mark.parametrize("event", ["before_step", "after_step"])
def test_a_metric_of_a_hook_after_the_writer_is_written_with_its_iteration(path, event, at):
    rows = run(path, last_hooks=[Puts(event, "late", at)])
    assert places(rows, "late") == [at]
    iterations = [row["iteration"] for row in rows]
    assert iterations == sorted({*iterations})


def test_metrics_put_after_training_are_written_after_the_last_step(path):
    rows = run(path, hooks=[Puts("after_train", "early")], last_hooks=[Puts("after_train", "late")])
    assert [row["iteration"] for row in rows] == [19, 39, 49, 50]
    assert rows[-1] == {"iteration": 50, "early": 1.0, "late": 1.0}


def test_every_value_of_a_sparse_metric_is_written_once(path):
    hooks = [Puts("after_step", f"at_{at}", at) for at in (0, 7, 19, 20, 33, 49)]
    rows = run(path, hooks=hooks)
    for at in (0, 7, 19, 20, 33, 49):
        assert places(rows, f"at_{at}") == [at]


def test_the_metrics_of_a_failed_run_are_written_up_to_its_failure(path):
    class Fails(HookBase):
        def after_step(self):
            if self.trainer.iter == 25:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(path, last_hooks=[Fails()])
    rows = read(path)
    assert [row["iteration"] for row in rows] == [19, 25]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_are_null(path, value):
    with EventStorage() as storage:
        storage.put_scalars(loss=torch.tensor(value))
        JSONWriter(str(path)).write()
    assert path.read_text() == '{"iteration": 0, "loss": null}\n'


def test_a_file_with_nan_as_hookline_0_1_wrote_it_is_resumed(path):
    path.write_text('{"iteration": 9, "loss": NaN}\n{"iteration": 19, "loss": Infinity}\n')
    JSONWriter(str(path)).resume(15)
    assert path.read_text() == '{"iteration": 9, "loss": NaN}\n'


def test_late_values_of_iterations_already_written_go_to_the_next_row(path):
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0, cur_iter=19)
        writer.write()
        storage.put_scalar("late", 2.0, cur_iter=10)
        storage.put_scalar("loss", 3.0, cur_iter=39)
        storage.iter = 39
        writer.write()
    rows = read(path)
    assert [row["iteration"] for row in rows] == [19, 39]
    assert rows[1]["late"] == 2.0


def test_a_write_with_nothing_new_adds_no_row(path):
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        for _ in range(3):
            writer.write()
    assert len(read(path)) == 1


def test_a_writer_used_for_two_runs_writes_both(path):
    writer = JSONWriter(str(path))

    def run(start):  # the new storage may have the address of the old one
        with EventStorage(start) as storage:
            storage.put_scalar("loss", float(start))
            writer.write()

    for start in range(5):
        run(start)
    assert [(row["iteration"], row["loss"]) for row in read(path)] == [(i, float(i)) for i in range(5)]


def test_a_trainer_trained_twice_writes_both_runs(path):
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([JSONWriter(str(path))], 5)])
    trainer.train(0, 10)
    trainer.train(10, 20)
    assert [row["iteration"] for row in read(path)] == [4, 9, 14, 19]


def test_a_closed_writer_reopens(path):
    writer = JSONWriter(str(path))
    for iteration in range(2):
        with EventStorage(iteration) as storage:
            storage.put_scalar("a", 1)
            writer.write()
            writer.close()
            writer.close()
    assert len(path.read_text().splitlines()) == 2


# ---------------------------------------------------------------------------- resuming metrics.json


def test_a_resumed_run_writes_no_iteration_twice(path):
    run(path, 0, 50)
    rows = run(path, 30, 60)
    assert [row["iteration"] for row in rows] == [19, 39, 59]
    assert rows[1]["loss"] == 34.5  # the resumed run's


def test_rows_from_the_restart_iteration_on_are_removed(path):
    path.write_text("".join(json.dumps({"iteration": i, "a": 1}) + "\n" for i in (9, 19, 29, 30)))
    JSONWriter(str(path)).resume(29)
    assert [row["iteration"] for row in read(path)] == [9, 19]


@pytest.mark.parametrize(
    "torn",
    ['{"iteration": 29, "lo', '{"iteration": 29}', "\x00\x00\x00", "not json\n", "[1]\n", '{"iteration": "1"}\n'],
)
def test_an_incomplete_line_is_removed(path, torn):
    path.write_text('{"iteration": 19}\n' + torn)
    JSONWriter(str(path)).resume(100)
    assert path.read_text() == '{"iteration": 19}\n'


def test_a_file_that_ends_in_invalid_text_is_repaired(path):
    path.write_bytes(b'{"iteration": 19}\n\xff\xfe\x80')
    JSONWriter(str(path)).resume(100)
    assert path.read_text() == '{"iteration": 19}\n'


def test_a_run_from_the_start_keeps_the_old_file_under_another_name(path):
    path.write_text('{"iteration": 19, "old": 1}\n')
    rows = run(path, 0, 10)
    assert [row["iteration"] for row in rows] == [9]
    assert path.with_name("metrics.json.old").read_text() == '{"iteration": 19, "old": 1}\n'


def test_a_file_without_rows_to_remove_is_unchanged(path):
    path.write_text('{"iteration": 19}\n')
    before = path.stat().st_ino
    JSONWriter(str(path)).resume(20)
    assert path.stat().st_ino == before
    assert path.read_text() == '{"iteration": 19}\n'


def test_a_resume_without_a_file_creates_none(path):
    JSONWriter(str(path)).resume(20)
    assert not path.exists()


def test_a_failed_removal_of_rows_leaves_the_file_unchanged(path, monkeypatch):
    text = '{"iteration": 19}\n{"iteration": 39}\n'
    path.write_text(text)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        JSONWriter(str(path)).resume(20)
    assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["metrics.json"]


# ---------------------------------------------------------------------------- PeriodicWriter


class Recorder(EventWriter):
    def __init__(self, fail_close=False):
        self.calls = []
        self.fail_close = fail_close

    def resume(self, start_iter):
        self.calls.append(("resume", start_iter))

    def write(self):
        self.calls.append(("write", get_event_storage().iter))

    def close(self):
        self.calls.append(("close", None))
        if self.fail_close:
            raise OSError("cannot close")


def test_writers_are_resumed_written_and_closed_in_turn():
    writer, trainer = Recorder(), Losses()
    trainer.register_hooks([PeriodicWriter([writer], period=4)])
    trainer.train(2, 10)
    assert writer.calls == [
        ("resume", 2),
        ("write", 3),
        ("write", 7),
        ("write", 9),
        ("write", 10),
        ("close", None),
    ]


def test_all_writers_are_closed_when_one_fails():
    first, second, trainer = Recorder(fail_close=True), Recorder(), Losses()
    trainer.register_hooks([PeriodicWriter([first, second])])
    with pytest.raises(OSError, match="cannot close"):
        trainer.train(0, 3)
    assert second.calls[-1] == ("close", None)


def test_writers_write_when_any_hook_requests_it():
    writer, trainer = Recorder(), Losses()
    request = CallbackHook(after_step=lambda trainer: trainer.request_write() if trainer.iter == 5 else None)
    trainer.register_hooks([request, PeriodicWriter([writer], period=0)])
    trainer.train(0, 10)
    assert [at for call, at in writer.calls if call == "write"] == [5, 9, 10]


def test_after_write_gets_the_metrics_that_were_written():
    seen, trainer = [], Losses()
    after_write = CallbackHook(after_write=lambda trainer, metrics: seen.append((trainer.iter, dict(metrics))))
    trainer.register_hooks([PeriodicWriter([], period=2), after_write])
    trainer.train(0, 4)
    assert seen[:2] == [(1, {"loss": 0.5}), (3, {"loss": 1.5})]


def test_an_object_that_is_not_a_writer_is_an_error():
    with pytest.raises(TypeError, match=r"EventWriters, not 'metrics.json'"):
        PeriodicWriter(["metrics.json"])


# ---------------------------------------------------------------------------- TensorBoard


def test_tensorboard_gets_every_value_once(tmp_path):
    trainer = Losses()
    trainer.register_hooks(
        [
            PeriodicWriter([TensorboardXWriter(str(tmp_path))], 20),
            Puts("after_step", "sparse", 7),
            Puts("after_train", "end"),
        ]
    )
    trainer.train(0, 50)
    events = scalars(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(19, 9.5), (39, 29.5), (49, 39.5)]
    assert [e.step for e in events.Scalars("train/sparse")] == [7]
    assert [e.step for e in events.Scalars("train/end")] == [50]


def test_tensorboard_events_are_in_the_file_when_a_writer_has_written(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    with EventStorage(3) as storage:
        storage.put_scalar("a", 1.0)
        writer.write()
        assert steps(tmp_path, "train/a") == [3]
    writer.close()


def test_code_that_uses_the_summary_writer_itself_writes_to_the_same_file(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    writer.resume(5)
    with EventStorage(7) as storage:
        storage.put_scalar("a", 1.0)
        writer.write()
    writer._writer.add_image("image", torch.rand(3, 4, 4), 8)
    writer._writer.add_scalar("b", 2.0, 9)
    writer._writer.flush()
    assert len(list(tmp_path.iterdir())) == 1
    events = scalars(tmp_path)
    assert [e.step for e in events.Images("image")] == [8]
    assert (steps(tmp_path, "train/a"), steps(tmp_path, "b")) == ([7], [9])
    writer.close()


def test_tensorboard_points_have_the_time_they_were_collected_at(tmp_path):
    class Notes(HookBase):
        def after_step(self):
            times.append(time.time())

    times, trainer = [], Losses()
    trainer.register_hooks([Notes(), PeriodicWriter([TensorboardXWriter(str(tmp_path))], 1)])
    trainer.register_hooks([CallbackHook(before_step=lambda trainer: time.sleep(0.02))])
    trainer.train(0, 4)
    walls = [event.wall_time for event in scalars(tmp_path).Scalars("train/loss")][:4]
    assert all(put <= wall for put, wall in zip(times, walls, strict=True))
    assert all(wall < put for put, wall in zip(times[1:], walls, strict=False))


def test_after_a_resume_tensorboard_shows_one_line(tmp_path):
    for start, stop in ((0, 50), (30, 60)):
        trainer = Losses()
        trainer.register_hooks([PeriodicWriter([TensorboardXWriter(str(tmp_path))], 10)])
        trainer.train(start, stop)
    assert steps(tmp_path, "train/loss") == [9, 19, 29, 39, 49, 59]


def test_using_tensorboard_after_a_resumed_run_does_not_hide_its_points(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([writer], 10)])
    trainer.train(0, 30)
    trainer.register_hooks([CallbackHook(after_run=lambda trainer: writer._writer.add_text("note", "done", 59))])
    trainer.train(30, 60)
    writer.close()
    assert steps(tmp_path, "train/loss") == [9, 19, 29, 39, 49, 59]
    assert [event.step for event in scalars(tmp_path).Tensors("note/text_summary")] == [59]


def put_media(storage):
    storage.put_image("image", torch.rand(3, 4, 4))
    storage.put_histogram("hist", torch.arange(10.0))
    storage.put_text("text", "hello")


def media(folder):
    events = scalars(folder)
    return (
        [e.step for e in events.Images("image")],
        [e.step for e in events.Histograms("hist")],
        [e.step for e in events.Tensors("text/text_summary")],
    )


def test_each_writer_gets_images_histograms_and_texts_once(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    trainer = Losses()
    at_3 = CallbackHook(after_step=lambda trainer: put_media(trainer.storage) if trainer.iter == 3 else None)
    trainer.register_hooks([PeriodicWriter([TensorboardXWriter(str(folder)) for folder in folders], 2), at_3])
    trainer.train(0, 10)
    for folder in folders:
        assert media(folder) == ([3], [3], [3])


def test_images_of_a_second_run_are_written_too(tmp_path):
    trainer = Losses()

    def put(trainer):
        if trainer.iter == trainer.start_iter:
            put_media(trainer.storage)

    trainer.register_hooks([PeriodicWriter([TensorboardXWriter(str(tmp_path))], 20), CallbackHook(after_step=put)])
    trainer.train(0, 10)
    trainer.train(10, 40)
    assert media(tmp_path) == ([0, 10], [0, 10], [0, 10])


def test_writers_without_a_path_use_the_runs_folder(tmp_path):
    with EventStorage() as storage:
        storage.put_scalar("a", 1)
        for writer in (JSONWriter(output_dir=str(tmp_path)), TensorboardXWriter(output_dir=str(tmp_path))):
            writer.write()
            writer.close()
    assert len(read(tmp_path / "metrics.json")) == 1
    assert steps(tmp_path, "train/a") == [0]


def test_a_writer_made_for_detectron2_reads_images_and_histograms(tmp_path):
    writer, trainer = Detectron2Writer(), Losses()

    def put(trainer):
        if trainer.iter in (3, 5):
            put_media(trainer.storage)

    trainer.register_hooks([PeriodicWriter([writer], 2), CallbackHook(after_step=put)])
    trainer.train(0, 10)
    assert writer.images == [("image", (3, 4, 4), 3), ("image", (3, 4, 4), 5)]
    assert [(values["tag"], values["global_step"], values["num"]) for values in writer.histograms] == [
        ("hist", 3, 10),
        ("hist", 5, 10),
    ]
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as summary:
        for values in writer.histograms:
            summary.add_histogram_raw(**values)
    assert [event.step for event in scalars(tmp_path).Histograms("hist")] == [3, 5]


# ---------------------------------------------------------------------------- state


def test_a_resumed_writer_writes_no_value_twice(path):
    """The storage's state has the latest values; the writer's state has those that are written."""
    first, second = JSONWriter(str(path)), JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("accuracy", 0.5, smoothing_hint=False, cur_iter=10)
        storage.put_scalar("loss", 1.0, cur_iter=19)
        first.write()
        states = storage.state_dict(), first.state_dict()
    first.close()
    with EventStorage(20) as storage:
        storage.load_state_dict(states[0])
        second.load_state_dict(states[1])
        second.resume(20)
        storage.put_scalar("loss", 2.0, cur_iter=39)
        second.write()
    second.close()
    rows = read(path)
    assert [row["iteration"] for row in rows] == [10, 19, 39]
    assert places(rows, "accuracy") == [10]


def test_a_resumed_writer_knows_the_last_iteration_it_wrote(path):
    first, second = JSONWriter(str(path)), JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0, cur_iter=15)
        first.write()
        storage.put_scalar("sparse", 3.0, smoothing_hint=False, cur_iter=17)  # not written when this is saved
        states = storage.state_dict(), first.state_dict()
        first.write()
    first.close()
    with EventStorage(20) as storage:
        storage.load_state_dict(states[0])
        second.load_state_dict(states[1])
        second.resume(20)
        second.write()
    second.close()
    rows = read(path)
    assert [row["iteration"] for row in rows] == [15, 17]
    assert places(rows, "sparse") == [17]


# ---------------------------------------------------------------------------- writers of detectron2's projects


class OwnLines(JSONWriter):
    """Does not call ``__init__`` of its base, and opens its file itself."""

    def __init__(self, path):
        self._file_handle = path.open("a")

    def write(self):
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        new = {name: value for name, (value, iteration) in latest.items() if iteration > self._last_write}
        self._last_write = max(iteration for _, iteration in latest.values())
        self._file_handle.write(json.dumps(new) + "\n")
        self._file_handle.flush()


class OwnEvents(TensorboardXWriter):
    """Does not call ``__init__`` of its base, and makes its SummaryWriter itself."""

    def __init__(self, log_dir):
        self._writer = SummaryWriter(log_dir)

    def write(self):
        for name, (value, iteration) in get_event_storage().latest().items():
            self._writer.add_scalar(f"mine/{name}", value, iteration)


def test_writers_that_open_their_files_themselves_write_and_resume(tmp_path):
    for start, end in ((0, 4), (4, 8)):
        trainer = Losses()
        checkpointer = Checkpointer(nn.Linear(1, 1), str(tmp_path), trainer=trainer)
        writers = [OwnLines(tmp_path / "own.json"), OwnEvents(str(tmp_path / "events"))]
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 4), PeriodicWriter(writers, period=2)])
        if start:
            checkpointer.resume_or_load("", resume=True)
        trainer.train(start, end)
    lines = [json.loads(line) for line in (tmp_path / "own.json").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [0.5, 1.5, 2.5, 3.5]
    assert len(list((tmp_path / "events").iterdir())) == 2
