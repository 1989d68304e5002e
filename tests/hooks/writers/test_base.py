"""What writers of rows write and when, through metrics.json; the lines of the console."""

import pytest
from metric_runs import iterations_of, put, rows_of, train_losses, write

from hookline.engine import TrainerBase
from hookline.hooks import (
    CommonMetricPrinter,
    EventStorage,
    IterationTimer,
    JSONWriter,
    PeriodicWriter,
    get_event_storage,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.json"


def places(rows, name):
    return [row["iteration"] for row in rows if name in row]


# ---------------------------------------------------------------------- rows


def test_rows_are_written_every_period_and_at_the_last_step_with_every_metric_once(path):
    """Also those of hooks after the writer, and those put after training."""
    sparse = [put(f"at_{at}", at) for at in (0, 7, 19, 20, 33, 49)]
    late = [put(f"{event} {at}", at, event) for event in ("before_step", "after_step") for at in (5, 19, 49)]
    early_end, late_end = put("early", event="after_train"), put("late", event="after_train")
    train_losses(*sparse, early_end, PeriodicWriter([JSONWriter(str(path))], 20), *late, late_end)
    rows = rows_of(path)
    assert [(row["iteration"], row["loss"]) for row in rows if "loss" in row] == [(19, 9.5), (39, 29.5), (49, 39.5)]
    assert all(places(rows, f"at_{at}") == [at] for at in (0, 7, 19, 20, 33, 49))
    assert all(places(rows, f"{event} {at}") == [at] for event in ("before_step", "after_step") for at in (5, 19, 49))
    assert rows[-1] == {"iteration": 50, "early": 1.0, "late": 1.0}
    assert [row["iteration"] for row in rows] == sorted({row["iteration"] for row in rows})


def test_late_values_go_to_the_next_row_and_a_write_with_nothing_new_adds_none(path):
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0, cur_iter=19)
        writer.write()
        writer.write()
        storage.put_scalar("late", 2.0, cur_iter=10)
        storage.put_scalar("loss", 3.0, cur_iter=39)
        storage.iter = 39
        writer.write()
    assert rows_of(path) == [{"iteration": 19, "loss": 1.0}, {"iteration": 39, "late": 2.0, "loss": 3.0}]


def test_a_closed_writer_reopens_and_writes_the_rows_of_another_storage(path):
    writer = JSONWriter(str(path))
    for start in range(5):  # the new storage may have the address of the old one
        with EventStorage(start) as storage:
            storage.put_scalar("loss", float(start))
            writer.write()
        writer.close()
        writer.close()
    assert rows_of(path) == [{"iteration": i, "loss": float(i)} for i in range(5)]


def test_a_trainer_trained_twice_and_a_run_resumed_by_hand_write_each_iteration_once(path):
    trainer = write([JSONWriter(str(path))], 5, end=10)
    trainer.train(10, 22)
    assert iterations_of(path) == [4, 9, 14, 19, 21]
    write([JSONWriter(str(path))], 5, start=12, end=20)
    assert [(row["iteration"], row["loss"]) for row in rows_of(path)] == [(4, 2.0), (9, 4.5), (14, 13.0), (19, 15.5)]


def test_a_resumed_writer_writes_what_was_not_written_when_the_state_was_saved_and_nothing_else(path):
    """The storage's state has the latest values; the writer's state says which of them are written."""
    first, second = JSONWriter(str(path)), JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("accuracy", 0.5, smoothing_hint=False, cur_iter=10)
        storage.put_scalar("loss", 1.0, cur_iter=15)
        first.write()
        storage.put_scalar("sparse", 3.0, smoothing_hint=False, cur_iter=17)
        states = storage.state_dict(), first.state_dict()
        first.write()
    with EventStorage(20) as storage:
        storage.load_state_dict(states[0])
        second.load_state_dict(states[1])
        second.resume(20)
        second.write()
    rows = rows_of(path)
    assert [row["iteration"] for row in rows] == [10, 15, 17]
    assert (places(rows, "accuracy"), places(rows, "sparse")) == ([10], [17])


# ---------------------------------------------------------------------- the console


class Steps(TrainerBase):
    def run_step(self):
        self.storage.put_scalars(total_loss=0.5, loss=0.5, data_time=0.002)
        self.storage.put_scalar("lr", 0.1, smoothing_hint=False)
        self.storage.put_scalar("test/loss", 9.0, smoothing_hint=False)


def lines(log):
    return [record.getMessage() for record in log.records if record.name == "hookline.hooks.writers.base"]


def iterations(log):
    return [line.split("iter: ")[1].split()[0] for line in lines(log)]


def train(trainer, printer, period, *hooks, start=0, end=10):
    trainer.register_hooks([IterationTimer(), PeriodicWriter([printer], period), *hooks])
    trainer.train(start, end)
    return trainer


def test_a_line_per_period_and_one_for_the_last_step(log):
    train(Steps(), CommonMetricPrinter(50), 20, end=50)
    assert iterations(log) == ["19/50", "39/50", "49/50"]
    assert lines(log)[-1].startswith("eta: 0:00:00")


@pytest.mark.parametrize(
    ("metrics", "max_iter", "line"),
    [
        ({"loss": 0.5, "total_loss": 0.5, "data_time": 0.002}, 10, "iter: 0/10  loss: 0.5  data_time: 2 ms"),
        ({"a_loss": 1.0, "b_loss": 2.0, "total_loss": 3.0}, 10, "iter: 0/10  a_loss: 1  b_loss: 2  total_loss: 3"),
        ({"time": 1.5}, None, "iter: 0  time: 1.5 s"),  # without a last iteration there is no ETA
        ({"time": 0.0321}, 61, "eta: 0:00:01  iter: 0/61  time: 32.1 ms"),
        ({"time": 0.00000412}, None, "iter: 0  time: 4.12 us"),
        ({"[metric]depth": 0.25}, None, "iter: 0  [metric]depth: 0.25"),
        ({}, 10, "iter: 0/10"),
    ],
)
def test_a_line_shows_losses_times_and_a_single_loss_once(log, metrics, max_iter, line):
    printer = CommonMetricPrinter(max_iter)
    with EventStorage() as storage:
        storage.put_scalars(**metrics)
        printer.write()
        printer.write()  # nothing new
    assert lines(log) == [line]


def test_the_eta_is_the_median_step_time_times_the_steps_left(log):
    with EventStorage(9) as storage:
        for iteration, seconds in enumerate([2.0] * 9 + [1000.0]):
            storage.put_scalar("time", seconds, cur_iter=iteration)
        CommonMetricPrinter(3610).write()
        assert storage.latest()["eta_seconds"] == (7200.0, 9)
    assert lines(log)[0].startswith("eta: 2:00:00  iter: 9/3610")


def test_projects_of_detectron2_read_and_format_the_eta(log):
    class Short(CommonMetricPrinter):
        def write(self):
            storage = get_event_storage()
            self.logger.info("%s left, loss %.1f", self._get_eta(storage), storage.history("loss").median(20))

    class Soon(CommonMetricPrinter):
        def _get_eta(self, storage):
            return "soon"

    with EventStorage(3) as storage:
        storage.put_scalars(time=2.0, loss=0.5)
        Short(34).write()
        Soon(34).write()
    assert lines(log) == ["0:01:00 left, loss 0.5", "eta: soon  iter: 3/34  loss: 0.5  time: 2 s"]
