"""The loop: order of events, how a run ends, a second ``train()``, and epochs."""

import logging
import re
import sys

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from ranks import complete
from small_runs import batches, net_trainer, same

from hookline.engine import SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.solver import LRMultiplier
from hookline.hooks import (
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    EventStorage,
    HookBase,
    LRScheduler,
    PeriodicWriter,
    StopTraining,
    get_event_storage,
    has_event_storage,
)
from hookline.hooks.base import EVENTS, STEP_EVENTS
from hookline.hooks.functions import FunctionHook


class Recorder(CallbackHook):
    """Records every event."""

    def __init__(self):
        self.events = []
        names = [event for event in EVENTS if not event.endswith("state_dict")]
        super().__init__(**{name: lambda *args, name=name: self.events.append(name) for name in names})


STEP = [
    *("before_step", "before_fetch", "after_fetch", "before_forward", "after_forward"),
    *("before_backward", "after_backward", "before_optimizer_step", "after_optimizer_step"),
    *("before_zero_grad", "after_zero_grad", "after_step"),
]
PHASES = ["on_write", "on_save"]
END = ["after_train", "before_write", "on_write", "on_save", "after_run"]


class Boom(Exception):
    pass


def raising(message, at=0):
    def raise_(trainer, *args):
        if trainer.iter >= at:
            raise Boom(message)

    return raise_


def test_events_are_called_in_the_documented_order():
    recorder = Recorder()
    net_trainer(batches(2), hooks=[recorder]).train(0, 3)
    first = ["on_registered", "before_train", "before_epoch", *STEP, *PHASES, *STEP, "after_epoch", *PHASES]
    assert recorder.events == [*first, "before_epoch", *STEP, *PHASES, *END]


def test_micro_batches_repeat_the_events_of_fetch_forward_and_backward_only():
    recorder = Recorder()
    net_trainer(batches(1, size=4), hooks=[recorder], accumulation_steps=2).train(0, 1)
    assert [recorder.events.count(event) for event in STEP] == [1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]


def test_arguments_of_events_and_the_life_of_gradients():
    seen = {}

    def note(name):
        return lambda trainer: seen.update({name: trainer.model.fc.weight.grad})

    hook = CallbackHook(
        after_fetch=lambda t, batch: seen.update(fetched=batch),
        after_forward=lambda t, batch, outputs: seen.update(batch=batch, outputs=outputs),
        before_backward=lambda t, losses: seen.update(losses=losses),
        after_backward=note("backward"),
        before_optimizer_step=note("update"),
        after_step=note("after"),
    )
    net_trainer(hooks=[hook]).train(0, 1)
    assert seen["fetched"] is seen["batch"]
    assert seen["losses"] is seen["outputs"]["loss"]
    assert seen["backward"] is seen["update"] is not None
    assert seen["after"] is None
    net_trainer(hooks=[hook], zero_grad_before_forward=True).train(0, 1)
    assert seen["after"].norm() > 0


def test_storage_iter_is_trainer_iter_in_a_step_and_max_iter_after_training():
    def check(trainer, *args):
        assert trainer.storage.iter == trainer.iter == get_event_storage().iter

    seen = []
    evaluation = EvalHook(0, lambda: {"accuracy": 0.5})
    last = CallbackHook(after_train=lambda t: seen.append((t.iter, t.storage.latest()["accuracy"])))
    events = CallbackHook(**dict.fromkeys([*STEP, "before_epoch", "after_epoch"], check))
    with EventStorage() as outer:
        assert net_trainer(hooks=[events, evaluation, last]).train(3, 9).iteration == 9
        assert get_event_storage() is outer
    assert seen == [(9, (0.5, 9))]


def test_a_stop_request_stops_after_the_current_step_without_a_final_evaluation():
    recorder, calls = Recorder(), []
    stop = CallbackHook(before_step=lambda t: (t.request_stop("enough"), t.request_stop("2")) if t.iter == 2 else None)
    trainer = net_trainer(hooks=[stop, EvalHook(0, lambda: calls.append(1)), recorder])
    result = trainer.train(0, 100)
    assert (result.reason, result.iteration, calls) == ("enough", 3, [])
    assert result.metrics["total_loss"] == result.metrics["loss"] > 0
    assert recorder.events[-8:] == ["after_step", *PHASES, *END]
    assert not trainer.state_dict()["complete"], "a resume continues it"
    trainer.train(3, 9)
    assert trainer.state_dict()["complete"]


@pytest.mark.parametrize("event", [*STEP_EVENTS, "before_step", "after_step"])
def test_a_step_counts_if_a_hook_stops_training_in_any_of_its_events(event):
    def stop(trainer, *args):
        if trainer.iter == 1:
            raise StopTraining("enough")

    recorder, alone, reasons = Recorder(), net_trainer(), []
    last = CallbackHook(after_train=lambda trainer: reasons.append(trainer.stop_reason))
    trainer = net_trainer(hooks=[CallbackHook(**{event: stop}), recorder, last])
    result = trainer.train(0, 100)
    assert reasons == ["enough"]
    assert (result.reason, result.iteration, trainer.finished_iter) == ("enough", 2, 1)
    assert recorder.events.count("after_step") == 2, "the hooks after it have their turn"
    alone.train(0, 2)
    assert same(trainer.model.state_dict(), alone.model.state_dict())


def test_every_hook_gets_after_train_and_the_first_error_wins(caplog):
    recorder, seen, evaluated = Recorder(), [], []
    hooks = [
        EvalHook(1, lambda: evaluated.append(1)),
        CallbackHook(on_exception=lambda t, error: seen.append(str(error)), after_train=raising("second")),
        CallbackHook(on_exception=raising("handler")),
        recorder,
        CallbackHook(after_step=raising("first", at=3)),
    ]
    trainer = net_trainer(hooks=hooks)
    with pytest.raises(Boom, match="first") as info:
        trainer.train(0, 4)
    assert recorder.events[-5:] == ["on_exception", *(event for event in END if event != "on_save")]
    assert (seen, len(evaluated)) == (["first"], 3), "no final evaluation after a failure in the last iteration"
    assert info.value.__notes__[0] == "(in hook CallbackHook.after_step, at iteration 3)"
    assert any("second" in note for note in info.value.__notes__)
    assert "second" in caplog.text
    assert trainer.storage.latest()["loss"][1] == 3, "metrics before the error are kept"
    assert not trainer.state_dict()["complete"], "a resume repeats the step"
    assert not has_event_storage()


@pytest.mark.parametrize("event", ["before_train", "after_forward", "after_run"])
def test_sys_exit_0_in_a_hook_is_an_error_and_another_code_is_kept(event):
    def leave(code):
        def leave(trainer, *args):
            raise SystemExit(code)

        return CallbackHook(**{event: leave})

    recorder = Recorder()
    with pytest.raises(RuntimeError, match=r"sys\.exit\(0\)") as info:
        net_trainer(hooks=[leave(0), recorder]).train(0, 3)
    assert f"in hook CallbackHook.{event}" in info.value.__notes__[0]
    assert recorder.events[-1] == "after_run"
    with pytest.raises(SystemExit) as end:
        net_trainer(hooks=[leave(75)]).train(0, 3)
    assert end.value.code == 75


@pytest.mark.parametrize("follows", [True, False])
def test_a_following_run_keeps_the_state_of_hooks_and_one_that_starts_over_resets_it(tmp_path, follows):
    scores, called, trainer = [0.9, 0.8, 0.3, 0.4, 0.5], [], net_trainer()
    best = BestCheckpointer(0, Checkpointer(trainer.model, str(tmp_path)), "score")
    stopping = EarlyStopping("score", patience=2)
    once = FunctionHook(lambda t: called.append(t.iter), "after_step", once=True)
    trainer.register_hooks([EvalHook(2, lambda: {"score": scores.pop(0)}), stopping, best, once])
    trainer.train(0, 4)
    assert (best.best, stopping.count, called) == ([(0.9, 1)], 1, [0])
    if follows:
        assert trainer.train(4, 20).reason.startswith("early stopping")
        assert (best.best, called) == ([(0.9, 1)], [0])
    else:
        assert trainer.train(0, 6).iteration == 6
        assert (best.best, stopping.best, stopping.count, called) == ([(0.5, 6)], 0.5, 0, [0, 0])


@pytest.mark.parametrize("kind", ["plain", "multiplier"])
def test_the_learning_rate_follows_each_run_and_a_changed_max_iter(kind):
    trainer, seen = net_trainer(), []
    linear = LinearParamScheduler(1.0, 0.0)
    schedule = linear if kind == "plain" else LRMultiplier(trainer.optimizer, linear, 4)
    rate = CallbackHook(before_step=lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))
    trainer.register_hooks([LRScheduler(scheduler=schedule), rate])
    four, eight = ([pytest.approx(0.1 * (1 - it / length)) for it in range(length)] for length in (4, 8))
    for start, end in ((0, 4), (4, 8), (0, 8), (0, 4)):  # then a longer run, one from the start, a shorter one
        trainer.train(start, end)
    assert seen == [*four, *eight[4:], *eight, *four]
    seen.clear()
    trainer.register_hooks([CallbackHook(after_step=lambda t: setattr(t, "max_iter", 8) if t.iter == 2 else None)])
    assert trainer.train(0, 4).iteration == 8
    assert seen == [*four[:3], *eight[3:]]


def test_a_hook_that_calls_train_of_its_own_trainer_is_an_error():
    trainer = net_trainer(hooks=[CallbackHook(after_step=lambda trainer: trainer.train(0, 3))])
    with pytest.raises(RuntimeError, match=r"train\(\) was called by its own hook"):
        trainer.train(0, 3)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from batches(2)


def epochs_of(trainer, steps, **callbacks):
    """Train, and return where epochs began and ended, as (event, iteration, epoch)."""
    seen = []
    trainer.register_hooks(
        [
            CallbackHook(
                before_epoch=lambda t: seen.append(("begin", t.iter, t.epoch)),
                after_epoch=lambda t: seen.append(("end", t.iter, t.epoch)),
                **callbacks,
            )
        ]
    )
    trainer.train(0, steps)
    return seen


def test_epochs_end_with_the_loader_or_where_they_are_skipped():
    two = [("begin", 0, 0), ("end", 2, 0), ("begin", 3, 1), ("end", 5, 1), ("begin", 6, 2)]
    assert epochs_of(net_trainer(batches(3)), 7) == two
    stream = torch.utils.data.DataLoader(Stream(), batch_size=None)  # its end is known only when it is reached
    assert epochs_of(net_trainer(stream), 3) == [("begin", 0, 0), ("end", 2, 0), ("begin", 2, 1)]
    skip = epochs_of(net_trainer(batches(9)), 3, after_step=lambda t: t.skip_epoch() if t.iter == 1 else None)
    assert skip == [("begin", 0, 0), ("end", 1, 0), ("begin", 2, 1)]
    late = epochs_of(net_trainer(batches(9)), 3, on_save=lambda t: t.skip_epoch() if t.iter == 1 else None)
    assert late == [("begin", 0, 0), ("end", 2, 0), ("begin", 2, 1)]  # seen when the next batch is read


def test_a_new_loader_keeps_epoch_count_and_given_length():
    trainer = net_trainer(batches(9), iters_per_epoch=3)
    change = {"after_step": lambda t: t.reset_data_loader(lambda: batches(9)) if t.iter == 4 else None}
    assert epochs_of(trainer, 9, **change) == [
        *(("begin", 0, 0), ("end", 2, 0), ("begin", 3, 1), ("end", 4, 1)),
        *(("begin", 5, 2), ("end", 7, 2), ("begin", 8, 3)),
    ]
    assert trainer.iters_per_epoch == 3
    early = net_trainer()
    early.reset_data_loader(lambda: batches(2))  # before the first batch
    early.train(0, 5)
    assert (early.epoch, early.iters_per_epoch) == (2, 2)


def test_a_loader_that_is_assigned_is_read_from_then_on():
    trainer, seen = net_trainer(batches(3)), []
    trainer.data_loader = [("first", 0)] * 2
    trainer.forward = lambda batch: seen.append(batch[0]) or {"loss": trainer.model.fc.weight.sum()}

    def assign(t):
        if t.iter == 2:
            t.data_loader = [("second", 0)] * 3

    trainer.register_hooks([CallbackHook(after_step=assign)])
    trainer.train(0, 5)
    assert seen == ["first"] * 3 + ["second"] * 2
    assert (trainer.epoch, trainer.iters_per_epoch, len(trainer.data_loader)) == (2, 3, 3)


def test_a_trainer_may_delete_its_loader_before_it_sets_another():
    trainer = net_trainer()
    loader = trainer.data_loader
    del trainer.data_loader
    trainer.data_loader = loader
    trainer.train(0, 2)
    assert trainer.iter == 2


def test_data_that_stops_before_its_length_fails_the_run():
    class Short(list):
        def __iter__(self):
            return iter(self[:2])

    with pytest.raises(RuntimeError, match="ended after 2 of its 4"):
        net_trainer(Short(batches(4))).train(0, 20)


class Bare(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("x", self.iter)


def test_an_event_that_the_step_does_not_emit_is_warned_of_once(caplog):
    class Waits(HookBase):
        def after_backward(self):
            pass

    with caplog.at_level(logging.WARNING):
        net_trainer(hooks=[Recorder()]).train(0, 2)
        assert caplog.records == []
        trainer = Bare()
        trainer.register_hooks([Waits()])
        assert trainer.train(0, 5).metrics == {"x": 4.0}
    (warning,) = [record.message for record in caplog.records]
    assert all(name in warning for name in ("Waits", "after_backward", "Bare.run_step()"))


def test_requests_are_served_after_the_step_in_a_fixed_order():
    recorder = Recorder()
    ask = CallbackHook(
        before_step=lambda t: t.iter == 1 and (t.request_save(), t.request_write(), t.request_eval()),
        on_eval=lambda t: seen.append((t.iter, *sorted(t.requests))),
        on_save=lambda t: seen.append((t.iter, *sorted(t.requests))),
    )
    seen = []
    net_trainer(hooks=[ask, PeriodicWriter([], period=0), recorder]).train(0, 3)
    second = recorder.events.index("after_step", recorder.events.index("after_step") + 1)
    assert recorder.events[second + 1 : second + 6] == ["on_eval", "before_write", "after_write", "on_write", "on_save"]
    assert seen[:-1] == [(0,), (1, "eval", "save", "write"), (1, "save"), (2,)]


@pytest.mark.parametrize("method", ["after_step", "after_epoch"])
def test_stop_training_in_a_trainers_own_method_is_a_stop_request(method):
    def stop(self):
        getattr(SimpleTrainer, method)(self)
        if self.iter >= 3:
            raise StopTraining("enough")

    result = net_trainer(cls=type("Stops", (SimpleTrainer,), {method: stop})).train(0, 100)
    assert (result.reason, result.iteration) == ("enough", 4)


@pytest.mark.parametrize("codes", [(75, 0), (0, 75)])
def test_a_stop_outranks_an_interruption_in_the_same_step(codes):
    stop = CallbackHook(after_step=lambda t: [t.request_stop(f"code {code}", exit_code=code) for code in codes])
    trainer = net_trainer(hooks=[stop])
    result = trainer.train(0, 9)
    assert (result.reason, result.exit_code, result.iteration) == ("code 0", 0, 1)
    interrupted = net_trainer(hooks=[CallbackHook(after_step=lambda t: t.request_stop("later", exit_code=75))])
    assert interrupted.train(0, 9).exit_code == 75
    assert not interrupted.state_dict()["complete"], "a resume continues it"


@pytest.mark.parametrize("event", ["after_train", "on_write", "on_save"])
def test_after_train_of_a_subclass_stops_at_an_error_of_a_hook_and_may_raise_its_own(event):
    class Publishes(SimpleTrainer):
        def after_train(self):
            super().after_train()
            raise Boom("my own test set is missing")

    asks = CallbackHook(after_train=lambda t: t.request_save())
    with pytest.raises(ZeroDivisionError):
        net_trainer(cls=Publishes, hooks=[asks, CallbackHook(**{event: lambda t: 1 / 0})]).train(0, 3)
    trainer, recorder = net_trainer(cls=Publishes), Recorder()
    trainer.register_hooks([recorder])
    with pytest.raises(Boom, match="my own test set"):
        trainer.train(0, 2)
    assert recorder.events[-5:] == END
    assert trainer.completed


FAILS = """
import torch
from hookline.engine import TrainerBase

class MyTrainer(TrainerBase):
    def run_step(self):
        torch.nn.Linear(5, 4)(torch.zeros(2, 3))

MyTrainer().train(0, 4)
"""


BAD_SAMPLE = """
import torch
from torch import nn
from hookline import Trainer

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError("label")

if __name__ == "__main__":
    Trainer(nn.Linear(2, 1), Rows(), loss=nn.MSELoss(), length=1, batch_size=2, num_workers=1).train()
"""


def test_the_traceback_of_a_worker_is_shown_once(tmp_path):
    (tmp_path / "bad_sample.py").write_text(BAD_SAMPLE)
    output = complete([sys.executable, "bad_sample.py"], tmp_path, code=1)
    assert output.count("Original Traceback") == output.count("KeyError: 'label'") == 1
    assert "ERROR: Exception during training, at iteration 0: KeyError: Caught KeyError in DataLoader worker" in output
    assert "Original Traceback" in (tmp_path / "output" / "log.txt").read_text()


def test_any_trainer_logs_to_the_console_and_a_failing_step_is_shown_once(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    output = complete([sys.executable, "fails.py"], tmp_path, code=1)
    begin, error, *_ = output.splitlines()
    assert begin.endswith("  Starting training from iteration 0")
    assert "  ERROR: Exception during training, at iteration 0: RuntimeError: " in error
    assert "mat1 and mat2" in error
    assert output.count("Traceback") == 1
    last = output.rstrip().splitlines()[-1]
    line = "torch.nn.Linear(5, 4)(torch.zeros(2, 3))"
    assert re.fullmatch(rf'your line: File "\S*fails.py", line 7, in run_step: {re.escape(line)}', last)


def test_a_log_level_that_a_script_has_set_stays(tmp_path):
    quiet = 'import logging\n\nlogging.getLogger("hookline").setLevel(logging.ERROR)\n'
    (tmp_path / "fails.py").write_text(quiet + FAILS)
    output = complete([sys.executable, "fails.py"], tmp_path, code=1)
    assert "Starting training" not in output
