import pytest

from hookline.engine import TrainerBase
from hookline.hooks import (
    CallbackHook,
    CommonMetricPrinter,
    EventStorage,
    IterationTimer,
    PeriodicWriter,
    get_event_storage,
)


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalars(total_loss=0.5, loss=0.5, data_time=0.002)
        self.storage.put_scalar("lr", 0.1, smoothing_hint=False)
        self.storage.put_scalar("test/loss", 9.0, smoothing_hint=False)


def lines(log):
    return [record.getMessage() for record in log.records if record.name == "hookline.hooks.writers.console"]


def test_one_line_per_period_and_one_for_the_last_step(log):
    trainer = Losses()
    trainer.register_hooks([IterationTimer(), PeriodicWriter([CommonMetricPrinter(50)], 20)])
    trainer.train(0, 50)
    assert [line.split("iter: ")[1].split()[0] for line in lines(log)] == ["19/50", "39/50", "49/50"]
    assert lines(log)[-1].startswith("eta: 0:00:00")


def test_a_line_shows_losses_times_and_learning_rate_and_a_single_loss_once(log):
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([CommonMetricPrinter(10)])])
    trainer.train(0, 10)
    assert lines(log) == ["iter: 9/10  loss: 0.5  data_time: 2 ms  lr: 0.1"]


def test_several_losses_are_shown_with_their_total(log):
    with EventStorage() as storage:
        storage.put_scalars(loss_a=1.0, loss_b=2.0, total_loss=3.0)
        CommonMetricPrinter(10).write()
    assert lines(log) == ["iter: 0/10  loss_a: 1  loss_b: 2  total_loss: 3"]


def test_times_have_a_readable_unit(log):
    printer = CommonMetricPrinter()
    for iteration, seconds in enumerate((1.5, 0.0321, 0.00000412)):
        with EventStorage(iteration) as storage:
            storage.put_scalar("time", seconds)
            printer.write()
    assert [line.split("time: ")[1] for line in lines(log)] == ["1.5 s", "32.1 ms", "4.12 us"]


def test_without_a_last_iteration_there_is_no_eta(log):
    trainer = Losses()
    trainer.register_hooks([IterationTimer(0), PeriodicWriter([CommonMetricPrinter()], 5)])
    trainer.train(0, 5)
    assert lines(log)[0].startswith("iter: 4  ")
    assert "eta" not in lines(log)[0]


def test_the_eta_is_the_median_step_time_times_the_steps_left(log):
    with EventStorage(9) as storage:
        for iteration, seconds in enumerate([2.0] * 9 + [1000.0]):
            storage.put_scalar("time", seconds, cur_iter=iteration)
        CommonMetricPrinter(3610).write()
        assert storage.latest()["eta_seconds"] == (7200.0, 9)
    assert lines(log)[0].startswith("eta: 2:00:00  iter: 9/3610")


@pytest.mark.parametrize("max_iter", [None, 10])
def test_writing_with_no_metrics_and_twice_in_a_step_is_fine(log, max_iter):
    printer = CommonMetricPrinter(max_iter)
    with EventStorage() as storage:
        printer.write()
        printer.write()
        storage.iter = 1
        printer.write()
    assert len(lines(log)) == 2


def test_a_run_that_fails_at_its_first_step_shows_its_own_error(log):
    class Fails(TrainerBase):
        def run_step(self):
            raise ValueError("the real error")

    trainer = Fails()
    trainer.register_hooks([IterationTimer(), PeriodicWriter([CommonMetricPrinter(10)])])
    with pytest.raises(ValueError, match="the real error"):
        trainer.train(0, 10)
    assert not any("Another exception" in message for message in log.messages)


def test_a_resumed_run_does_not_count_the_time_between_the_runs(log, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hookline.hooks.writers.console.time.perf_counter", lambda: clock[0])

    class Step(TrainerBase):
        def run_step(self):
            clock[0] += 1.0

    trainer = Step()
    trainer.register_hooks([PeriodicWriter([CommonMetricPrinter(1000)], 5)])
    trainer.train(0, 10)
    clock[0] += 1e6
    trainer.train(10, 20)
    assert "eta: 0:16:30  iter: 9/1000" in lines(log)
    assert "eta: 0:16:20  iter: 19/1000" in lines(log)


def test_a_stopped_run_shows_no_progress_after_its_last_step(log):
    stop = CallbackHook(after_step=lambda trainer: trainer.request_stop("enough") if trainer.iter == 9 else None)
    trainer = Losses()
    trainer.register_hooks([IterationTimer(), PeriodicWriter([CommonMetricPrinter(50)], 5), stop])
    trainer.train(0, 50)
    assert [line.split("iter: ")[1].split()[0] for line in lines(log)] == ["4/50", "9/50"]


def test_a_run_with_nothing_left_to_train_shows_no_progress(log):
    first = Losses()
    first.register_hooks([IterationTimer(), PeriodicWriter([CommonMetricPrinter(10)], 5)])
    first.train(0, 10)
    before = len(lines(log))
    second = Losses()
    second.register_hooks([IterationTimer(), PeriodicWriter([CommonMetricPrinter(10)], 5)])
    second.load_state_dict(first.state_dict() | {"storage": first.storage.state_dict()})
    second.train(10, 10)
    assert len(lines(log)) == before


def test_a_printer_of_a_project_reads_the_eta(log):
    class Short(CommonMetricPrinter):
        def write(self):
            storage = get_event_storage()
            self.logger.info("%s left, loss %.1f", self._get_eta(storage), storage.history("loss").median(20))

    with EventStorage(3) as storage:
        storage.put_scalars(time=2.0, loss=0.5)
        Short(34).write()
    assert lines(log) == ["0:01:00 left, loss 0.5"]


def test_a_project_formats_the_eta(log):
    class Soon(CommonMetricPrinter):
        def _get_eta(self, storage):
            return "soon"

    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        Soon(10).write()
    assert lines(log) == ["eta: soon  iter: 0/10  loss: 1"]
