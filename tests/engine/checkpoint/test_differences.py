"""Changes of the config on a resume, and runs that have ended."""

from types import SimpleNamespace

import pytest
import torch
from ranks import rows
from small_runs import load, mlp_config, trainer_of
from starts import contents

from hookline.config import ConfigError
from hookline.engine.differences import settings
from hookline.hooks import BestCheckpointer, CallbackHook

SIZE = 1024  # samples of the synthetic set
LINEAR = ("SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.BASE_LR", 1.0)
TESTED = ("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 16}}], "TEST.METRICS", ["Accuracy"])


@pytest.fixture
def make(tmp_path):
    """Trainers of one run: a small MLP on synthetic data."""
    given = ("MODEL.ARGS.hidden", (4,), "SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR", "SOLVER.WARMUP_ITERS", 0)
    given += ("SOLVER.MAX_ITER", 4, "SEED", 0)
    return lambda *overrides, resume=False: trainer_of(mlp_config(tmp_path, *given, *overrides), resume)


def rates(trainer):
    seen = []
    trainer.register_hooks([CallbackHook(before_step=lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))])
    trainer.train()
    return seen


def stop_at(trainer, iteration, exit_code=75):
    """Interrupt a run after the step of an iteration."""
    stop = CallbackHook(before_step=lambda t: t.request_stop("", exit_code) if t.iter == iteration else None)
    trainer.register_hooks([stop])
    return trainer.train()


# ---------------------------------------------------------------------------- the table of docs/checkpoints.md


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("SOLVER.BASE_LR", 0.01, 0.02),
        ("SOLVER.WEIGHT_DECAY", 0.1, 0.2),
        ("SOLVER.AMP.ENABLED", False, True),
        ("SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR", "WarmupCosineLR"),
        ("SOLVER.OPTIMIZER.ARGS.foreach", True, False),
        (
            "SOLVER.PARAM_GROUPS",
            *([{"REGEX": "weight", "LR_FACTOR": 0.5}], [{"REGEX": "weight", "LR_FACTOR": 0.25}]),
        ),
        ("DATASETS.TRAIN", ("synthetic",), ("synthetic", "synthetic")),
        ("SEED", 0, 1),
        ("HOOKS", [], [{"NAME": "MemoryMonitor"}]),
    ],
)
def test_each_change_is_logged_and_used(make, log, key, before, now):
    make(key, before).train()
    trainer = make(key, now, "SOLVER.MAX_ITER", 6, resume=True)
    assert f"Resuming with {key} = " in log.text
    group = trainer.optimizer.param_groups[0]
    if key == "SOLVER.BASE_LR":
        assert rates(trainer) == [now, now]
    elif key == "SOLVER.PARAM_GROUPS":
        assert group["lr"] == pytest.approx(trainer.optimizer.param_groups[1]["lr"] / 4)
    elif (name := key.rpartition(".")[2].lower()) in ("weight_decay", "foreach"):
        assert group[name] == now
    assert trainer.start_iter == 4
    assert trainer.iter == 6 or trainer.train().iteration == 6


class Counts(torch.optim.SGD):
    """Keeps its count of steps in the groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


def test_an_unchanged_config_logs_nothing_and_the_optimizer_has_this_runs_settings(make, log):
    name = ("SOLVER.OPTIMIZER.NAME", f"{__name__}:Counts")
    first = make(*name)
    first.register_hooks([CallbackHook(after_step=lambda t: t.optimizer.param_groups[0].update(weight_decay=0.7))])
    first.train()
    group = make(*name, resume=True).optimizer.param_groups[0]
    assert log.text.count("Resuming with ") == 1
    assert "Resuming with the optimizer's weight_decay = 0.0001 instead of 0.7" in log.text
    assert (group["k"], group["weight_decay"]) == (4, 0.0001)
    assert group["lr"] == first.optimizer.param_groups[0]["lr"]


class Slow(torch.optim.Optimizer):
    """Wraps another optimizer, as Lookahead does."""

    def __init__(self, optimizer, every=5):
        self.optimizer, self.every = optimizer, every
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults


def test_the_settings_of_a_wrapped_optimizer_are_settings_too():
    parameter = torch.nn.Parameter(torch.ones(1))
    trainer = SimpleNamespace(optimizer=Slow(torch.optim.SGD([parameter], lr=0.1, momentum=0.5)), scheduler=None)
    (found,) = settings(trainer)
    assert found["momentum"] == 0.5
    assert "lr" not in found
    assert "params" not in found


def test_a_schedule_that_cycles_the_momentum_keeps_it(make):
    one_cycle = ["SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:OneCycleLR", "SOLVER.OPTIMIZER.NAME", "AdamW"]
    one_cycle += ["SOLVER.LR_SCHEDULER_ARGS", {"max_lr": 0.1, "total_steps": 8}, "SOLVER.MAX_ITER", 8]
    first = make(*one_cycle)
    stop_at(first, 4)
    groups = [one.optimizer.state_dict()["param_groups"] for one in (first, make(*one_cycle, resume=True))]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("schedule", [LINEAR, ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR")])
def test_a_longer_run_and_another_schedule_follow_their_own_curve_from_then_on(make, schedule):
    whole = rates(make(*schedule, "SOLVER.MAX_ITER", 8))
    make(*(schedule if schedule is LINEAR else ())).train()
    assert rates(make(*schedule, "SOLVER.MAX_ITER", 8, resume=True)) == pytest.approx(whole[4:])


@pytest.mark.parametrize("size", [24, 64])
def test_another_batch_size_still_sees_each_sample_once(make, log, size):
    seen = []

    def run(*overrides, **kwargs):
        trainer = make(*overrides, "LOG.WRITERS", ["CommonMetricPrinter"], "LOG.PERIOD", 1, **kwargs)
        note = CallbackHook(after_fetch=lambda t, batch: seen.extend(batch[0][:, 0].tolist()))
        trainer.register_hooks([note])
        return trainer.train().iteration

    run("DATALOADER.BATCH_SIZE", 32, "SOLVER.MAX_ITER", 20)
    length = run("DATALOADER.BATCH_SIZE", size, "SOLVER.MAX_ITER", "1ep", resume=True)
    # Iterations count updates: those before the resume, and those of the rest of the epoch.
    assert length == 20 + -(-(SIZE - 20 * 32) // size)
    assert len(seen) == len(set(seen)) == SIZE
    assert f"iter: 20/{length}" in log.text  # the console continues the count, with the new length


def test_lengths_in_epochs_are_exact_after_the_batch_size_changes(make):
    steps = []
    for size, epoch in ((128, 2), (256, 4), (256, 5), (64, None)):  # 8, 4, 4 and 16 iterations an epoch
        trainer = make(*LINEAR, "SOLVER.MAX_ITER", "8ep", "DATALOADER.BATCH_SIZE", size, resume=size != 128)
        stop = CallbackHook(after_epoch=lambda t, e=epoch: t.request_stop("", 75) if t.epoch + 1 == e else None)
        trainer.register_hooks([stop])
        first, seen = trainer.start_iter, rates(trainer)
        assert seen == pytest.approx([1 - i / trainer.max_iter for i in range(first, first + len(seen))])
        steps.append((trainer.iter, trainer.max_iter))
    assert steps == [(16, 64), (24, 40), (28, 40), (76, 76)]


@pytest.mark.parametrize(("resumes", "period"), [(True, 20), (True, 1), (False, 20)])
def test_a_continued_run_keeps_the_row_of_its_former_final_evaluation(make, tmp_path, resumes, period):
    writers = ("LOG.WRITERS", ["JSONWriter", "CSVWriter"], "LOG.PERIOD", period, "TEST.EVAL_PERIOD", 10)
    trainer = make(*TESTED, *writers, "SOLVER.MAX_ITER", 20)
    trainer.train()
    [final] = [row for row in rows(tmp_path) if row["iteration"] == 20]
    if resumes:
        trainer = make(*TESTED, *writers, "SOLVER.MAX_ITER", 40, resume=True)
    trainer.max_iter = 40
    trainer.train()
    assert [row["iteration"] for row in rows(tmp_path) if "synthetic/accuracy" in row] == [9, 20, 29, 40]
    numbers = [row["iteration"] for row in rows(tmp_path)]
    assert numbers == ([9, 19, 20, 29, 39, 40] if period == 20 else list(range(41)))
    [kept] = [row for row in rows(tmp_path) if row["iteration"] == 20]
    assert final.items() <= kept.items()
    lines = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == numbers


STOPPED = [
    *(*TESTED, "TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 3, "SOLVER.MAX_ITER", 40, "SOLVER.CHECKPOINT_PERIOD", 4),
    *("LOG.WRITERS", ["JSONWriter"], "MODEL.ARGS.dropout", 0.5, "SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR"),
]


def stopping(patience=2):
    """Early stopping after 4 * (patience + 1) iterations: no accuracy is better than the first."""
    arguments = {"metric": "synthetic/accuracy", "patience": patience, "min_delta": 1}
    return ["HOOKS", [{"NAME": "EarlyStopping", "ARGS": arguments}]]


@pytest.mark.parametrize("options", [[], ["CHECKPOINT.LOAD_BEST_AT_END", True]])
def test_a_resume_or_second_train_of_a_complete_run_returns_its_results(make, tmp_path, log, options):
    options = [*STOPPED, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "SOLVER.MAX_ITER", 12, *options]
    first = make(*options)
    result = first.train()
    assert (result.iteration, result.exit_code) == (12, 0)
    before = contents(tmp_path, "log.txt", ".hookline")
    assert first.train() == result
    again = make(*options, resume=True)
    repeated = again.train()
    assert (repeated.reason, repeated.iteration, repeated.exit_code) == (result.reason, 12, 0)
    assert again._last_eval_results == first._last_eval_results
    assert contents(tmp_path, "log.txt", ".hookline") == before
    assert all(torch.equal(weight, first.model.state_dict()[name]) for name, weight in again.model.state_dict().items())
    assert "Nothing to train" in log.text
    if "CHECKPOINT.LOAD_BEST_AT_END" in options:
        best = first.find_hook(BestCheckpointer)
        assert best.loaded_iter == best.best_iter < 12
        assert first.evaluate() == first._last_eval_results
        for ended in (result, repeated):
            assert ended.metrics["synthetic/accuracy"] == pytest.approx(best.best_metric)
        again.max_iter = 16
        with pytest.raises(ConfigError, match="LOAD_BEST_AT_END"):  # the model has the best weights
            again.train()
        again.resume_or_load(resume=True)
        assert again.train().iteration == 16


@pytest.mark.parametrize(
    ("changes", "iteration"),
    [
        ([], 12),
        (["SOLVER.MAX_ITER", 44, "SOLVER.BASE_LR", 0.5], 12),
        (stopping(patience=4), 20),
        (["HOOKS", []], 40),
    ],
)
def test_an_early_stopped_run_continues_only_with_more_patience(make, tmp_path, changes, iteration):
    first = make(*STOPPED, *stopping())
    result = stop_at(first, 11)  # an interruption in its last step changes nothing
    assert (result.reason.split(":")[0], result.iteration, result.exit_code) == ("early stopping", 12, 0)
    again, before = make(*STOPPED, *stopping(), *changes, resume=True), rows(tmp_path)
    resumed = again.train()
    assert resumed.iteration == iteration
    if iteration == 12:
        assert (resumed.reason, resumed.exit_code, rows(tmp_path)) == (result.reason, 0, before)
        assert first.train() == result  # a second train() stops again, too


@pytest.mark.parametrize("early", [True, False])
def test_a_run_killed_after_its_last_step_is_finished_by_a_resume(make, tmp_path, early):
    options = [*STOPPED, *(stopping() if early else ["SOLVER.MAX_ITER", 12])]
    whole = make(*options).train()
    expected = rows(tmp_path)
    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000011.pth")
    resumed = make(*options, resume=True).train()
    assert (resumed.reason, resumed.iteration, rows(tmp_path)) == (whole.reason, 12, expected)
    assert load(tmp_path)["trainer"]["complete"] is not early


@pytest.mark.parametrize("event", ["before_train", "before_step", "after_step", "after_eval", "on_save"])
def test_a_hook_that_sets_iter_to_max_iter_as_in_detectron2_stops_the_run(make, event):
    def stop(trainer, *args):
        if event == "before_train" or trainer.iter == 7:
            trainer.iter = trainer.max_iter

    trainer = make(*STOPPED)
    trainer.register_hooks([CallbackHook(**{event: stop})])
    result = trainer.train()
    assert (result.iteration, result.exit_code) == (0 if event == "before_train" else 8, 0)
    assert result.reason == "trainer.iter was set to max_iter"
    if event != "before_train":  # nothing was saved
        assert make(*STOPPED, resume=True).start_iter == 8


@pytest.mark.parametrize(("changes", "iteration"), [([], 24), (["SOLVER.MAX_ITER", 20], 20)])
def test_a_length_that_a_hook_set_is_kept_at_a_resume_unless_the_config_changes_it(make, changes, iteration):
    def run(*changes, resume, stop):
        trainer = make("SOLVER.MAX_ITER", 16, *LINEAR, *changes, resume=resume)
        lengthen = CallbackHook(before_step=lambda t: setattr(t, "max_iter", 24) if t.iter == 10 else None)
        trainer.register_hooks([lengthen])
        return stop_at(trainer, stop), trainer.optimizer.param_groups[0]["lr"], trainer.cfg.SOLVER.MAX_ITER

    run(resume=False, stop=13)
    run(resume=True, stop=14)
    result, rate, length = run(*changes, resume=True, stop=-1)
    assert (result.reason, result.iteration, length) == ("completed", iteration, iteration)
    assert rate == pytest.approx(0.0, abs=0.06)
