"""What writers of rows write and when, through metrics.json; the lines of the console."""

import pytest
from metric_runs import Losses, TotalLosses, at, iterations_of, put, rows_of, train_losses, write

from hookline.hooks import (
    CallbackHook,
    CommonMetricPrinter,
    EvalHook,
    EventStorage,
    EventWriter,
    JSONWriter,
    PeriodicWriter,
    get_event_storage,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.json"


def places(rows, name):
    return [row["iteration"] for row in rows if name in row]


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


def test_what_is_put_after_its_row_is_in_the_row_of_the_next_iteration(path):
    written = []

    def after_write(trainer, metrics):
        written.append((trainer.iter, dict(metrics)))
        if trainer.iter == 19:
            trainer.storage.put_scalar("seconds", 3.0)

    train_losses(PeriodicWriter([JSONWriter(str(path))], 20), CallbackHook(after_write=after_write))
    seconds = {row["iteration"]: row.get("seconds") for row in rows_of(path)}
    assert seconds == {19: None, 20: 3, 39: None, 49: None}
    assert written[0] == (19, {"loss": 9.5})


def test_a_trainer_trained_twice_and_a_run_resumed_by_hand_write_each_iteration_once(path):
    trainer = write([JSONWriter(str(path))], 5, end=10)
    trainer.train(10, 22)
    assert iterations_of(path) == [4, 9, 14, 19, 21]
    write([JSONWriter(str(path))], 5, start=12, end=20)
    assert [(row["iteration"], row["loss"]) for row in rows_of(path)] == [(4, 2.0), (9, 4.5), (14, 13.0), (19, 15.5)]


class Recorder(EventWriter):
    def __init__(self):
        self.calls = []

    def resume(self, start_iter):
        self.calls.append(("resume", start_iter))

    def write(self):
        self.calls.append(("write", get_event_storage().iter))

    def close(self):
        self.calls.append(("close", None))


def test_a_writer_of_ones_own_is_called_at_periods_requests_and_the_end():
    writer = Recorder()
    write([writer], 4, at(5, lambda trainer: trainer.request_write()), start=2, end=10)
    writes = [("write", iteration) for iteration in (3, 5, 7, 9, 10)]
    assert writer.calls == [("resume", 2), *writes, ("close", None)]


@pytest.mark.parametrize("fails", ["the step", "a hook"])
def test_nothing_is_lost_when_a_step_or_a_hook_fails(path, fails):
    class Fails(Losses):
        def run_step(self):
            super().run_step()
            if fails == "the step":
                broken(self)

    def broken(trainer):
        if trainer.iter == 7:
            raise RuntimeError("broken")

    trainer = Fails()
    trainer.register_hooks([PeriodicWriter([JSONWriter(str(path), 1)], 3), CallbackHook(after_step=broken)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 100)
    assert [row["loss"] for row in rows_of(path)] == [2.0, 5.0, 7.0]


def lines(log):
    return [record.getMessage() for record in log.records if record.name == "hookline.hooks.writers.base"]


@pytest.mark.parametrize(
    ("metrics", "max_iter", "line"),
    [
        ({"loss": 0.5, "total_loss": 0.5, "data_time": 0.002}, 10, "iter: 0/10  loss: 0.5  data_time: 2 ms"),
        ({"a_loss": 1.0, "b_loss": 2.0, "total_loss": 3.0}, 10, "iter: 0/10  a_loss: 1  b_loss: 2  total_loss: 3"),
        ({"ce": 0.5, "total_loss": 0.5, "grad_norm": 2.0}, 10, "iter: 0/10  ce: 0.5  grad_norm: 2"),
        ({"ce": 0.5, "dice": 1.0, "total_loss": 1.5}, 10, "iter: 0/10  total_loss: 1.5  ce: 0.5  dice: 1"),
        ({"tokens/s": 123456.7, "lr": 0.1}, 10, "iter: 0/10  tokens/s: 123457  lr: 0.1"),
        ({"time": 0.00000412}, None, "iter: 0  time: 4.12 us"),  # without a last iteration there is no ETA
        ({"time": 0.0321}, 61, "eta: 0:00:01  iter: 0/61  time: 32.1 ms"),
        ({}, 10, "iter: 0/10"),
    ],
)
def test_a_line_shows_all_metrics_times_and_a_single_loss_once(log, metrics, max_iter, line):
    printer = CommonMetricPrinter(max_iter)
    with EventStorage() as storage:
        storage.put_scalars(**metrics)
        printer.write()
        printer.write()  # nothing new
    assert lines(log) == [line]


def test_lines_show_what_hooks_put_but_not_results_of_evaluations(log):
    trainer = TotalLosses(lambda iteration: 0.5)
    late = CallbackHook(after_train=lambda trainer: trainer.storage.put_scalar("late", 3))
    evaluation = EvalHook(2, lambda: {"test": {"accuracy": 0.5}})
    rare = CallbackHook(after_step=lambda trainer: trainer.iter == 1 and trainer.storage.put_scalar("rare", 7))
    trainer.register_hooks([evaluation, rare, late, PeriodicWriter([CommonMetricPrinter(4)], 2)])
    trainer.train(0, 4)
    shown = [line.partition("iter: ")[2] for line in lines(log)]
    assert shown == ["1/4  total_loss: 0.5  rare: 7", "3/4  total_loss: 0.5  rare: 7", "4/4  late: 3"]


def test_the_eta_is_the_median_step_time_of_the_steps_left_and_evaluations(log):
    with EventStorage(9) as storage:
        for iteration, seconds in enumerate([2.0] * 9 + [1000.0]):
            storage.put_scalar("time", seconds, cur_iter=iteration)
        storage.evaluations_left["hook"] = 3600.0
        CommonMetricPrinter(3610).write()
        assert storage.latest()["eta_seconds"] == (10800.0, 9)
    assert lines(log)[0].startswith("eta: 3:00:00  iter: 9/3610")
