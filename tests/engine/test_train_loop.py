"""The loop: order of events, errors, and the results of a step."""

import copy
import gc
import json
import logging
import weakref

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from torch import nn

from hookline.config import ConfigError
from hookline.engine import AMPTrainer, SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.solver import LRMultiplier
from hookline.hooks import (
    EVENTS,
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    EventStorage,
    FunctionHook,
    HookBase,
    JSONWriter,
    LRScheduler,
    PeriodicWriter,
    StopTraining,
    get_event_storage,
    has_event_storage,
)
from hookline.hooks.base import STEP_EVENTS


class LossModel(nn.Module):
    """Returns a dict of losses, as detectron2's models do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return {"loss": self.fc(x).pow(2).mean()}


def batches(count=4, size=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, 3, generator=generator) for _ in range(count)]


def make_trainer(loader=None, cls=SimpleTrainer, **kwargs):
    torch.manual_seed(0)
    model = LossModel()
    loader = batches() if loader is None else loader
    return cls(model, loader, torch.optim.SGD(model.parameters(), 0.1), **kwargs)


class Recorder(HookBase):
    """Records every event."""

    def __init__(self):
        self.events = []


def _record(event):
    return lambda self, *args, **kwargs: self.events.append(event)


for _event in EVENTS:
    if not _event.endswith("state_dict"):
        setattr(Recorder, _event, _record(_event))

STEP = [
    "before_step",
    "before_fetch",
    "after_fetch",
    "before_forward",
    "after_forward",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
    "before_zero_grad",
    "after_zero_grad",
    "after_step",
]


def test_events_are_called_in_the_documented_order():
    trainer, recorder = make_trainer(batches(2)), Recorder()
    trainer.register_hooks([recorder])
    trainer.train(0, 3)
    assert recorder.events == [
        "on_registered",
        "before_train",
        "before_epoch",
        *STEP,
        *STEP,
        "after_epoch",
        "before_epoch",
        *STEP,
        "after_train",
        "before_write",
        "on_write",
        "after_run",
    ]


def test_micro_batches_repeat_the_events_of_forward_and_backward_only():
    trainer, recorder = make_trainer(batches(1, size=4), accumulation_steps=2), Recorder()
    trainer.register_hooks([recorder])
    trainer.train(0, 1)
    assert [recorder.events.count(event) for event in STEP] == [1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1]


def test_arguments_of_events():
    seen = {}
    trainer = make_trainer()
    trainer.register_hooks(
        [
            CallbackHook(
                after_fetch=lambda t, batch: seen.update(fetched=batch),
                after_forward=lambda t, batch, outputs: seen.update(batch=batch, outputs=outputs),
                before_backward=lambda t, losses: seen.update(losses=losses),
            )
        ]
    )
    trainer.train(0, 1)
    assert seen["fetched"] is seen["batch"]
    assert set(seen["outputs"]) == {"loss"}
    assert seen["losses"] is seen["outputs"]["loss"]


def test_gradients_exist_from_after_backward_to_the_update():
    norms = {}

    def note(name):
        return lambda trainer: norms.update({name: trainer.model.fc.weight.grad})

    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(after_backward=note("backward"), before_optimizer_step=note("final"))])
    trainer.register_hooks([CallbackHook(after_step=note("after"))])
    trainer.train(0, 1)
    assert norms["backward"] is not None
    assert norms["final"] is norms["backward"]
    assert norms["after"] is None


def test_gradients_can_be_read_in_after_step_when_cleared_before_the_forward_pass():
    found = []
    trainer = make_trainer(zero_grad_before_forward=True)
    trainer.register_hooks([CallbackHook(after_step=lambda t: found.append(t.model.fc.weight.grad.norm().item()))])
    trainer.train(0, 2)
    assert all(norm > 0 for norm in found)


def test_storage_iter_is_trainer_iter_through_every_step():
    def check(trainer, *args):
        assert trainer.storage.iter == trainer.iter == get_event_storage().iter

    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(**dict.fromkeys([*STEP, "before_epoch", "after_epoch"], check))])
    assert trainer.train(3, 9).iteration == 9


def test_iter_is_max_iter_after_training_and_the_final_evaluation_is_logged_there():
    trainer = make_trainer()
    seen = []
    trainer.register_hooks([EvalHook(0, lambda: {"accuracy": 0.5})])
    trainer.register_hooks([CallbackHook(after_train=lambda t: seen.append((t.iter, t.storage.latest()["accuracy"])))])
    trainer.train(0, 5)
    assert seen == [(5, (0.5, 5))]


# ---------------------------------------------------------------------------- the end


def test_train_returns_why_and_where_it_ended():
    trainer = make_trainer()
    result = trainer.train(0, 3)
    assert (result.reason, result.iteration) == ("completed", 3)
    assert result.metrics["total_loss"] == result.metrics["loss"] > 0


def test_a_stop_request_stops_after_the_current_step():
    trainer, recorder = make_trainer(), Recorder()
    trainer.register_hooks([CallbackHook(before_step=lambda t: t.request_stop("enough") if t.iter == 2 else None)])
    trainer.register_hooks([recorder])
    result = trainer.train(0, 100)
    assert (result.reason, result.iteration) == ("enough", 3)
    assert recorder.events[-5:] == ["after_step", "after_train", "before_write", "on_write", "after_run"]
    assert trainer.state_dict()["iteration"] == 2


def test_stop_training_raised_by_a_hook_is_a_stop_request():
    trainer, recorder = make_trainer(), Recorder()

    def stop(trainer):
        raise StopTraining("converged")

    trainer.register_hooks([CallbackHook(after_step=stop), recorder])
    result = trainer.train(0, 100)
    assert (result.reason, result.iteration) == ("converged", 1)
    assert recorder.events.count("after_step") == 1, "the hooks after it have their turn"
    assert "on_exception" not in recorder.events


@pytest.mark.parametrize("event", [*STEP_EVENTS, "before_step", "after_step"])
def test_a_step_counts_if_a_hook_stops_training_in_any_of_its_events(event):
    def stop(trainer, *args):
        if trainer.iter == 1:
            raise StopTraining("enough")

    trainer, alone = make_trainer(), make_trainer()
    trainer.register_hooks([CallbackHook(**{event: stop})])
    result = trainer.train(0, 100)
    assert (result.reason, result.iteration, trainer.finished_iter) == ("enough", 2, 1)
    alone.train(0, 2)
    ours, theirs = trainer.model.state_dict(), alone.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("method", ["after_step", "after_epoch"])
def test_stop_training_in_a_trainers_own_method_is_a_stop_request(method):
    class Stops(SimpleTrainer):
        pass

    def stop(self):
        getattr(SimpleTrainer, method)(self)
        if self.iter >= 3:
            raise StopTraining("enough")

    setattr(Stops, method, stop)
    trainer, recorder = make_trainer(cls=Stops), Recorder()
    trainer.register_hooks([recorder])
    result = trainer.train(0, 100)
    assert (result.reason, result.iteration, trainer.finished_iter) == ("enough", 4, 3)
    assert recorder.events.count("after_epoch") == 1


def test_stop_training_raised_by_the_data_discards_the_step():
    def loader():
        yield from batches(2)
        raise StopTraining("no more data")

    result = make_trainer(loader()).train(0, 100)
    assert (result.reason, result.iteration) == ("no more data", 2)


def test_the_first_stop_request_wins():
    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(after_step=lambda t: (t.request_stop("first"), t.request_stop("second")))])
    assert trainer.train(0, 9).reason == "first"


@pytest.mark.parametrize("codes", [(75, 0), (0, 75)])
def test_a_stop_outranks_an_interruption_in_the_same_step(codes):
    trainer = make_trainer()
    stop = CallbackHook(after_step=lambda t: [t.request_stop(f"code {code}", exit_code=code) for code in codes])
    trainer.register_hooks([stop])
    result = trainer.train(0, 9)
    assert (result.reason, result.exit_code, result.iteration) == ("code 0", 0, 1)
    assert trainer.state_dict()["end"]["reason"] == "code 0"


def test_max_iter_can_change_during_training():
    trainer = make_trainer()

    def shorten(trainer):
        trainer.max_iter = 4

    trainer.register_hooks([CallbackHook(before_train=shorten)])
    assert trainer.train(0, 100).iteration == 4


def test_a_stopped_run_has_no_final_evaluation():
    calls = []
    trainer = make_trainer()
    trainer.register_hooks([EvalHook(0, lambda: calls.append(1)), CallbackHook(after_step=lambda t: t.request_stop())])
    trainer.train(0, 9)
    assert calls == []


# ---------------------------------------------------------------------------- errors


class Boom(Exception):
    pass


def raising(message):
    def raise_(trainer, *args):
        raise Boom(message)

    return raise_


def test_every_hook_gets_after_train_and_the_first_error_wins(caplog):
    trainer, recorder = make_trainer(), Recorder()
    trainer.register_hooks(
        [CallbackHook(after_train=raising("second")), recorder, CallbackHook(after_step=raising("first"))]
    )
    with pytest.raises(Boom, match="first") as info:
        trainer.train(0, 3)
    assert recorder.events[-5:] == ["on_exception", "after_train", "before_write", "on_write", "after_run"]
    assert any("second" in note for note in info.value.__notes__)
    assert "second" in caplog.text


def test_an_error_in_after_train_is_raised_when_it_is_the_first():
    trainer, recorder = make_trainer(), Recorder()
    trainer.register_hooks([CallbackHook(after_train=raising("late")), recorder])
    with pytest.raises(Boom, match="late"):
        trainer.train(0, 2)
    assert recorder.events[-5:] == ["on_exception", "after_train", "before_write", "on_write", "after_run"]


def test_an_error_after_the_end_of_the_run_is_raised():
    class Evaluates(SimpleTrainer):
        def after_train(self):
            super().after_train()
            raise Boom("my own test set is missing")

    trainer, recorder = make_trainer(cls=Evaluates), Recorder()
    trainer.register_hooks([recorder])
    with pytest.raises(Boom, match="my own test set"):
        trainer.train(0, 2)
    assert recorder.events[-4:] == ["after_train", "before_write", "on_write", "after_run"]
    assert trainer.completed


def test_hooks_end_if_the_state_of_other_ranks_cannot_be_collected():
    class Alone(SimpleTrainer):
        def _gather_state(self):
            raise Boom("a rank is gone")

        def _end_requests(self):
            super()._end_requests()
            self._ends_together = True
            self._requests["on_save"] = True

    trainer, recorder = make_trainer(cls=Alone), Recorder()
    trainer.register_hooks([recorder])
    with pytest.raises(Boom, match="a rank is gone"):
        trainer.train(0, 2)
    assert recorder.events[-3:] == ["on_exception", "on_save", "after_run"]


def test_an_error_names_the_hook_and_event():
    class Faulty(HookBase):
        def before_step(self):
            raise Boom("x")

    trainer = make_trainer()
    trainer.register_hooks([Faulty()])
    with pytest.raises(Boom) as info:
        trainer.train(0, 2)
    assert info.value.__notes__ == ["(in hook Faulty.before_step, at iteration 0)"]


def test_a_failure_in_the_last_iteration_skips_the_final_evaluation():
    calls = []
    trainer = make_trainer()
    trainer.register_hooks(
        [
            EvalHook(1, lambda: calls.append(1)),
            CallbackHook(before_step=lambda t: raising("last")(t) if t.iter == 2 else None),
        ]
    )
    with pytest.raises(Boom):
        trainer.train(0, 3)
    assert len(calls) == 2


def test_on_exception_receives_the_error_and_keyboard_interrupt():
    seen = []

    def interrupt(trainer):
        raise KeyboardInterrupt

    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(after_step=interrupt, on_exception=lambda t, error: seen.append(type(error)))])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 3)
    assert seen == [KeyboardInterrupt]


def test_a_failing_on_exception_does_not_hide_the_error():
    trainer, recorder = make_trainer(), Recorder()
    trainer.register_hooks([CallbackHook(after_step=raising("first"), on_exception=raising("handler")), recorder])
    with pytest.raises(Boom, match="first"):
        trainer.train(0, 3)
    assert "on_exception" in recorder.events


def test_metrics_before_an_error_are_kept():
    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(before_step=lambda t: raising("x")(t) if t.iter == 3 else None)])
    with pytest.raises(Boom):
        trainer.train(0, 9)
    assert trainer.storage.latest()["loss"][1] == 2


def test_a_failed_run_leaves_no_storage_on_the_stack():
    trainer = make_trainer()

    def fail_in_a_scope(trainer):
        with trainer.storage.name_scope("scope"):
            raise Boom("x")

    hook = CallbackHook(after_step=fail_in_a_scope)
    trainer.register_hooks([hook])
    with pytest.raises(Boom):
        trainer.train(0, 2)
    assert not has_event_storage()
    trainer.remove_hook(hook)
    assert "loss" in trainer.train(0, 2).metrics


def test_nan_losses_stop_the_run_before_the_update():
    trainer = make_trainer([torch.full((2, 3), float("nan"))])
    before = trainer.model.fc.weight.clone()
    with pytest.raises(FloatingPointError, match="iteration 0"):
        trainer.train(0, 5)
    assert torch.equal(trainer.model.fc.weight, before)
    assert str(trainer.storage.latest()["loss"][0]) == "nan"


def poisoned(steps=(1,), count=4):
    data = batches(count)
    for step in steps:
        data[step] = torch.full((2, 3), float("nan"))
    return data


def test_updates_with_non_finite_losses_can_be_skipped():
    trainer = make_trainer(poisoned(steps=(1, 2)), nonfinite="skip")
    result = trainer.train(0, 4)
    assert result.reason == "completed"
    assert result.metrics["nonfinite_steps"] == 2
    assert [str(value) == "nan" for value, _ in trainer.storage.history("loss").values()] == [False, True, True, False]
    clean = make_trainer([batches()[0], batches()[3]])
    clean.train(0, 2)
    assert same(trainer.model.state_dict(), clean.model.state_dict())


def test_a_non_finite_loss_can_stop_training():
    trainer = make_trainer(poisoned(), nonfinite="stop")
    result = trainer.train(0, 4)
    assert "NaN or infinite at iteration 1" in result.reason
    assert result.iteration == 2
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# ---------------------------------------------------------------------------- a second train()


def test_training_a_second_time_works():
    trainer, recorder, calls = make_trainer(), Recorder(), []
    trainer.register_hooks([recorder, CallbackHook(after_train=lambda t: calls.append(t.iter))])
    trainer.train(0, 3)
    first = list(recorder.events)
    trainer.train(3, 5)
    assert calls == [3, 5]
    assert recorder.events[len(first)] == "before_train"


def test_training_a_second_time_keeps_the_row_of_the_final_evaluation(tmp_path):
    trainer, path = make_trainer(), tmp_path / "metrics.json"
    evaluate = EvalHook(0, lambda: {"score": 0.5})
    trainer.register_hooks([evaluate, PeriodicWriter([JSONWriter(str(path))], period=2)])
    for start, end in ((0, 4), (4, 4), (4, 8)):
        trainer.train(start, end)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 3, 4, 5, 7, 8]
    assert [row["iteration"] for row in rows if "score" in row] == [4, 8]


class Judged:
    """A run with a given score for each iteration, and hooks that use it."""

    def __init__(self, scores, folder):
        self.trainer = make_trainer()
        self.called = []
        self.best = BestCheckpointer(0, Checkpointer(self.trainer.model, str(folder)), "score")
        self.stopping = EarlyStopping("score", patience=2)
        once = FunctionHook(lambda t: self.called.append(t.iter), "after_step", once=True)
        evaluate = EvalHook(2, lambda: {"score": scores.pop(0)})
        self.trainer.register_hooks([evaluate, self.stopping, self.best, once])


def test_starting_over_resets_hooks(tmp_path):
    run = Judged([0.9, 0.8, 0.3, 0.4, 0.5], tmp_path)
    run.trainer.train(0, 4)
    assert (run.best.best, run.stopping.count) == ([(0.9, 1)], 1)
    result = run.trainer.train(0, 6)
    assert result.iteration == 6
    assert run.best.best == [(0.5, 6)]
    assert (run.stopping.best, run.stopping.count) == (0.5, 0)
    assert run.called == [0, 0]


def test_a_following_run_keeps_the_state_of_hooks(tmp_path):
    run = Judged([0.9, 0.8, 0.3, 0.4, 0.5], tmp_path)
    run.trainer.train(0, 4)
    assert run.trainer.train(4, 20).reason.startswith("early stopping")
    assert run.best.best == [(0.9, 1)]
    assert run.called == [0]


def lr_seen(trainer):
    """The learning rates of the next steps."""
    seen = []
    trainer.register_hooks([CallbackHook(before_step=lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))])
    return seen


def linear_schedule(kind, trainer, length):
    linear = LinearParamScheduler(1.0, 0.0)
    return linear if kind == "plain" else LRMultiplier(trainer.optimizer, linear, length)


@pytest.mark.parametrize("kind", ["plain", "multiplier"])
def test_the_learning_rate_follows_each_run_of_a_trainer(kind):
    trainer = make_trainer()
    trainer.register_hooks([LRScheduler(scheduler=linear_schedule(kind, trainer, 4))])
    seen = lr_seen(trainer)
    four, eight = ([pytest.approx(0.1 * (1 - it / length)) for it in range(length)] for length in (4, 8))
    trainer.train(0, 4)
    trainer.train(4, 8)  # a longer run
    trainer.train(0, 8)  # from the start
    trainer.train(0, 4)
    assert seen == [*four, *eight[4:], *eight, *four]


@pytest.mark.parametrize("kind", ["plain", "multiplier"])
def test_the_learning_rate_follows_a_changed_max_iter(kind):
    trainer = make_trainer()
    trainer.register_hooks([LRScheduler(scheduler=linear_schedule(kind, trainer, 4))])
    seen = lr_seen(trainer)

    def extend(trainer):
        if trainer.iter == 2:
            trainer.max_iter = 8

    trainer.register_hooks([CallbackHook(after_step=extend)])
    trainer.train(0, 4)
    assert seen[3:] == [pytest.approx(0.1 * (1 - it / 8)) for it in range(3, 8)]


def test_a_schedule_that_cannot_start_over_is_logged(caplog):
    trainer = make_trainer()
    trainer.register_hooks([LRScheduler(scheduler=torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2))])
    trainer.train(0, 4)
    trainer.train(4, 6)
    assert "StepLR continues" not in caplog.text
    trainer.train(0, 4)
    assert "StepLR continues from its position in the earlier run" in caplog.text


def test_the_state_says_how_the_run_ended():
    trainer = make_trainer()
    stop = CallbackHook(after_step=lambda t: t.request_stop("enough") if t.iter == 2 else None)
    trainer.register_hooks([stop])
    trainer.train(0, 9)
    assert trainer.state_dict()["end"] == {"reason": "enough", "iteration": 3, "max_iter": 9, "complete": False}
    trainer.train(3, 9)
    assert trainer.state_dict()["end"]["reason"] == "completed"


def test_an_interrupted_or_failed_run_has_no_end_in_its_state():
    trainer = make_trainer()
    act = CallbackHook(after_step=lambda t: t.request_stop("later", exit_code=75))
    trainer.register_hooks([act])
    trainer.train(0, 9)
    assert "end" not in trainer.state_dict()
    trainer.remove_hook(act)
    trainer.register_hooks([CallbackHook(before_step=raising("no"))])
    with pytest.raises(Boom):
        trainer.train(1, 9)
    assert "end" not in trainer.state_dict()


def test_a_trainer_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        trainer = make_trainer()
        trainer.register_hooks([Recorder(), EvalHook(0, lambda: {})])
        trainer.train(0, 2)
        model = weakref.ref(trainer.model)
        del trainer
        assert model() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------- data


def test_a_finite_loader_restarts():
    epochs = []
    trainer = make_trainer(batches(3))
    trainer.register_hooks([CallbackHook(before_epoch=lambda t: epochs.append((t.iter, t.epoch)))])
    assert trainer.train(0, 7).iteration == 7
    assert epochs == [(0, 0), (3, 1), (6, 2)]


def test_a_loader_without_a_length_has_epochs():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from batches(2)

    seen = []
    trainer = make_trainer(torch.utils.data.DataLoader(Stream(), batch_size=None))
    trainer.register_hooks(
        [
            CallbackHook(
                before_epoch=lambda t: seen.append(("begin", t.iter, t.epoch)),
                after_epoch=lambda t: seen.append(("end", t.iter, t.epoch)),
            )
        ]
    )
    trainer.train(0, 3)
    assert seen == [("begin", 0, 0), ("end", 2, 0), ("begin", 2, 1)]


def test_an_exhausted_generator_is_a_clear_error():
    with pytest.raises(RuntimeError, match="generator that can be read only once"):
        make_trainer(iter(batches(2))).train(0, 5)


def test_skip_epoch_ends_the_epoch_after_the_current_step():
    seen = []
    trainer = make_trainer(batches(10))
    trainer.register_hooks(
        [
            CallbackHook(
                after_step=lambda t: t.skip_epoch() if t.iter == 1 else None,
                before_epoch=lambda t: seen.append((t.iter, t.epoch)),
                after_fetch=lambda t, batch: seen.append(batch),
            )
        ]
    )
    trainer.train(0, 3)
    assert [item for item in seen if isinstance(item, tuple)] == [(0, 0), (2, 1)]
    assert torch.equal(seen[-1], batches(10)[0])


def test_reset_data_loader_continues_with_the_new_loader():
    trainer = make_trainer()
    trainer.train(0, 2)
    trainer.reset_data_loader(lambda: batches(1))
    trainer.train(2, 4)
    assert trainer.iters_per_epoch == 1


def test_a_new_loader_keeps_epoch_count_and_given_length():
    trainer = make_trainer(batches(9), iters_per_epoch=3)
    seen = []
    trainer.register_hooks(
        [
            CallbackHook(
                before_epoch=lambda t: seen.append(("begin", t.iter, t.epoch)),
                after_epoch=lambda t: seen.append(("end", t.iter, t.epoch)),
                after_step=lambda t: t.reset_data_loader(lambda: batches(9)) if t.iter == 4 else None,
            )
        ]
    )
    trainer.train(0, 9)
    assert trainer.iters_per_epoch == 3
    assert seen == [
        *(("begin", 0, 0), ("end", 2, 0), ("begin", 3, 1), ("end", 4, 1)),
        *(("begin", 5, 2), ("end", 7, 2), ("begin", 8, 3)),
    ]


def test_a_new_loader_before_the_first_batch_keeps_the_epoch():
    trainer = make_trainer()
    trainer.reset_data_loader(lambda: batches(2))
    trainer.train(0, 5)
    assert (trainer.epoch, trainer.iters_per_epoch) == (2, 2)


class Quits:
    """Raises when a sample is read."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return torch.ones(3)


@pytest.mark.parametrize(
    ("error", "workers"), [(StopIteration(), 0), (StopIteration(), 1), (SystemExit(0), 0), (SystemExit(), 0)]
)
def test_data_that_stops_or_exits_fails_the_run(error, workers, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # how long torch waits for workers
    loader = torch.utils.data.DataLoader(Quits(error), batch_size=2, num_workers=workers)
    expected = r"ended after 2 of its 4 batches|generator raised StopIteration|sys\.exit"
    with pytest.raises(RuntimeError, match=expected):
        make_trainer(loader).train(0, 20)
    if workers:
        gc.collect()


def test_a_loader_that_ends_before_its_length_fails_the_run():
    class Short(list):
        def __iter__(self):
            return iter(self[:3])

    with pytest.raises(RuntimeError, match="ended after 3 of its 4 batches"):
        make_trainer(Short(batches(4))).train(0, 20)


@pytest.mark.parametrize("event", ["before_train", "after_forward", "after_step", "after_train", "after_run"])
def test_sys_exit_0_in_a_hook_is_an_error(event):
    def leave(trainer, *args):
        raise SystemExit(0)

    trainer, recorder = make_trainer(), Recorder()
    trainer.register_hooks([CallbackHook(**{event: leave}), recorder])
    with pytest.raises(RuntimeError, match=r"sys\.exit\(0\) was called .*test_train_loop\.py:\d+, in leave") as info:
        trainer.train(0, 3)
    assert f"in hook CallbackHook.{event}" in info.value.__notes__[0]
    assert recorder.events[-1] == "after_run"


def test_sys_exit_with_another_code_keeps_the_code():
    def leave(trainer, *args):
        raise SystemExit(75)

    trainer = make_trainer()
    trainer.register_hooks([CallbackHook(after_step=leave)])
    with pytest.raises(SystemExit) as info:
        trainer.train(0, 3)
    assert info.value.code == 75


# ---------------------------------------------------------------------------- what a step computes


def by_hand(steps, loss_of=lambda model, x: model(x)["loss"], dtype=None):
    torch.manual_seed(0)
    model = LossModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = batches()
    for i in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, data[i % len(data)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_equals_a_handwritten_step():
    trainer = make_trainer()
    trainer.train(0, 6)
    assert same(trainer.model.state_dict(), by_hand(6))


def test_bfloat16_equals_handwritten_autocast():
    torch.manual_seed(0)
    model = LossModel()
    trainer = AMPTrainer(model, batches(), torch.optim.SGD(model.parameters(), 0.1), precision=torch.bfloat16)
    assert trainer.grad_scaler is None
    trainer.train(0, 6)
    assert same(model.state_dict(), by_hand(6, dtype=torch.bfloat16))


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_accumulation_equals_the_gradient_of_the_whole_batch(parts):
    whole, cut = make_trainer(batches(2, size=7)), make_trainer(batches(2, size=7), accumulation_steps=parts)
    results = [trainer.train(0, 4) for trainer in (whole, cut)]
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(cut.model.state_dict()[name], value)
    assert results[0].metrics["loss"] == pytest.approx(results[1].metrics["loss"])
    assert results[0].iteration == results[1].iteration


class Tokens(nn.Module):
    """Returns a mean over items, like a language model, and the number of items."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, batch):
        x, counts = batch
        return {"loss": self.fc(x)[counts].pow(2).mean(), "num_items": counts.sum()}


def train_tokens(parts):
    torch.manual_seed(0)
    model = Tokens()
    generator = torch.Generator().manual_seed(1)
    data = [(torch.rand(7, 3, generator=generator), torch.rand(7, generator=generator) > 0.4) for _ in range(3)]
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=parts)
    losses = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: losses.append(t.storage.latest()["loss"][0]))])
    trainer.train(0, 6)
    return model.state_dict(), losses, trainer.storage.latest()["num_items"][0]


@pytest.mark.parametrize("parts", [2, 3])
def test_accumulation_weights_by_counted_items(parts):
    whole, whole_losses, whole_items = train_tokens(1)
    cut, cut_losses, cut_items = train_tokens(parts)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value)
    assert cut_losses == pytest.approx(whole_losses)
    assert cut_items == whole_items


def test_several_optimizers_are_stepped_together_and_saved():
    def make():
        torch.manual_seed(0)
        model = LossModel()
        optimizers = [torch.optim.SGD([model.fc.weight], 0.1), torch.optim.AdamW([model.fc.bias], 0.01)]
        return SimpleTrainer(model, batches(), optimizers)

    trainer = make()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, 1) for opt in trainer.optimizer.optimizers]
    trainer.register_hooks(
        [
            LRScheduler(opt, schedule, name=f"lr{i}")
            for i, (opt, schedule) in enumerate(zip(trainer.optimizer.optimizers, schedulers, strict=True))
        ]
    )
    metrics = trainer.train(0, 3).metrics
    assert all(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert (metrics["lr0"], metrics["lr1"]) == pytest.approx((0.001, 0.0001))
    again = make()
    again.load_state_dict({key: value for key, value in trainer.state_dict().items() if key != "hooks"})
    assert str(again.optimizer.state_dict()) == str(trainer.optimizer.state_dict())


def test_optimizers_that_share_a_parameter_are_an_error():
    model = LossModel()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([model.fc.bias], 0.1)]
    with pytest.raises(ValueError, match="share a parameter"):
        SimpleTrainer(model, batches(), optimizers)


def test_a_clipper_is_called_once_a_step_and_its_norm_is_logged():
    clips = []

    def clip(parameters):
        clips.append(len(parameters))
        return torch.nn.utils.clip_grad_norm_(parameters, 1e-3)

    trainer = make_trainer(clip_gradients=clip)
    trainer.train(0, 3)
    assert clips == [2, 2, 2]
    assert trainer.storage.history("grad_norm").latest() > 0


def test_an_adapter_trains_a_module_with_xy_batches():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(x, torch.tensor([0, 1])) for x in batches()]
    trainer = SimpleTrainer(
        model, data, torch.optim.SGD(model.parameters(), 0.5), adapter=ModelAdapter(nn.CrossEntropyLoss())
    )
    losses = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: losses.append(t.storage.latest()["loss"][0]))])
    trainer.train(0, 60)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert set(model.state_dict()) == {"weight", "bias"}


def test_a_single_loss_is_logged_under_its_own_name():
    trainer = make_trainer()
    trainer.train(0, 1)
    latest = trainer.storage.latest()
    assert latest["loss"] == latest["total_loss"]


def test_several_losses_are_summed():
    class Two(LossModel):
        def forward(self, x):
            return {"a": self.fc(x).pow(2).mean(), "b": self.fc(x).abs().mean()}

    model = Two()
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), 0.1))
    latest = trainer.train(0, 1).metrics
    assert latest["total_loss"] == pytest.approx(latest["a"] + latest["b"])


def test_gather_metric_period_records_fewer_metrics():
    trainer = make_trainer(gather_metric_period=3)
    trainer.train(0, 7)
    assert [it for _, it in trainer.storage.history("loss").values()] == [2, 5]


# ---------------------------------------------------------------------------- prediction


def test_predict_yields_outputs_in_eval_mode_and_emits_events():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9))
    trainer = SimpleTrainer(
        model, batches(), torch.optim.SGD(model.parameters(), 0.1), adapter=ModelAdapter(nn.CrossEntropyLoss())
    )
    recorder, seen = Recorder(), []
    trainer.register_hooks([recorder, CallbackHook(after_predict=lambda t, results: seen.append(results))])
    outputs = list(trainer.predict(batches(3)))
    model.eval()
    assert all(torch.equal(out, model(x)) for out, x in zip(outputs, batches(3), strict=True))
    assert not outputs[0].requires_grad
    assert recorder.events[-3:] == ["before_predict", "on_predict_end", "after_predict"]
    assert seen == [{"batches": 3}]


def test_predict_leaves_the_model_in_training_mode():
    trainer = make_trainer()
    list(trainer.predict(batches(1)))
    assert trainer.model.training


# ---------------------------------------------------------------------------- custom steps


class Bare(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("x", self.iter)


def test_a_trainer_needs_no_model():
    assert Bare().train(0, 5).metrics == {"x": 4.0}


def test_an_event_that_the_step_does_not_emit_is_warned_of_once(caplog):
    class Waits(HookBase):
        def after_backward(self):
            pass

    trainer = Bare()
    trainer.register_hooks([Waits()])
    with caplog.at_level(logging.WARNING):
        trainer.train(0, 5)
    warnings = [record.message for record in caplog.records if "after_backward" in record.message]
    assert len(warnings) == 1
    assert "Waits" in warnings[0]
    assert "Bare.run_step()" in warnings[0]


def test_a_complete_step_causes_no_warning(caplog):
    trainer = make_trainer()
    trainer.register_hooks([Recorder()])
    with caplog.at_level(logging.WARNING):
        trainer.train(0, 2)
    assert caplog.records == []


def test_run_step_must_be_defined():
    with pytest.raises(NotImplementedError, match="TrainerBase must define run_step"):
        TrainerBase().train(0, 1)


# ---------------------------------------------------------------------------- requests


def test_requests_are_served_after_the_step_in_a_fixed_order():
    order = []

    class Serves(HookBase):
        def on_eval(self):
            order.append("eval")

        def on_write(self):
            order.append("write")

        def on_save(self):
            order.append("save")

        def after_epoch(self):
            order.append("epoch")

    trainer = make_trainer(batches(1))
    trainer.register_hooks(
        [CallbackHook(before_step=lambda t: (t.request_save(), t.request_write(), t.request_eval()))]
    )
    trainer.register_hooks([Serves()])
    trainer.train(0, 1)
    assert order == ["epoch", "eval", "write", "save", "write"]


def test_a_requested_evaluation_that_is_due_anyway_happens_once():
    calls = []
    trainer = make_trainer()
    trainer.register_hooks([EvalHook(2, lambda: calls.append(trainer.iter)), CallbackHook(after_step=ask_for_one)])
    trainer.train(0, 5)
    assert calls == [0, 1, 2, 3, 4, 5]


def ask_for_one(trainer):
    trainer.request_eval()


def test_a_checkpoint_holds_the_last_finished_iteration():
    states = []
    trainer = make_trainer()
    trainer.register_hooks(
        [
            CallbackHook(
                before_step=lambda t: states.append(t.state_dict()["iteration"]),
                after_step=lambda t: states.append(t.state_dict()["iteration"]),
                after_train=lambda t: states.append(t.state_dict()["iteration"]),
            )
        ]
    )
    trainer.train(5, 7)
    assert states == [4, 5, 5, 6, 6]


def test_a_resumed_trainer_is_bit_identical():
    def run(until, state=None, start=0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        data = [(x, torch.tensor([0, 1])) for x in batches()]
        trainer = SimpleTrainer(
            model,
            data,
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            adapter=ModelAdapter(nn.CrossEntropyLoss()),
        )
        if state:
            model.load_state_dict(state["model"])
            trainer.load_state_dict(state["trainer"])
            torch.manual_seed(999)  # what happens between loading and training must not matter
        trainer.train(start, until)
        return {"model": model.state_dict(), "trainer": trainer.state_dict()}

    whole = run(8)
    resumed = run(8, run(4), 4)
    assert same(whole["model"], resumed["model"])


def test_storage_may_be_used_around_training():
    with EventStorage() as outer:
        make_trainer().train(0, 1)
        assert get_event_storage() is outer


def test_after_step_of_a_subclass_finds_what_its_parents_has_saved():
    class Saves(SimpleTrainer):
        def after_step(self):
            super().after_step()
            seen.append((self.iter, saved[-1]))

    seen, saved = [], []
    trainer = make_trainer(cls=Saves)
    trainer.register_hooks(
        [CallbackHook(after_step=lambda t: t.request_save(), on_save=lambda t: saved.append(t.iter))]
    )
    trainer.train(0, 3)
    assert seen == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("event", ["after_train", "on_write", "on_save"])
def test_after_train_of_a_subclass_stops_at_an_error_of_a_hook(event):
    class Publishes(SimpleTrainer):
        def after_train(self):
            super().after_train()
            raise AssertionError("published")

    trainer = make_trainer(cls=Publishes)
    trainer.register_hooks(
        [CallbackHook(after_train=lambda t: t.request_save()), CallbackHook(**{event: lambda t: 1 / 0})]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 3)


def test_a_shallow_copy_does_not_train():
    with pytest.raises(ConfigError, match="this SimpleTrainer is a shallow copy"):
        copy.copy(make_trainer()).train(0, 3)
