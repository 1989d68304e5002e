"""Several compiled steps in one call: the same results as single ones, and what must not wait."""

import json
import re
import time
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from small_runs import compiled_trainer
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, check_config
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.replay import diverge, replay
from hookline.engine.replay.trace import trace_steps
from hookline.engine.step.compiled_step import CompiledStep
from hookline.engine.step.queued_steps import QueuedSteps
from hookline.engine.step.step_config import check_step_config
from hookline.hooks import BestCheckpointer, CallbackHook, EvalHook, FunctionHook, HookBase, IterationTimer, LRScheduler


def linear():
    return nn.Linear(6, 4)


def mlp(dropout=0.0):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))


def batches(sizes=(8,) * 10 + (5,), bad=()):
    """Return the batches of an epoch whose last batch is smaller; those in ``bad`` have NaN."""
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]
    return [(x * float("nan"), y) if i in bad else (x, y) for i, (x, y) in enumerate(data)]


def trainer(steps, data=None, model=linear, hooks=(), cls=SimpleTrainer, optimizer=None, backend="eager", **kwargs):
    torch.manual_seed(0)
    net = model()
    make = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    compile_step = {"backend": backend} if steps is None else {"backend": backend, "steps": steps}
    made = cls(
        net,
        batches() if data is None else data,
        make(net.parameters()),
        adapter=ModelAdapter(nn.CrossEntropyLoss()),
        compile_step=compile_step,
        **kwargs,
    )
    made.register_hooks(hooks)
    return made


def history(made):
    return made.storage.history("total_loss").values()


def equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert str(one.optimizer.state_dict()) == str(other.optimizer.state_dict())
    assert history(one) == history(other)


def cosine(made):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, 30)
    made.register_hooks([LRScheduler(made.optimizer, schedule)])


class Calls(HookBase):
    """Counts the calls of the graph of several steps."""

    def before_train(self):
        self.sizes = []

    def after_waiting_steps(self, first, count, seconds, compiled):
        self.sizes.append(count)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"model": lambda: nn.Sequential(nn.Dropout(0.5), linear())},
        pytest.param(
            {"optimizer": partial(torch.optim.AdamW, lr=0.01), "accumulation_steps": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"model": lambda: nn.Sequential(nn.BatchNorm1d(6), mlp(0.5)), "nonfinite": "skip"}, marks=pytest.mark.slow
        ),
    ],
)
def test_results_are_those_of_single_steps(kwargs):
    found = []
    calls = Calls()
    for steps in (1, 3):
        made = trainer(steps, batches((8,) * 8 + (5,)), hooks=[calls], **kwargs)
        cosine(made)
        made.train(0, 15)
        found.append(made)
    equal(*found)
    assert [iteration for _, iteration in history(made)] == list(range(15))
    # Iteration 0 is an ordinary step, iteration 8 ends an epoch with a smaller batch.
    assert calls.sizes == [3, 3, 1, 1, 3, 3]


@pytest.mark.slow
def test_a_failing_loader_loses_no_step():
    def failing():
        yield from batches(sizes=(8,) * 7)
        raise OSError("the disk is gone")

    made, single = trainer(4, failing()), trainer(1, failing())
    for one in (made, single):
        with pytest.raises(OSError, match="disk"):
            one.train(0, 20)
        assert (one.iter, one.finished_iter) == (7, 6)
    equal(made, single)


@pytest.mark.slow
def test_an_error_of_a_waiting_step_comes_before_a_later_one():
    def failing():
        yield from batches(sizes=(8,) * 7, bad=[5])
        raise OSError("the disk is gone")

    made = trainer(4, failing())
    with pytest.raises(FloatingPointError, match="iteration 5") as caught:
        made.train(0, 20)
    assert "then also: OSError: the disk is gone" in caught.value.__notes__
    assert (made.iter, made.finished_iter) == (5, 4)


@pytest.mark.parametrize(
    "bad", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)  # in a call, its last step, in a single step
def test_steps_after_a_nonfinite_loss_have_no_effect(bad):
    data = batches(bad=[bad])
    made, before = trainer(4, data), trainer(1, data)
    with pytest.raises(FloatingPointError, match=f"iteration {bad}:"):
        made.train(0, 25)
    assert (made.iter, made.storage.iter, made.finished_iter) == (bad, bad, bad - 1)
    before.train(0, bad)
    equal_weights = zip(made.model.parameters(), before.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in equal_weights)


@pytest.mark.slow
def test_nonfinite_updates_are_skipped_one_by_one():
    found = []
    for steps in (1, 4):
        found.append(trainer(steps, batches(bad=[2, 3, 9]), nonfinite="skip"))
        assert found[-1].train(0, 22).metrics["nonfinite_steps"] == 6
    weights = zip(*(one.model.parameters() for one in found), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    histories = [one.storage.history("nonfinite_steps").values() for one in found]
    assert histories[0] == histories[1] == [(1.0, 2), (2.0, 3), (3.0, 9), (4.0, 13), (5.0, 14), (6.0, 20)]


@pytest.mark.slow
def test_another_setting_of_the_optimizer_counts_from_its_step_on():
    found = []
    for steps in (1, 4):

        def change(t):
            if t.iter == 6:
                t.optimizer.param_groups[0]["momentum"] = 0.5

        found.append(trainer(steps, hooks=[CallbackHook(after_step=change, needs_each_step=False)]))
        found[-1].train(0, 12)
    equal(*found)


@pytest.mark.slow
def test_user_code_that_needs_results_gets_them():
    seen = []

    def look(t):
        if t.iter == 5:
            assert len(t.waiting_steps) == 1
            seen.append(t.state_dict()["optimizer"]["state"][0]["momentum_buffer"].clone())
            assert not t.waiting_steps

    trainer(4, hooks=[CallbackHook(after_step=look, needs_each_step=False)]).train(0, 8)
    single = trainer(1)
    single.train(0, 6)
    assert torch.equal(seen[0], single.optimizer.state_dict()["state"][0]["momentum_buffer"])


@pytest.mark.slow
def test_a_periodic_function_sees_computed_steps():
    seen = []
    hook = FunctionHook(lambda t: seen.append((t.iter, t.storage.latest()["total_loss"][1])), "after_step", every=3)
    trainer(4, hooks=[hook]).train(0, 9)
    assert seen == [(2, 2), (5, 5), (8, 8)]


@pytest.mark.slow
def test_the_best_checkpoint_by_a_period_sees_computed_steps(tmp_path):
    kept = []
    for steps in (1, 4):
        made = trainer(steps)
        best = BestCheckpointer(3, Checkpointer(made.model, str(tmp_path / str(steps))), "total_loss", "min", keep=2)
        made.register_hooks([best])
        made.train(0, 13)
        kept.append(best.best)
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_a_hook_that_joins_starts_after_the_waiting_steps():
    class Joins(HookBase):
        needs_each_step = False

        def before_train(self):
            self.found = self.trainer.finished_iter, len(self.trainer.waiting_steps)

    joins = Joins()

    def join(t):
        if t.iter == 6:
            t.register_hooks([joins])

    made = trainer(4, hooks=[CallbackHook(after_step=join, needs_each_step=False)])
    made.train(0, 9)
    assert joins.found == (6, 0)


@pytest.mark.slow
def test_steps_that_wait_share_the_time_of_their_call(monkeypatch):
    put = QueuedSteps._put

    def put_slowly(self, trainer, *args):
        time.sleep(0.01 * (trainer.iter == 6))
        put(self, trainer, *args)

    monkeypatch.setattr(QueuedSteps, "_put", put_slowly)
    made = trainer(4, hooks=[IterationTimer()])
    made.train(0, 11)
    times = {iteration: value for value, iteration in made.storage.history("time").values()}
    assert list(times) == list(range(2, 11))  # as with single steps, after the warm-up
    assert all(times[iteration] >= 0.0025 for iteration in (5, 6, 7, 8))


@pytest.mark.slow
def test_the_speed_of_a_run_leaves_out_steps_whose_call_compiled(monkeypatch, caplog):
    caplog.set_level("INFO")
    trace = CompiledStep._trace

    def trace_slowly(self, *args):
        time.sleep(1)
        return trace(self, *args)

    monkeypatch.setattr(CompiledStep, "_trace", trace_slowly)
    # Of the 18 steps after the warm-up, 3 and 4 are in a call that compiles.
    trainer(4, batches((8,) * 50), hooks=[IterationTimer()]).train(0, 21)
    [(steps, seconds)] = re.findall(r"Overall training speed: (\d+) iterations in ([\d.]+) s", caplog.text)
    [hooks] = re.findall(r"\(([\d.]+) s on hooks", caplog.text)
    assert int(steps) == 16
    assert float(seconds) < 0.9
    assert float(hooks) < 0.9


@pytest.mark.slow
def test_ctrl_c_does_not_compute_the_waiting_steps():
    def interrupted():
        yield from batches(sizes=(8,) * 7)
        raise KeyboardInterrupt

    made = trainer(4, interrupted())
    with pytest.raises(KeyboardInterrupt):
        made.train(0, 20)
    assert made.finished_iter == 4


# ---------------------------------------------------------------------------- what is refused


class Unread:
    def __len__(self):
        return 4

    def __iter__(self):
        raise AssertionError("data was read")


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "8", None])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    net = linear()
    with pytest.raises(ConfigError, match=r"SOLVER\.COMPILE_STEP_ARGS\.steps: expected the number of steps"):
        SimpleTrainer(net, Unread(), torch.optim.SGD(net.parameters(), 0.1), compile_step={"steps": steps})


@pytest.mark.parametrize("event", ["before_step", "before_fetch", "after_fetch", "after_step"])
def test_a_hook_that_looks_at_each_step_is_refused_by_name(event):
    match = rf"the hook CallbackHook listens to {event}, which may come before.*set SOLVER.*steps to 1.*needs_each_step"
    with pytest.raises(ConfigError, match=match):
        trainer(4, Unread(), hooks=[CallbackHook(**{event: lambda *args: None})])
    trainer(1, Unread(), hooks=[CallbackHook(**{event: lambda *args: None})])


def test_a_subclass_that_overrides_the_event_must_say_so_itself():
    class Looks(IterationTimer):
        def after_step(self):
            super().after_step()

    with pytest.raises(ConfigError, match="the hook Looks listens to after_step"):
        trainer(4, Unread(), hooks=[Looks()])
    Looks.needs_each_step = False
    trainer(4, Unread(), hooks=[Looks()])


def test_after_optimizer_step_is_refused():
    with pytest.raises(ConfigError, match="listens to after_optimizer_step"):
        trainer(4, Unread(), hooks=[CallbackHook(after_optimizer_step=print, needs_each_step=False)])


@pytest.mark.parametrize("name", ["after_step", "after_epoch", "after_train", "fetch", "_write_metrics"])
def test_a_trainer_with_its_own_part_is_refused(name):
    def method(self):
        pass

    method.__name__ = name
    own = type("Own", (SimpleTrainer,), {name: method})
    with pytest.raises(ConfigError, match=rf"Own\.{name}\(\) may look at a step that is not computed"):
        trainer(4, Unread(), cls=own).train(0, 3)


def acting_at(iteration, action):
    """Return a hook that calls ``action(trainer)`` after a step, while steps wait."""

    class Acts(HookBase):
        needs_each_step = False

        def after_step(self):
            if self.trainer.iter == iteration:
                action(self.trainer)

    return Acts()


@pytest.mark.parametrize("name", ["optimizer", "accumulation_steps"])
def test_another_optimizer_while_steps_wait_is_refused(name):
    def change(t):
        other = torch.optim.SGD(t.model.parameters(), 0.1) if name == "optimizer" else 2
        setattr(t, name, other)

    with pytest.raises(ConfigError, match=rf"trainer\.{name} was changed while steps wait.*finish_steps\(\) before"):
        trainer(4, hooks=[acting_at(2, change)]).train(0, 9)


@pytest.mark.slow
def test_waiting_steps_do_not_update_a_group_that_comes_later():
    found = []
    for steps in (1, 4):
        last = []

        def make(parameters, last=last, **kwargs):
            first, *last[:] = parameters
            return torch.optim.SGD([first], **kwargs)

        def add(t, last=last):
            t.optimizer.add_param_group({"params": last, "lr": 0.2})

        optimizer = partial(make, lr=0.1, momentum=0.9)
        found.append(trainer(steps, optimizer=optimizer, hooks=[acting_at(2, add)]))
        found[-1].train(0, 9)
        assert len(found[-1].optimizer.param_groups) == 2
    equal(*found)


def test_an_evaluation_of_ones_own_sees_computed_steps():
    class Evaluates(EvalHook):
        def _do_eval(self):
            seen.append((self.trainer.iter, len(self.trainer.waiting_steps)))

    seen = []
    trainer(4, hooks=[Evaluates(3, dict)]).train(0, 8)
    assert seen == [(2, 0), (5, 0), (8, 0)]


def test_hooks_registered_while_steps_wait_see_them_computed():
    class Sees(HookBase):
        def on_registered(self):
            self.waiting = len(self.trainer.waiting_steps)

    sees = Sees()
    trainer(4, hooks=[acting_at(2, lambda t: t.register_hooks([sees]))]).train(0, 9)
    assert sees.waiting == 0


def test_stop_at_a_nonfinite_loss_is_refused():
    with pytest.raises(ConfigError, match='"stop" cannot end a run between steps'):
        trainer(4, Unread(), nonfinite="stop").train(0, 3)


def test_rates_that_are_tensors_are_refused():
    with pytest.raises(ConfigError, match="learning rates that are tensors"):
        trainer(4, Unread(), optimizer=partial(torch.optim.SGD, lr=torch.tensor(0.1))).train(0, 3)


def test_a_step_that_reads_its_number_is_refused():
    class Scaled(SimpleTrainer):
        def forward(self, batch):
            return {name: loss * (self.iter + 1) for name, loss in super().forward(batch).items()}

    with pytest.raises(ConfigError, match=r"^self\.iter is read within the step.*steps to 1"):
        trainer(4, cls=Scaled).train(0, 9)


def test_a_loader_that_writes_into_its_batches_is_an_error():
    def reused():
        x, y = torch.empty(8, 6), torch.zeros(8, dtype=torch.int64)
        while True:
            yield x.normal_(), y

    with pytest.raises(ConfigError, match="writes into batches that it has returned"):
        trainer(4, reused(), iters_per_epoch=100).train(0, 9)


Pair = namedtuple("Pair", "x y")


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Fields])
def test_a_loader_that_writes_into_other_kinds_of_batches_is_an_error(kind):
    class Unpacks(SimpleTrainer):
        def forward(self, batch):
            return super().forward((batch.x, batch.y))

    def reused():
        x, y = torch.empty(8, 6), torch.zeros(8, dtype=torch.int64)
        while True:
            yield kind(x.normal_(), y)

    with pytest.raises(ConfigError, match="writes into batches that it has returned"):
        trainer(4, reused(), iters_per_epoch=100, cls=Unpacks).train(0, 9)


def test_a_loader_that_writes_into_memory_of_its_batches_is_an_error():
    def reused():
        x = np.zeros((8, 6), np.float32)
        while True:
            x += 1
            yield torch.from_numpy(x), torch.zeros(8, dtype=torch.int64)

    with pytest.raises(ConfigError, match="writes into batches that it has returned"):
        trainer(4, reused(), iters_per_epoch=100).train(0, 9)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (batches(sizes=(8, 8, 8)), "the epoch ended"),
        pytest.param(
            batches(sizes=(8, 8, 5, 5) * 3),
            r"a batch has torch.Size\(\[[58], 6\]\) where the one before has",
            marks=pytest.mark.slow,
        ),
        ([{"input": x, "y": y, "name": f"{i // 2}.png"} for i, (x, y) in enumerate(batches())], r"has '\d.png' where"),
        pytest.param(batches(), None, marks=pytest.mark.slow),
    ],
)
def test_a_run_without_a_full_call_says_why_once(data, reason, caplog):
    trainer(4, data).train(0, 16)
    said = [record.message for record in caplog.records if "ran one by one" in record.message]
    assert len(said) == (reason is not None)
    if reason:
        assert re.search(reason, said[0])


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["SOLVER.COMPILE_STEP_ARGS.steps", 0], r"SOLVER\.COMPILE_STEP_ARGS\.steps: expected the number of steps"),
        (["SOLVER.COMPILE_STEP_ARGS.dynamic", True], r"COMPILE_STEP_ARGS\.steps: .*remove dynamic"),
        (["SOLVER.COMPILE_STEP_ARGS.stepz", 2], r"COMPILE_STEP_ARGS\.stepz"),
        (["SOLVER.NONFINITE_LOSS", "stop"], r'NONFINITE_LOSS "stop"'),
        (["HOOKS", ["EMA"]], r"HOOKS\[0\]: EMA listens to before_step"),
    ],
)
def test_a_config_with_unsupported_settings_is_refused(overrides, match):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.COMPILE_STEP = True
    cfg.merge_from_list(["SOLVER.COMPILE_STEP_ARGS.steps", 8])
    cfg.merge_from_list(overrides)
    with pytest.raises(ConfigError, match=match):
        check_config(cfg)


class ChoosesItself(HookBase):
    def __init__(self, needs_each_step):
        self.needs_each_step = needs_each_step

    def after_step(self):
        pass


def make_hook():
    return Calls()


def test_a_config_leaves_hooks_of_users_to_the_trainer():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.COMPILE_STEP = True
    cfg.merge_from_list(["SOLVER.COMPILE_STEP_ARGS.steps", 8])
    cfg.HOOKS = [f"{__name__}:make_hook", {"NAME": f"{__name__}:ChoosesItself", "ARGS": {"needs_each_step": False}}]
    check_step_config(cfg)
    trainer(4, Unread(), hooks=[ChoosesItself(False)])
    with pytest.raises(ConfigError, match="the hook ChoosesItself listens to after_step"):
        trainer(4, Unread(), hooks=[ChoosesItself(True)])


# ---------------------------------------------------------------------------- runs of a config


@pytest.fixture
def make(tmp_path):
    """Create trainers of runs, each in its own folder."""

    def make(folder, steps, *overrides, resume=False):
        return compiled_trainer(
            tmp_path / folder,
            *("MODEL.ARGS.hidden", [4], "DATALOADER.BATCH_SIZE", 4, "TEST.EVAL_PERIOD", 6, "LOG.PERIOD", 5),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 48, "shape": [8], "num_classes": 4}}]),
            *("SOLVER.MAX_ITER", 14, "SOLVER.CHECKPOINT_PERIOD", 4, "SOLVER.COMPILE_STEP_ARGS.steps", steps),
            *overrides,
            resume=resume,
        )

    return make


def rows(made):
    with open(f"{made.cfg.OUTPUT_DIR}/metrics.json") as file:
        found = [json.loads(line) for line in file]
    timed = ("time", "data_time", "eta_seconds")
    assert all(("time" in row) == ("total_loss" in row) for row in found[1:])
    return [{name: value for name, value in row.items() if name not in timed} for row in found]


def until(made, iteration, exit_code=0):
    def stop(t):
        if t.iter == iteration:
            t.request_stop("enough", exit_code)

    made.register_hooks([CallbackHook(after_step=stop, needs_each_step=False)])
    assert made.train().reason == "enough"


def test_a_run_has_the_weights_and_rows_of_single_steps_and_resumes_to_the_bit(make):
    single = make("single", 1)
    single.train()
    until(make("parts", 3), 8)  # in the middle of a call
    resumed = make("parts", 3, resume=True)
    assert resumed.start_iter == 9
    resumed.train()
    for name, value in single.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert str(single.optimizer.state_dict()) == str(resumed.optimizer.state_dict())
    assert rows(single) == rows(resumed)


@pytest.mark.slow
def test_tools_that_look_at_each_step_see_it(make):
    runs = [make("run", 3), make("other", 3, "SOLVER.BASE_LR", 0.002)]
    for run in runs:
        run.train()
    folders = [run.cfg.OUTPUT_DIR for run in runs]
    report = diverge(*folders)
    assert report["replay"]["whole_steps"]
    assert not any("COMPILE_STEP_ARGS" in change for change in report["replay"].get("config_changes", ()))
    replay(folders[0], 6, overrides=["SOLVER.COMPILE_STEP", False])
    cfg = make("trace", 3).cfg
    trace = trace_steps(DefaultTrainer, cfg, 5)
    assert not trace.error
    assert len(trace.steps) > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_default_backend_gives_the_same_bits_in_long_and_short_graphs(dropout):
    found = []
    for steps in (1, 3):
        found.append(trainer(steps, batches((8,) * 8), model=partial(mlp, dropout), backend="inductor"))
        cosine(found[-1])
        found[-1].train(0, 16)
    equal(*found)
    ordinary = trainer(3, batches((8,) * 8), model=partial(mlp, dropout), backend="eager")
    cosine(ordinary)
    ordinary.train(0, 16)  # with the same random numbers
    for one, other in zip(found[0].model.parameters(), ordinary.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
