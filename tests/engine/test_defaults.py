import gc
import inspect
import json
import os
import signal
import statistics
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, default_setup
from hookline.engine.data import DATASET_REGISTRY
from hookline.engine.defaults import resolve_lengths
from hookline.engine.evaluation import DatasetEvaluator
from hookline.hooks import CallbackHook, EventWriter, HookBase, IterationTimer, PeriodicWriter

EPOCH = 10  # iterations in one
TIMES = ("time", "data_time", "eta_seconds")


@DATASET_REGISTRY.register()
class noisy_points(Dataset):
    """Points with random noise at each read."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.full((8,), float(index % 4)) + torch.randn(8) + float(np.random.rand()), index % 4


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """Let train() return after a signal, as in a notebook."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


@pytest.fixture
def make(tmp_path):
    def make(*overrides, folder="run", resume=False):
        cfg = get_cfg()
        cfg.merge_from_list(
            [
                *("MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
                *("MODEL.ARGS", {"in_features": 8, "num_classes": 4, "hidden": [8], "dropout": 0.5}),
                *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 77}}]),
                *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 40, "seed": 1}}]),
                *("DATALOADER.BATCH_SIZE", 8, "SOLVER.MAX_ITER", 30, "SOLVER.BASE_LR", 0.1),
                *("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.WARMUP_ITERS", 5),
                *("SOLVER.CHECKPOINT_PERIOD", 7, "TEST.EVAL_PERIOD", "1ep", "TEST.METRICS", ["Accuracy", "Loss"]),
                *("CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1),
                *("OUTPUT_DIR", str(tmp_path / folder), "SEED", 1),
                *overrides,
            ]
        )
        default_setup(cfg, type("Args", (), {"resume": resume, "eval_only": False}))
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=resume)
        return trainer

    return make


def rows(trainer):
    lines = Path(trainer.cfg.OUTPUT_DIR, "metrics.json").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_run(first, second):
    assert weights(first).keys() == weights(second).keys()
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name]), name
    assert rows(first) == rows(second)


class At(HookBase):
    """Calls a function in the step of one iteration."""

    def __init__(self, iteration, action, event="after_step"):
        self.iteration, self.action = iteration, action
        setattr(self, event, self.act)

    def act(self, *args):
        if self.trainer.iter == self.iteration:
            self.action()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


class Crash(Exception):
    pass


def crash():
    raise Crash


# ---------------------------------------------------------------------------- a run


def test_a_run_writes_its_files_and_returns_its_result(make):
    trainer = make("LOG.WRITERS", ["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"], "LOG.PERIOD", 20)
    result = trainer.train()
    assert (result.reason, result.iteration) == ("completed", 30)
    assert result.metrics["synthetic/accuracy"] == trainer._last_eval_results["synthetic"]["accuracy"]
    names = set(os.listdir(trainer.cfg.OUTPUT_DIR))
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(events) == 1
    assert names - events == {
        *(".hookline", "config.yaml", "log.txt", "metrics.json", "last_checkpoint"),
        *("model_0000006.pth", "model_0000013.pth", "model_0000020.pth", "model_0000027.pth"),
        *("model_best.pth", "model_best_0000019.pth", "model_final.pth"),
    }
    assert [row["iteration"] for row in rows(trainer)] == [9, 19, 29, 30]


def test_the_log_has_model_length_and_results(make):
    trainer = make("LOG.WRITERS", ["CommonMetricPrinter"], "LOG.PERIOD", 20)
    trainer.train()
    log = Path(trainer.cfg.OUTPUT_DIR, "log.txt").read_text()
    for line in (
        "Training for 30 iterations (3 epochs), 8 samples each, on cpu",
        "Starting training from iteration 0",
        "iter: 19/30  loss: ",
        "Evaluation:  synthetic/accuracy: ",
        "Best synthetic/accuracy so far: ",
        "Overall training speed: ",
        "Training ended at iteration 30: completed",
        "synthetic  accuracy",
    ):
        assert line in log, line
    assert log.rindex("eta: 0:00:00") > log.index("iter: 19/30")


def test_losses_are_recorded_every_gather_metric_period(make):
    trainer = make("LOG.GATHER_METRIC_PERIOD", 3)
    trainer.train()
    iterations = [iteration for _, iteration in trainer.storage.history("loss").values()]
    assert iterations == list(range(2, trainer.max_iter, 3))


def test_lengths_in_epochs_use_the_loader_length(make):
    trainer = make("SOLVER.MAX_ITER", "3ep", "SOLVER.WARMUP_ITERS", "0.5ep", "SOLVER.STEPS", ["1ep", "2ep"])
    assert trainer.iters_per_epoch == EPOCH
    assert (trainer.max_iter, trainer.cfg.SOLVER.WARMUP_ITERS, trainer.cfg.SOLVER.STEPS) == (30, 5, (10, 20))


def test_unknown_epoch_length_is_an_error_that_names_the_key():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER = "3ep"
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER: '3ep': the length of an epoch"):
        resolve_lengths(cfg, None)


def test_resolving_lengths_does_not_change_the_config():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER = "3ep"
    cfg.freeze()
    resolved = resolve_lengths(cfg, 10)
    assert (cfg.SOLVER.MAX_ITER, resolved.SOLVER.MAX_ITER) == ("3ep", 30)
    assert resolved.is_frozen()


def test_hooks_of_the_config_receive_their_arguments(make):
    hooks = [{"NAME": "EvalHook", "ARGS": {"eval_period": 4, "eval_after_train": False}}]
    trainer = make("HOOKS", hooks, "TEST.EVAL_PERIOD", 0, "CHECKPOINT.BEST.METRIC", "")
    trainer.train()
    evaluated = [row["iteration"] for row in rows(trainer) if "synthetic/accuracy" in row]
    assert evaluated == [3, 7, 11, 15, 19, 23, 27, 30]


def test_the_best_includes_evaluations_of_the_configs_hooks(make):
    hooks = [{"NAME": "EvalHook", "ARGS": {"eval_period": 4, "eval_after_train": False}}]
    trainer = make("HOOKS", hooks, "TEST.EVAL_PERIOD", 0)
    trainer.train()
    best = torch.load(Path(trainer.cfg.OUTPUT_DIR, "model_best.pth"), weights_only=True)
    accuracy = {row["iteration"]: row["synthetic/accuracy"] for row in rows(trainer) if "synthetic/accuracy" in row}
    assert accuracy[best["iteration"]] == max(accuracy.values())


@pytest.mark.parametrize("test_sets", [["synthetic"], []])
def test_the_best_can_be_chosen_by_the_loss(make, test_sets):
    best = ("CHECKPOINT.BEST.METRIC", "total_loss", "CHECKPOINT.BEST.MODE", "min", "CHECKPOINT.BEST.PERIOD", 5)
    trainer = make(*best, "DATASETS.TEST", test_sets, "TEST.EVAL_PERIOD", 0)
    trainer.train()
    saved = torch.load(Path(trainer.cfg.OUTPUT_DIR, "model_best.pth"), weights_only=True)
    losses = {row["iteration"]: row["total_loss"] for row in rows(trainer) if "total_loss" in row}
    looked_at = {iteration: loss for iteration, loss in losses.items() if (iteration + 1) % 5 == 0}
    assert saved["best_metric"] == {"name": "total_loss", "value": min(looked_at.values()), "mode": "min"}
    assert looked_at[saved["iteration"]] == min(looked_at.values())


def test_a_run_without_test_sets_is_not_evaluated(make):
    trainer = make("DATASETS.TEST", [], "CHECKPOINT.BEST.METRIC", "")
    trainer.train()
    assert not any(name.startswith("synthetic") for row in rows(trainer) for name in row)


@pytest.mark.parametrize(("expected", "met"), [(0.0, False), (0.5, True)])
def test_expected_results_are_checked_at_the_end(make, expected, met):
    trainer = make("TEST.EXPECTED_RESULTS", [["synthetic", "accuracy", expected, 0.5 if met else 1e-6]])
    if met:
        assert trainer.train().reason == "completed"
    else:
        with pytest.raises(SystemExit) as end:
            trainer.train()
        assert end.value.code == 1


def final_state(trainer):
    return torch.load(Path(trainer.cfg.OUTPUT_DIR, "model_final.pth"), weights_only=True)


def assert_same_end(first, second):
    """Assert equal weights, random states and optimizer states."""
    assert_same_run(first, second)
    first, second = (final_state(trainer)["trainer"] for trainer in (first, second))
    for part in ("iteration", "optimizer", "rng", "data", "end"):
        assert str(first[part]) == str(second[part]), part


@pytest.mark.parametrize(
    ("stop", "at", "workers"), [(interrupt, 4, 0), (interrupt, 13, 1), ("request", 9, 0), ("deadline", 13, 0)]
)
def test_a_second_train_after_a_stop_continues_exactly(make, stop, at, workers):
    arguments = ["DATASETS.TRAIN", ["noisy_points"], "DATALOADER.NUM_WORKERS", workers, "LOG.PERIOD", 4]
    whole = make(*arguments, folder="whole")
    whole.train()
    trainer = make(*arguments)
    codes = {"request": 0, "deadline": 75}
    act = stop if stop is interrupt else lambda: trainer.request_stop(stop, codes[stop])
    trainer.register_hooks([At(at, act)])
    assert trainer.train().iteration == at + 1
    torch.rand(3)
    assert trainer.train().reason == "completed"
    assert_same_end(whole, trainer)


def test_a_second_train_after_the_end_does_nothing(make, tmp_path):
    trainer = make()
    result = trainer.train()
    before = weights(trainer), rows(trainer)
    final = Path(trainer.cfg.OUTPUT_DIR, "model_final.pth")
    written = final.stat().st_mtime_ns
    assert trainer.train() == result
    assert (str(weights(trainer)), rows(trainer)) == (str(before[0]), before[1])
    assert final.stat().st_mtime_ns == written
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("Nothing to train: the run ended at iteration 30 (completed). To continue, raise trainer.max") == 1


def test_a_longer_second_train_equals_a_resume_with_that_length(make):
    resumed = make("SOLVER.MAX_ITER", 20, folder="resumed")
    resumed.train()
    resumed = make("SOLVER.MAX_ITER", 30, folder="resumed", resume=True)
    resumed.train()
    trainer = make("SOLVER.MAX_ITER", 20)
    trainer.train()
    trainer.max_iter = 30
    assert trainer.train().iteration == 30
    assert_same_end(resumed, trainer)
    assert min(row["lr"] for row in rows(trainer)[20:29]) > 0


CONSTANT = ["SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR", "SOLVER.WARMUP_ITERS", 0, "SOLVER.MAX_ITER", 10]


@pytest.mark.parametrize("trained", [False, True])
def test_a_learning_rate_set_by_hand_is_the_base_rate_of_a_constant_schedule(make, trained):
    trainer = make(*CONSTANT)
    if trained:
        trainer.train()
    trainer.optimizer.param_groups[0]["lr"] = 0.03
    trainer.max_iter = 20
    trainer.train()
    assert [row["lr"] for row in rows(trainer) if "lr" in row] == [0.1] * 10 * trained + [0.03] * (20 - 10 * trained)
    for by_hand, used in ((None, 0.03), (0.02, 0.02)):
        resumed = make(*CONSTANT, "SOLVER.MAX_ITER", trainer.max_iter + 4, resume=True)
        if by_hand:
            resumed.optimizer.param_groups[0]["lr"] = by_hand
            resumed.max_iter += 4
        resumed.train()
        assert rows(resumed)[-2]["lr"] == used


@pytest.mark.parametrize("schedule", [[], ["SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:LinearLR"]])
def test_a_learning_rate_that_a_schedule_would_replace_is_refused(make, schedule):
    trainer = make("SOLVER.WARMUP_ITERS", 0, "SOLVER.MAX_ITER", 10, *schedule)
    trainer.train()
    trainer.optimizer.param_groups[0]["lr"] = 0.03
    trainer.max_iter = 20
    before = rows(trainer)
    with pytest.raises(ConfigError, match=r"set to 0.03, but the schedule sets it in each step.*SOLVER\.BASE_LR"):
        trainer.train()
    assert rows(trainer) == before


@pytest.mark.parametrize(("name", "length"), [("CosineAnnealingLR", "T_max"), ("OneCycleLR", "total_steps")])
@pytest.mark.parametrize("when", ["in the middle", "after the end"])
def test_a_run_with_a_schedule_of_fixed_length_is_not_extended(make, name, length, when):
    more = {"max_lr": 0.1} if name == "OneCycleLR" else {}
    trainer = make(*torch_schedule(name, **{length: 12}, **more), "SOLVER.WARMUP_ITERS", 0, "SOLVER.MAX_ITER", 12)

    def extend():
        trainer.max_iter = 30

    if when == "in the middle":
        trainer.register_hooks([At(7, extend)])
    else:
        trainer.train()
        extend()
    with pytest.raises(ConfigError, match=rf"longer than 12 .* {name} .* \({length}=12\)\. .*{length}: \"end\""):
        trainer.train()
    assert trainer.max_iter == trainer.cfg.SOLVER.MAX_ITER == 12


@pytest.mark.parametrize(("key", "value"), [("SOLVER.BASE_LR", 0.03), ("DATALOADER.BATCH_SIZE", 4)])
@pytest.mark.parametrize("given", [False, True])
def test_a_config_changed_between_two_train_calls_is_refused(make, key, value, given):
    cfg = make().cfg.clone()
    trainer = DefaultTrainer(cfg)
    (cfg if given else trainer.cfg).merge_from_list(["SOLVER.GAMMA", 0.5])  # before the first train()
    trainer.max_iter = 10
    trainer.train()
    (cfg if given else trainer.cfg).merge_from_list([key, value, "TEST.EVAL_PERIOD", 3])
    trainer.max_iter = 20
    with pytest.raises(ConfigError, match=rf"^{key}: was changed between two train\(\) calls.*make a new trainer"):
        trainer.train()


def test_a_loader_of_a_changed_config_is_used(make):
    trainer = make(*CONSTANT)
    trainer.train()
    trainer.cfg.DATALOADER.BATCH_SIZE = 4
    trainer.reset_data_loader(lambda: trainer.build_train_loader(trainer.cfg))
    trainer.max_iter = 12
    assert trainer.train().iteration == 12


def test_a_changed_max_iter_changes_the_schedule(make):
    whole = make("MODEL.ARGS.dropout", 0.0, folder="whole")
    whole.train()
    trainer = make("MODEL.ARGS.dropout", 0.0, "SOLVER.MAX_ITER", 12)

    def extend():
        trainer.max_iter = 30

    trainer.register_hooks([At(7, extend)])
    assert trainer.train().iteration == 30
    of_whole, of_trainer = ([row["lr"] for row in rows(one) if "lr" in row] for one in (whole, trainer))
    assert of_trainer[8:] == of_whole[8:]
    assert trainer.cfg.SOLVER.MAX_ITER == 30
    resumed = make("MODEL.ARGS.dropout", 0.0, "SOLVER.MAX_ITER", 30, resume=True)
    assert resumed.train().iteration == 30


def torch_schedule(name, **args):
    return ["SOLVER.LR_SCHEDULER_NAME", f"torch.optim.lr_scheduler:{name}", "SOLVER.LR_SCHEDULER_ARGS", args]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("CosineAnnealingLR", {"T_max": "end"}),
        ("OneCycleLR", {"total_steps": "end", "max_lr": 0.1}),
        ("StepLR", {"step_size": 7}),
    ],
)
@pytest.mark.parametrize("when", ["in the middle", "after the end", "in a resume"])
def test_torch_schedules_follow_the_length_of_the_run(make, name, args, when):
    schedule = [*torch_schedule(name, **args), "SOLVER.WARMUP_ITERS", 0, "MODEL.ARGS.dropout", 0.0]
    whole = make(*schedule, folder="whole")
    whole.train()
    trainer = make(*schedule, "SOLVER.MAX_ITER", 12)

    def extend():
        trainer.max_iter = 30

    if when == "in the middle":
        trainer.register_hooks([At(7, extend)])
    trainer.train()
    if when == "after the end":
        extend()
        trainer.train()
    if when == "in a resume":
        trainer = make(*schedule, resume=True)
        trainer.train()
    of_whole, of_trainer = ([row["lr"] for row in rows(one) if "lr" in row] for one in (whole, trainer))
    first = 8 if when == "in the middle" else 12
    assert of_trainer[first:] == of_whole[first:]
    assert trainer.scheduler.last_epoch == 30


def test_with_a_period_of_an_epoch_the_mean_of_the_epoch_is_written_also_after_a_resume(make):
    def run(folder, period, *overrides, **options):
        trainer = make("LOG.PERIOD", period, "CHECKPOINT.BEST.METRIC", "", *overrides, folder=folder, **options)
        trainer.train()
        return [(row["iteration"], row["total_loss"]) for row in rows(trainer) if "total_loss" in row]

    each = dict(run("each", 1))
    means = [(last, statistics.fmean(each[it] for it in range(last - 9, last + 1))) for last in (9, 19, 29)]
    assert run("means", "1ep") == means
    stopped = make("LOG.PERIOD", "1ep", "CHECKPOINT.BEST.METRIC", "", folder="parts")
    stopped.register_hooks([At(14, lambda: stopped.request_stop("enough", exit_code=75))])
    stopped.train()
    assert run("parts", "1ep", resume=True) == means
    assert run("long", 25)[0] == (24, statistics.fmean(each[it] for it in range(25)))
    assert run("short", 5)[0] == (4, statistics.median(each[it] for it in range(5)))


def test_a_warm_up_may_be_a_fraction_of_the_run(make):
    trainer = make("SOLVER.MAX_ITER", "3ep", "SOLVER.WARMUP_ITERS", 0.1, "SOLVER.LR_SCHEDULER_NAME", "ConstantLR")
    assert (trainer.max_iter, trainer.cfg.SOLVER.WARMUP_ITERS) == (30, 3)
    trainer.train()
    assert [row["lr"] for row in rows(trainer)[:5]] == pytest.approx([0.0001, 0.0334, 0.0667, 0.1, 0.1])
    assert "WARMUP_ITERS: 0.1\n" in Path(trainer.cfg.OUTPUT_DIR, "config.yaml").read_text()


def test_schedules_of_several_optimizers_follow_the_length_of_the_run(make):
    cosine = {"LR_SCHEDULER_NAME": "torch.optim.lr_scheduler:CosineAnnealingLR", "LR_SCHEDULER_ARGS": {"T_max": "end"}}
    parts = ["SOLVER.OPTIMIZERS", {"first": {"PARAMS": ["1"], "WARMUP_ITERS": 0, **cosine}, "rest": {}}]
    whole = make(*parts, folder="whole")
    whole.train()
    trainer = make(*parts, "SOLVER.MAX_ITER", 12)
    trainer.train()
    trainer.max_iter = 30
    trainer.train()
    for key in ("lr/first", "lr/rest"):
        of_whole, of_trainer = ([row[key] for row in rows(one) if key in row] for one in (whole, trainer))
        assert of_trainer[12:] == of_whole[12:]


def test_a_length_in_epochs_is_refused(make):
    with pytest.raises(ConfigError, match=r"'20ep'; for 20 epochs: 20 \* trainer.iters_per_epoch"):
        make().max_iter = "20ep"


def test_a_signal_ends_a_script_when_the_run_is_saved(make, monkeypatch, tmp_path):
    monkeypatch.delattr(sys, "ps1")
    trainer = make()
    trainer.register_hooks([At(4, interrupt)])
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 130
    assert (tmp_path / "run" / "model_0000004.pth").exists()


def test_the_last_row_of_an_interrupted_run_has_its_losses(make):
    writers = ["LOG.WRITERS", ["CommonMetricPrinter", "JSONWriter"], "LOG.PERIOD", 4]
    trainer = make(*writers, "TEST.EVAL_PERIOD", 0)
    trainer.register_hooks([At(13, interrupt)])
    trainer.train()
    last = json.loads(Path(trainer.cfg.OUTPUT_DIR, "metrics.json").read_text().splitlines()[-1])
    assert last["iteration"] == 13
    assert {"loss", "eta_seconds"} <= last.keys()


def test_training_does_not_continue_with_the_best_weights(make):
    trainer = make("CHECKPOINT.LOAD_BEST_AT_END", True)
    trainer.train()
    before = weights(trainer)
    trainer.max_iter = 40
    with pytest.raises(ConfigError, match=r"LOAD_BEST_AT_END: .*resume_or_load\(resume=True\)"):
        trainer.train()
    assert str(weights(trainer)) == str(before)


def test_a_second_train_discards_gradients_of_a_failed_step(make):
    trainer = make()
    trainer.register_hooks([At(3, crash, "before_optimizer_step")])
    with pytest.raises(Crash):
        trainer.train()
    assert any(parameter.grad is not None for parameter in trainer.model.parameters())
    trainer.remove_hook(At)
    seen = []
    note = CallbackHook(before_forward=lambda t, batch: seen.append([p.grad for p in t.model.parameters()]))
    trainer.register_hooks([note])
    assert trainer.train().iteration == 30
    assert all(gradient is None for gradient in seen[0])


def test_a_deleted_trainer_is_freed_at_once(make):
    trainer = make()
    trainer.train()
    gone = weakref.ref(trainer)
    gc.disable()  # objects that wait for the garbage collector keep memory and loader workers alive
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()


def test_equal_seeds_give_equal_runs(make):
    first, second = make(folder="a"), make(folder="b")
    first.train()
    torch.manual_seed(1)
    second = make(folder="c")
    second.train()
    assert_same_run(first, second)


def test_micro_batches_give_the_same_gradient(make):
    one = make("MODEL.ARGS.dropout", 0.0, folder="a")
    one.train()
    parts = make("MODEL.ARGS.dropout", 0.0, "SOLVER.ACCUMULATION_STEPS", 3, folder="b")
    parts.train()
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(parts)[name], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("sampler", ["EpochSampler", "TrainingSampler"])
def test_an_interrupted_and_resumed_run_equals_the_uninterrupted_run(make, sampler):
    whole = make("DATALOADER.SAMPLER_TRAIN", sampler, folder="whole")
    whole.train()
    for at in (0, 4, 9, 10, 14, 28):
        stopped = make("DATALOADER.SAMPLER_TRAIN", sampler, folder=f"at {at}")
        stopped.register_hooks([At(at, interrupt, "before_step")])
        result = stopped.train()
        assert (result.reason, result.iteration) == ("interrupted by SIGINT", at + 1)
        torch.rand(3)
        resumed = make("DATALOADER.SAMPLER_TRAIN", sampler, folder=f"at {at}", resume=True)
        assert resumed.start_iter == at + 1
        resumed.train()
        assert_same_run(whole, resumed)


@pytest.mark.parametrize("at", [8, 9, 17])
def test_a_resumed_run_with_reduce_lr_on_plateau_equals_the_uninterrupted_run(make, at):
    schedule = [
        *("SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:ReduceLROnPlateau", "SOLVER.WARMUP_ITERS", 0),
        # With this threshold no loss counts as better: the rate is halved at every second evaluation.
        *("SOLVER.LR_SCHEDULER_ARGS", {"factor": 0.5, "patience": 1, "threshold": 0.99}),
        *("SOLVER.LR_SCHEDULER_METRIC", "synthetic/loss", "TEST.EVAL_PERIOD", 5),
    ]
    whole = make(*schedule, folder="whole")
    whole.train()
    assert [row["lr"] for row in rows(whole)[:30]] == [0.1] * 15 + [0.05] * 10 + [0.025] * 5
    stopped = make(*schedule)
    stopped.register_hooks([At(at, interrupt, "before_step")])
    stopped.train()
    resumed = make(*schedule, resume=True)
    resumed.train()
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("at", [8, 13, 20, 29])
def test_a_crashed_and_resumed_run_equals_the_uninterrupted_run(make, at):
    whole = make(folder="whole")
    whole.train()
    crashed = make()
    crashed.register_hooks([At(at, crash)])
    with pytest.raises(Crash):
        crashed.train()
    resumed = make(resume=True)
    resumed.train()
    assert_same_run(whole, resumed)


def test_a_run_interrupted_repeatedly_equals_the_uninterrupted_run(make):
    whole = make(folder="whole")
    whole.train()
    resume = False
    for at in (3, 9, 10, 17, 25):
        trainer = make(resume=resume)
        trainer.register_hooks([At(at, interrupt)])
        trainer.train()
        resume = True
    trainer = make(resume=True)
    trainer.train()
    assert_same_run(whole, trainer)


def test_random_data_is_the_same_after_a_resume(make):
    overrides = ["DATASETS.TRAIN", ["noisy_points"]]
    whole = make(*overrides, folder="whole")
    whole.train()
    stopped = make(*overrides)
    stopped.register_hooks([At(14, interrupt)])
    stopped.train()
    resumed = make(*overrides, resume=True)
    resumed.train()
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("first", [10, 20, 25])
def test_an_extended_run_equals_the_long_run(make, first):
    constant = ["SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.STEPS", [15], "SOLVER.WARMUP_ITERS", 0]
    whole = make(*constant, folder="whole")
    whole.train()
    make(*constant, "SOLVER.MAX_ITER", first).train()
    resumed = make(*constant, resume=True)
    assert resumed.start_iter == first
    resumed.train()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name])
    losses = {row["iteration"]: row["loss"] for row in rows(whole) if "loss" in row}
    assert {row["iteration"]: row["loss"] for row in rows(resumed) if "loss" in row} == losses
    iterations = [row["iteration"] for row in rows(resumed)]
    assert iterations == sorted({*iterations})


def test_resuming_a_complete_run_trains_no_step(make):
    done = make()
    done.train()
    before = weights(done)
    again = make(resume=True)
    assert again.start_iter == 30
    assert again.train().iteration == 30
    for name, value in before.items():
        assert torch.equal(value, weights(again)[name])


def test_the_best_value_is_remembered_over_a_resume(make):
    make().train()
    again = make("SOLVER.MAX_ITER", 40, resume=True)
    (best,) = [hook for hook in again._hooks if type(hook).__name__ == "BestCheckpointer"]
    assert best.best_metric == max(row.get("synthetic/accuracy", 0) for row in rows(again))


def test_a_resume_without_a_checkpoint_starts_from_the_beginning(make, tmp_path):
    trainer = make(resume=True)
    assert trainer.start_iter == 0
    trainer.train()
    assert "No checkpoint to resume" in (tmp_path / "run" / "log.txt").read_text()


def test_a_resume_uses_the_newest_intact_checkpoint(make, tmp_path):
    make().train()
    loaded = []
    (tmp_path / "run" / "model_final.pth").write_bytes(b"torn")
    trainer = make(resume=True)
    assert trainer.start_iter == 28
    trainer = make(resume=True)
    trainer.register_hooks([CallbackHook(after_load=lambda trainer, path: loaded.append(path))])
    trainer.resume_or_load(resume=True)
    assert loaded == [str(tmp_path / "run" / "model_0000027.pth")]


def test_initial_weights_are_loaded_without_the_rest_of_the_checkpoint(make, tmp_path):
    first = make(folder="first")
    first.train()
    trainer = make("MODEL.WEIGHTS", str(tmp_path / "first" / "model_final.pth"))
    assert trainer.start_iter == 0
    for name, value in weights(first).items():
        assert torch.equal(value, weights(trainer)[name])


def test_initial_weights_of_the_user_stay_when_a_run_is_moved(make, tmp_path):
    make().train()
    path = tmp_path / "run" / "model_final.pth"
    mine = path.rename(tmp_path / "run" / "mine.pth")
    before = torch.load(mine, weights_only=True)["model"]
    trainer = make("MODEL.WEIGHTS", str(mine), "SOLVER.MAX_ITER", 1)
    for name, value in before.items():
        assert torch.equal(value, weights(trainer)[name])
    trainer.train()
    assert mine.exists()
    assert (tmp_path / "run" / "previous_001" / "metrics.json").exists()


# ---------------------------------------------------------------------------- parts to replace


class Fixed(DatasetEvaluator):
    def __init__(self, name="task"):
        self.name, self.batches = name, 0

    def reset(self):
        self.batches = 0

    def process(self, inputs, outputs):
        self.batches += 1

    def evaluate(self):
        return {self.name: {"batches": self.batches}}


def test_an_evaluator_can_name_tasks_on_a_single_set(make):
    trainer = make()
    assert trainer.test(trainer.cfg, trainer.model, Fixed()) == {"task": {"batches": 5}}
    assert trainer.test(trainer.cfg, trainer.model, [Fixed("synthetic")]) == {"synthetic": {"batches": 5}}


def test_a_wrong_number_of_evaluators_is_an_error(make):
    trainer = make()
    with pytest.raises(ConfigError, match="1 sets, but 2 evaluators"):
        trainer.test(trainer.cfg, trainer.model, [Fixed(), Fixed()])


def test_a_test_set_without_metrics_is_an_error_unless_a_subclass_evaluates(make):
    with pytest.raises(ConfigError, match=r"TEST\.METRICS is empty"):
        make("TEST.METRICS", [], "CHECKPOINT.BEST.METRIC", "", folder="refused")

    class Mine(DefaultTrainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return Fixed(dataset_name)

    cfg = make("CHECKPOINT.BEST.METRIC", "").cfg.clone()
    cfg.defrost()
    cfg.TEST.METRICS = []
    assert Mine(cfg).evaluate()["synthetic"]["batches"] == 5


def test_a_subclass_can_replace_parts_hooks_and_writers(make):
    class Written(EventWriter):
        times = 0

        def write(self):
            Written.times += 1

    class Mine(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return nn.Sequential(nn.Flatten(), nn.Linear(8, 4))

        @classmethod
        def build_train_loader(cls, cfg):
            return DataLoader([(torch.zeros(8), 1)] * 6, batch_size=2)

        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return Fixed(dataset_name)

        def build_hooks(self):
            kept = [hook for hook in super().build_hooks() if not isinstance(hook, IterationTimer)]
            return [*kept, IterationTimer(warmup_iter=0)]

        def build_writers(self):
            return [Written()]

    trainer = Mine(make("CHECKPOINT.BEST.METRIC", "").cfg)
    assert trainer.iters_per_epoch == 3
    result = trainer.train()
    assert result.metrics["synthetic/batches"] == 5
    assert Written.times == 31
    assert len(trainer.storage.history("time")) == 30
    assert any(isinstance(hook, PeriodicWriter) for hook in trainer._hooks)


def test_auto_scale_workers():
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("SOLVER.REFERENCE_WORLD_SIZE", 4, "DATALOADER.BATCH_SIZE", 32, "SOLVER.BASE_LR", 0.4),
            *("SOLVER.MAX_ITER", 100, "SOLVER.STEPS", [60, 80], "SOLVER.WARMUP_ITERS", "2ep", "TEST.EVAL_PERIOD", 50),
        ]
    )
    cfg.freeze()
    scaled = DefaultTrainer.auto_scale_workers(cfg, 2)
    assert (scaled.DATALOADER.BATCH_SIZE, scaled.SOLVER.BASE_LR, scaled.SOLVER.MAX_ITER) == (16, 0.2, 200)
    assert (scaled.SOLVER.STEPS, scaled.SOLVER.WARMUP_ITERS, scaled.TEST.EVAL_PERIOD) == ((120, 160), "2ep", 100)
    assert scaled.SOLVER.REFERENCE_WORLD_SIZE == 2
    assert scaled.is_frozen()
    assert cfg.DATALOADER.BATCH_SIZE == 32
    assert DefaultTrainer.auto_scale_workers(scaled, 2) is scaled
    assert DefaultTrainer.auto_scale_workers(get_cfg(), 8).DATALOADER.BATCH_SIZE == 16


def test_type_checkers_accept_any_type_of_the_config_in_an_overridden_method():
    methods = [
        name
        for name in vars(DefaultTrainer)
        if name.startswith("build_") and name not in ("build_hooks", "build_writers")
    ]
    for name in (*methods, "test", "auto_scale_workers"):
        assert inspect.signature(getattr(DefaultTrainer, name)).parameters["cfg"].annotation is Any, name
