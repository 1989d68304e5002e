"""Metrics that a run watches: the best checkpoint, early stopping and schedules; and names that are wrong."""

import os

import pytest
import torch
from one_call import Net, Storing, one_call, points
from ranks import rows
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.evaluation import MeanMetric
from hookline.hooks import EarlyStopping, EvalHook, HookBase


@pytest.fixture
def make(tmp_path):
    """A trainer that is evaluated after each step."""
    given = {"test": points(seed=1), "metrics": ["Loss", "Accuracy"], "eval_period": 1}
    return lambda *parts, folder="run", **options: one_call(tmp_path / folder, *parts, **{**given, **options})


@pytest.mark.parametrize(("monitor", "mode"), [("test/loss", "min"), ("test/accuracy", "max")])
def test_best_checkpoint_early_stopping_and_schedule_know_what_is_better(make, tmp_path, log, monitor, mode):
    stopping = [EarlyStopping(patience=9), EarlyStopping(monitor, patience=9)]
    trainer = make(lr=0.5, monitor=monitor, lr_scheduler=ReduceLROnPlateau, hooks=stopping)
    result = trainer.train()
    best = trainer.find_hook("BestCheckpointer")
    values = [row[monitor] for row in rows(tmp_path / "run") if monitor in row]
    assert len(values) == result.iteration == 6
    assert best.best_metric == stopping[0].best == stopping[1].best == (min if mode == "min" else max)(values)
    assert trainer.scheduler.mode == mode
    assert "by its class or name" in log.text
    assert (tmp_path / "run/model_best.pth").exists()


class Quality(MeanMetric):
    """Says itself that less is better, as metrics of torchmetrics do."""

    higher_is_better = False

    def update(self, preds, target):
        self.add((preds - nn.functional.one_hot(target, 3)).square().sum(), preds.numel())


@pytest.mark.parametrize("metric", [Quality, Quality(), f"{__name__}:Quality"])
def test_a_metric_says_itself_whether_more_is_better(make, metric):
    stopping, plateau = EarlyStopping(), {"SOLVER.LR_SCHEDULER_METRIC": "test/accuracy"}
    options = {"monitor": "test/quality", "hooks": [stopping], "lr_scheduler": ReduceLROnPlateau, "config": plateau}
    trainer = make(metrics=["Accuracy", metric], **options)
    assert stopping.mode == "min"
    assert trainer.scheduler.mode == "max"  # of its own metric


class Counts:
    def reset(self):
        self.hits = self.number = 0

    def update(self, predictions, targets):
        self.hits += int((predictions.argmax(1) == targets).sum())
        self.number += len(targets)

    def compute(self):
        return {"hits": self.hits, "share": self.hits / self.number}


def test_the_monitor_may_be_an_entry_of_a_metrics_dict(make):
    trainer = make(metrics=[Counts], monitor="test/share", hooks=[EarlyStopping()])
    result = trainer.train()
    assert trainer.find_hook("BestCheckpointer").best_iter is not None
    assert result.metrics["test/share"] == result.metrics["test/hits"] / 24


def test_the_best_is_chosen_by_the_loss_at_a_period_of_its_own(make, tmp_path):
    options = {"config": {"CHECKPOINT.BEST.PERIOD": 2}, "test": None, "eval_period": None}
    trainer = make(monitor="total_loss", seed=2, **options)
    trainer.train()
    losses = {row["iteration"]: row["total_loss"] for row in rows(tmp_path / "run") if "total_loss" in row}
    best = trainer.find_hook("BestCheckpointer")
    assert (best.best_metric, best.best_iter) == min((losses[iteration], iteration) for iteration in (1, 3, 5))
    assert best.best_metric > min(losses.values())


def of_each_class(preds, target):
    right = preds.argmax(1) == target
    return {f"class{label}": float(right[target == label].float().mean()) for label in target.unique()}


def dice(preds, target):
    classes = of_each_class(preds, target)
    return {"dice": sum(classes.values()) / len(classes), **{f"dice_{name}": one for name, one in classes.items()}}


UNTESTED = {"test": None, "eval_period": None}
VAL = EvalHook(3, lambda: {"val": {"a": 1.0}})
# Names that only the data or a hook gives are not refused.
POSSIBLE = {
    "of another batch": {"metrics": [of_each_class], "monitor": "test/class3"},
    "beside the mean": {"metrics": [dice], "monitor": "test/dice_class3"},
    "beside the loss": {"metrics": ["Loss", dice], "monitor": "test/dice_class0"},
    "misspelt, of the data": {"metrics": [of_each_class], "monitor": "test/clas3"},
    "a loss": {"hooks": [EarlyStopping("total_loss")], **UNTESTED},
    "put by the model": {"hooks": [EarlyStopping("seen")], "model": Storing, "loss": None, **UNTESTED},
    "of another evaluation": {"hooks": [VAL, EarlyStopping("val/a")], **UNTESTED},
    "only at the end": {"hooks": [EarlyStopping("test/loss")], "eval_period": None},
    "of a schedule that is not used": {"config": {"SOLVER.LR_SCHEDULER_METRIC": "val/loss"}},
    "the best, by any hook": {"monitor": "my_hook/score"},
    "the best, by the rate": {"monitor": "lr", **UNTESTED},
}


@pytest.mark.parametrize("options", POSSIBLE.values(), ids=POSSIBLE)
def test_a_metric_that_may_come_later_is_waited_for(make, options):
    assert make(**options).train().reason == "completed"


def test_a_metric_that_never_came_is_named_in_the_log(make, log):
    make(hooks=[EarlyStopping("test/loss")], **UNTESTED).train()
    assert "EarlyStopping has found no value of 'test/loss' so far, and cannot stop the run" in log.text


PLATEAU = {"lr_scheduler": ReduceLROnPlateau}


def two_terms(scores, target):
    return {"ce": nn.functional.cross_entropy(scores, target), "dice": scores.abs().mean()}


def offset(preds, target):
    return float(preds.mean())


@pytest.mark.parametrize("metrics", [["Loss"], ["Loss", offset]])
@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"monitor": "test/dice"}, "CHECKPOINT.BEST.METRIC"),
        ({"hooks": [EarlyStopping("test/dice")]}, "EarlyStopping of HOOKS"),
        ({**PLATEAU, "config": {"SOLVER.LR_SCHEDULER_METRIC": "test/dice"}}, "SOLVER.LR_SCHEDULER_METRIC"),
    ],
)
def test_more_of_a_term_of_the_loss_does_not_count_as_better_by_its_name(make, tmp_path, metrics, options, key):
    with pytest.raises(ConfigError, match=f'^{key}: test/dice is a term of the loss, .*"min"'):
        make(loss=two_terms, metrics=metrics, **options).train()
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_term_of_the_loss_is_monitored_by_the_mode_that_is_given(make):
    options = {"loss": two_terms, "monitor": "test/dice", "monitor_mode": "min"}
    trainer = make(hooks=[EarlyStopping()], **PLATEAU, **options)
    assert trainer.train().reason == "completed"
    assert {trainer.find_hook(EarlyStopping).mode, trainer.scheduler.mode} == {"min"}


STOPPING = {"NAME": "EarlyStopping", "ARGS": {"metric": "test/loss_of_weight"}}
WRONG = [
    ({"monitor": "tset/accuracy"}, "CHECKPOINT.BEST.METRIC: .*'tset/accuracy'.*did you mean 'test/accuracy'"),
    ({**PLATEAU, "config": {"SOLVER.LR_SCHEDULER_METRIC": "test/acuracy"}}, "LR_SCHEDULER_METRIC: .*'test/accuracy'"),
    ({"hooks": [STOPPING]}, "EarlyStopping of HOOKS: .*'test/loss_of_weight'"),
    ({"hooks": [EarlyStopping("accuracy")]}, "there is no metric 'accuracy'"),
    ({"hooks": [EarlyStopping()]}, "EarlyStopping has no metric"),
    ({"loss": two_terms, "metrics": ["Loss", offset], "monitor": "test/ofset"}, "did you mean 'test/offset'"),
    ({"hooks": [EarlyStopping()], "monitor": "test/los"}, "did you mean 'test/loss'"),
    ({"monitor": "test/loss", "monitor_mode": "mn"}, r"Trainer\(monitor_mode=...\)"),
    ({**PLATEAU, "monitor": "my_module:score"}, "my_module:score"),
    ({**PLATEAU, "monitor": "test/loss", "test": None}, "LR_SCHEDULER_METRIC"),
]


@pytest.mark.parametrize(("options", "names"), WRONG, ids=[names for _, names in WRONG])
def test_a_wrong_metric_is_an_error_before_training(make, tmp_path, options, names):
    with pytest.raises(ConfigError, match=names):
        make(**options).train()
    assert list(tmp_path.rglob("*.*")) == []


def test_a_metric_that_no_evaluation_gives_is_an_error_at_the_first_one(make):
    with pytest.raises(ConfigError, match="'val/loss', which is not among the evaluation's metrics"):
        make(hooks=[EarlyStopping("val/loss")]).train()


def test_a_trainer_without_a_config_needs_the_argument():
    trainer = SimpleTrainer(nn.Linear(1, 1), [torch.ones(1)], torch.optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(ConfigError, match="EarlyStopping has no metric"):
        trainer.register_hooks([EarlyStopping()])


def test_a_hook_of_the_name_of_ours_is_not_ours(make):
    assert make(hooks=[type("EarlyStopping", (HookBase,), {})()]).train().reason == "completed"


class Drawing(Counts):
    """Draws random numbers when it is built."""

    def __init__(self):
        self.layer = nn.Linear(3, 3)


def test_metrics_do_not_change_the_models_first_weights(make):
    first, second = make(Net), make(Net, metrics=[Drawing])
    assert torch.equal(first.model.layers[0].weight, second.model.layers[0].weight)


def test_hooks_that_save_get_the_checkpointer_of_the_run(make, tmp_path):
    hooks = [
        "ExceptionCheckpointer",
        {"NAME": "PeriodicCheckpointer", "ARGS": {"period": 3, "file_prefix": "mine"}},
        {"NAME": "RollingCheckpointer", "ARGS": {"period": 2}},
        {"NAME": "BestCheckpointer", "ARGS": {"eval_period": 0, "val_metric": "test/accuracy"}},
    ]
    make(hooks=hooks, length=3).train()
    assert {"mine_0000002.pth", "rolling_0000001.pth", "model_best.pth"} <= set(os.listdir(tmp_path / "run"))
