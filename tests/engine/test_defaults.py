import gc
import os
import statistics
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from metric_runs import at
from ranks import rows
from small_runs import Collect, mlp_config, trainer_of
from starts import arguments
from torch.utils.data import Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, default_setup
from hookline.engine.data import DATASET_REGISTRY
from hookline.engine.solver.schedules import resolve_lengths
from hookline.hooks import BestCheckpointer, CallbackHook


@DATASET_REGISTRY.register()
class noisy_points(Dataset):
    """Points with random noise at each read."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.full((8,), float(index % 4)) + torch.randn(8) + float(np.random.rand()), index % 4


@pytest.fixture
def make(tmp_path):
    """Make a trainer of 30 iterations, 10 an epoch."""
    given = [
        *("MODEL.DEVICE", "cpu", "MODEL.ARGS", {"hidden": [8], "dropout": 0.5}),
        *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 77}}], "DATALOADER.BATCH_SIZE", 8),
        *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 40, "seed": 1}}], "SOLVER.MAX_ITER", 30),
        *("SOLVER.BASE_LR", 0.1, "SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.WARMUP_ITERS", 5),
        *("SOLVER.CHECKPOINT_PERIOD", 7, "TEST.EVAL_PERIOD", "1ep", "TEST.METRICS", ["Accuracy", "Loss"]),
        *("CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "SEED", 1),
    ]

    def make(*overrides, folder="run", resume=False):
        cfg = mlp_config(tmp_path / folder, *given, *overrides)
        default_setup(cfg, arguments(resume=resume))
        return trainer_of(cfg, resume)

    return make


def rows_of(trainer):
    return rows(Path(trainer.cfg.OUTPUT_DIR))


def values(trainer, name):
    return {row["iteration"]: row[name] for row in rows_of(trainer) if name in row}


def saved(trainer, name="model_final"):
    return torch.load(Path(trainer.cfg.OUTPUT_DIR, f"{name}.pth"), weights_only=True)


def assert_same_end(first, second):
    """Assert equal rows, weights, random states and optimizer states."""
    assert rows_of(first) == rows_of(second)
    first, second = saved(first), saved(second)
    assert str(first["model"]) == str(second["model"])
    for part in ("iteration", "optimizer", "rng", "data", "complete"):
        assert str(first["trainer"][part]) == str(second["trainer"][part]), part


def test_a_run_writes_its_files_and_log_and_returns_its_result(make):
    trainer = make("LOG.WRITERS", ["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"], "LOG.PERIOD", 20)
    result = trainer.train()
    assert (result.reason, result.iteration) == ("completed", 30)
    assert result.metrics["synthetic/accuracy"] == trainer.evaluate()["synthetic"]["accuracy"]
    names = set(os.listdir(trainer.cfg.OUTPUT_DIR))
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(events) == 1
    assert names - events == {
        *(".hookline", "config.yaml", "log.txt", "metrics.json", "last_checkpoint"),
        *("model_0000006.pth", "model_0000013.pth", "model_0000020.pth", "model_0000027.pth"),
        *("model_best.pth", "model_best_0000019.pth", "model_final.pth"),
    }
    assert [row["iteration"] for row in rows_of(trainer)] == [9, 19, 29, 30]
    log = Path(trainer.cfg.OUTPUT_DIR, "log.txt").read_text()
    for line in (
        "Training for 30 iterations (3 epochs), 8 samples each, on cpu",
        "iter: 19/30  loss: ",
        "Evaluation:  synthetic/accuracy: ",
        "Best synthetic/accuracy so far: ",
        "Training ended at iteration 30: completed",
    ):
        assert line in log, line


def test_lengths_in_epochs_and_fractions_are_those_of_the_loader(make):
    trainer = make("SOLVER.MAX_ITER", "3ep", "SOLVER.WARMUP_ITERS", "0.5ep", "SOLVER.STEPS", ["1ep", "2ep"])
    assert (trainer.max_iter, trainer.cfg.SOLVER.WARMUP_ITERS, trainer.cfg.SOLVER.STEPS) == (30, 5, (10, 20))
    trainer = make("SOLVER.MAX_ITER", "3ep", "SOLVER.WARMUP_ITERS", 0.1, "SOLVER.LR_SCHEDULER_NAME", "ConstantLR")
    trainer.train()
    assert list(values(trainer, "lr").values())[:5] == pytest.approx([0.0001, 0.0334, 0.0667, 0.1, 0.1])
    assert "WARMUP_ITERS: 0.1\n" in Path(trainer.cfg.OUTPUT_DIR, "config.yaml").read_text()
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER = "3ep"
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER"):
        resolve_lengths(cfg, None)


def test_the_mean_of_an_epoch_is_written_also_after_a_resume(make):
    def run(folder, period, **options):
        trainer = make("LOG.PERIOD", period, "CHECKPOINT.BEST.METRIC", "", folder=folder, **options)
        trainer.train()
        return list(values(trainer, "total_loss").items())

    each = dict(run("each", 1))
    means = [(last, statistics.fmean(each[it] for it in range(last - 9, last + 1))) for last in (9, 19, 29)]
    assert run("means", "1ep") == means
    stopped = make("LOG.PERIOD", "1ep", "CHECKPOINT.BEST.METRIC", "", folder="parts")
    stopped.register_hooks([at(14, lambda trainer: trainer.request_stop("enough", exit_code=75))])
    stopped.train()
    assert run("parts", "1ep", resume=True) == means
    assert run("long", 25)[0] == (24, statistics.fmean(each[it] for it in range(25)))


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


@pytest.mark.parametrize(("iteration", "exit_code"), [(9, 0), (4, 75)])
def test_a_second_train_after_a_stop_continues_exactly(make, iteration, exit_code):
    arguments = ["DATASETS.TRAIN", ["noisy_points"], "LOG.PERIOD", 4]
    whole = make(*arguments, folder="whole")
    whole.train()
    trainer = make(*arguments)
    trainer.register_hooks([at(iteration, lambda trainer: trainer.request_stop("enough", exit_code))])
    assert trainer.train().iteration == iteration + 1
    torch.rand(3)
    assert trainer.train().reason == "completed"
    assert_same_end(whole, trainer)


def scheduled(name, **args):
    return ["SOLVER.LR_SCHEDULER_NAME", name, "SOLVER.LR_SCHEDULER_ARGS", args, "SOLVER.WARMUP_ITERS", 0]


def extended(make, arguments, when):
    """Make a run of 12 iterations; return it and a function that extends it to 30 at some time."""
    trainer = make(*arguments, "SOLVER.MAX_ITER", 12)

    def extend(trainer=trainer):
        trainer.max_iter = 30

    if when == "in the middle":
        trainer.register_hooks([at(7, extend)])
        return trainer, trainer.train
    trainer.train()
    if when == "in a resume":
        return trainer, partial(make, *arguments, "SOLVER.MAX_ITER", 30, resume=True)
    extend()
    return trainer, trainer.train


PARTS = ["SOLVER.OPTIMIZERS", {"first": {"PARAMS": ["1"], "BASE_LR": 0.3}, "rest": {}}]


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (["MODEL.ARGS.dropout", 0.0], "in the middle"),
        (PARTS, "after the end"),
        (scheduled("torch.optim.lr_scheduler:StepLR", step_size=7), "in the middle"),
    ],
)
def test_an_extended_run_follows_the_schedule_of_the_longer_one(make, arguments, when):
    whole = make(*arguments, folder="whole")
    whole.train()
    trainer, extend = extended(make, arguments, when)
    extend()
    assert trainer.cfg.SOLVER.MAX_ITER == 30
    for name in ("lr/first", "lr/rest") if arguments is PARTS else ("lr",):
        rates = [[rate for it, rate in values(one, name).items() if it >= 12] for one in (trainer, whole)]
        assert len(rates[0]) == 18
        assert rates[0] == rates[1]


def linear(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + max(0, 1 - step / num_steps))


@pytest.mark.parametrize(
    ("schedule", "args", "when", "named"),
    [
        ("torch.optim.lr_scheduler:CosineAnnealingLR", {"T_max": "end"}, "after the end", "CosineAnnealingLR"),
        ("torch.optim.lr_scheduler:OneCycleLR", {"max_lr": 0.1, "total_steps": "end"}, "in a resume", "OneCycleLR"),
        ("torch.optim.lr_scheduler:OneCycleLR", {"max_lr": 0.1, "total_steps": 12}, "in a resume", "OneCycleLR cannot"),
        (f"{__name__}:linear", {"num_steps": "end"}, "in a resume", "LambdaLR cannot follow"),
    ],
)
def test_a_run_whose_schedule_was_made_for_its_length_is_not_extended(make, schedule, args, when, named):
    trainer, extend = extended(make, scheduled(schedule, **args), when)
    with pytest.raises(ConfigError, match=rf"SOLVER\.MAX_ITER: {named}"):
        extend()
    assert trainer.max_iter == trainer.cfg.SOLVER.MAX_ITER == 12


def test_a_schedule_with_a_number_for_its_length_stays_as_it_is_in_a_longer_run(make, log):
    trainer, extend = extended(make, scheduled(f"{__name__}:linear", num_steps=12), "in the middle")
    extend()
    assert "LambdaLR stays as it was built, for a run of 12 iterations" in log.text
    assert min(values(trainer, "lr").values()) == pytest.approx(0.1 * trainer.cfg.SOLVER.BASE_LR)


class Joined(torch.optim.lr_scheduler.LRScheduler):
    """Calls schedulers of its own, by name."""

    def __init__(self, optimizer):
        self.schedulers = {"all": torch.optim.lr_scheduler.ConstantLR(optimizer)}
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


def test_a_scheduler_that_has_schedulers_is_one(make, log):
    _, extend = extended(make, scheduled(f"{__name__}:Joined"), "in a resume")
    extend()
    assert "Joined stays as it was built" in log.text


class SetsItsConfig(DefaultTrainer):
    """As trainers of detectron2 that log to W&B."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.cfg = cfg


def test_a_trainer_that_sets_the_config_it_got_is_extended_and_resumed(make, log):
    def rates(cls, folder):
        cfg = make(folder=folder).lengths.user_cfg
        cfg.merge_from_list(["SEED", -1, "SOLVER.MAX_ITER", "1ep"])
        trainer = cls(cfg.clone())
        trainer.train()
        trainer.max_iter = 20
        trainer.train()
        cfg.SOLVER.MAX_ITER = "3ep"
        again = cls(cfg)
        again.resume_or_load()
        again.train()
        return values(again, "lr"), trainer.cfg.SOLVER.MAX_ITER

    assert rates(SetsItsConfig, "own") == rates(DefaultTrainer, "ours")
    assert log.text.count("Resuming with ") == log.text.count("Resuming with SOLVER.MAX_ITER = 30 instead of 20") == 2


def test_keys_that_are_read_later_have_their_present_value(make):
    own = ["SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR", "CHECKPOINT.BEST.METRIC", "total_loss"]
    trainer = make(*own, "SOLVER.WARMUP_ITERS", 0, "SOLVER.MAX_ITER", 5)
    trainer.cfg.merge_from_list(["SOLVER.BASE_LR", 0.3, "TEST.METRICS", ["Loss"], "SOLVER.MAX_ITER", 3])
    assert trainer.train().metrics.keys() & {"synthetic/accuracy", "synthetic/loss"} == {"synthetic/loss"}
    trainer.cfg.TEST.METRICS, trainer.max_iter = ["Accuracy"], 7
    assert trainer.train().iteration == 7
    assert trainer.cfg.SOLVER.BASE_LR == 0.1
    assert set(values(trainer, "lr").values()) == {0.1}
    assert trainer.evaluate()["synthetic"].keys() == {"accuracy"}


def test_weights_that_a_script_names_after_making_the_trainer_are_loaded(make, tmp_path):
    make().train()
    path, cfg = str(tmp_path / "run" / "model_0000013.pth"), make().lengths.user_cfg.clone()
    cfg.OUTPUT_DIR = str(tmp_path / "second")
    for changed in ("own", "given"):
        trainer = DefaultTrainer(cfg)
        (trainer.cfg if changed == "own" else cfg).MODEL.WEIGHTS = path
        trainer.resume_or_load(resume=False)
        assert trainer.checkpointer.loaded_from == path


def test_hooks_learn_of_the_checkpoint_that_is_resumed_the_newest_intact_one(make, tmp_path):
    make().train()
    (tmp_path / "run" / "model_final.pth").write_bytes(b"torn")
    loaded, trainer = [], make(resume=True)
    trainer.register_hooks([CallbackHook(after_load=lambda trainer, path: loaded.append(path))])
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 28
    assert loaded == [str(tmp_path / "run" / "model_0000027.pth")]
    assert trainer.find_hook(BestCheckpointer).best_metric == max(values(trainer, "synthetic/accuracy").values())


def test_evaluators_of_the_user(make):
    trainer = make()
    assert trainer.test(trainer.cfg, trainer.model, Collect()) == {"all": {"batches": 5}}
    assert trainer.test(trainer.cfg, trainer.model, [Collect("synthetic")]) == {"synthetic": {"batches": 5}}
    with pytest.raises(ConfigError, match="1 sets, but 2 evaluators"):
        trainer.test(trainer.cfg, trainer.model, [Collect(), Collect()])


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
    assert DefaultTrainer.auto_scale_workers(scaled, 2) is scaled
    assert DefaultTrainer.auto_scale_workers(get_cfg(), 8).DATALOADER.BATCH_SIZE == 16
