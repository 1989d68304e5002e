"""Invalid configs are errors that name the key, before anything is written (most are in tests/promises)."""

import os

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.engine.setup.check import check_config
from hookline.hooks import BestCheckpointer, EarlyStopping, HookBase

PLATEAU = "torch.optim.lr_scheduler:ReduceLROnPlateau"


@pytest.fixture
def cfg(make):
    return make("CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "TEST.EVAL_PERIOD", 10)


def refused(cfg, *overrides):
    def check():
        cfg.merge_from_list(list(overrides))
        check_config(cfg)

    with pytest.raises(ConfigError) as info:
        check()
    return str(info.value)


def test_the_defaults_and_a_valid_config_pass_and_nothing_changes(make, tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for cfg in (get_cfg(), make()):
        check_config(cfg)
    assert torch.equal(torch.rand(1), expected)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["TEST.EXPECTED_RESULTS", [["synthetic", "accuracy", "0.9", 0.1]]], "'0.9'"),
        (["DETERMINISTIC", True, "CUDNN_BENCHMARK", True], "contradict"),
    ],
)
def test_values_that_cannot_hold_are_refused_before_training(cfg, overrides, words):
    assert words in refused(cfg, *overrides)


# ---------------------------------------------------------------------------- metrics that are watched


def stopping(metric, **arguments):
    return [{"NAME": "EarlyStopping", "ARGS": {"metric": metric, **arguments}}]


def not_begun(cfg, *overrides):
    """Return the error before training; nothing was written."""
    cfg.merge_from_list(list(overrides))
    with pytest.raises(ConfigError) as info:
        DefaultTrainer(cfg).train()
    assert not os.path.exists(cfg.OUTPUT_DIR) or os.listdir(cfg.OUTPUT_DIR) == []
    return str(info.value)


@pytest.mark.parametrize("key", ["CHECKPOINT.BEST.METRIC", "SOLVER.LR_SCHEDULER_METRIC", "HOOKS"])
@pytest.mark.parametrize("metric", ["synthetic/acuracy", "sinthetic/accuracy", "synthetic/loss_of_weight"])
def test_an_unknown_metric_is_an_error_before_training(cfg, key, metric):
    cfg.SOLVER.LR_SCHEDULER_NAME = PLATEAU
    message = not_begun(cfg, key, stopping(metric) if key == "HOOKS" else metric)
    assert message.startswith(f"{'EarlyStopping of HOOKS' if key == 'HOOKS' else key}: ")
    assert repr(metric) in message
    assert "did you mean 'synthetic/accuracy'" in message or metric.endswith("weight")


@pytest.mark.parametrize("test_sets", [["synthetic"], []])
@pytest.mark.parametrize("metric", ["total_loss", "loss", "lr", "my_hook/score"])
def test_the_best_may_be_chosen_by_what_any_hook_puts(cfg, metric, test_sets):
    cfg.merge_from_list(["DATASETS.TEST", test_sets, "CHECKPOINT.BEST.METRIC", metric, "SOLVER.MAX_ITER", 2])
    DefaultTrainer(cfg).train()


def test_early_stopping_needs_a_metric_of_an_evaluation_or_a_loss(cfg):
    cfg.merge_from_list(["HOOKS", stopping("total_loss"), "SOLVER.MAX_ITER", 2])
    DefaultTrainer(cfg.clone()).train()
    cfg.OUTPUT_DIR += "2"
    assert "there is no metric 'accuracy'" in not_begun(cfg, "HOOKS", stopping("accuracy"))


def of_each_class(preds, target):
    right = preds.argmax(1) == target
    return {f"class{label}": float(right[target == label].float().mean()) for label in target.unique()}


@pytest.mark.parametrize("metric", ["synthetic/class3", "synthetic/clas3"])
def test_a_metric_with_names_from_the_data_may_have_others_in_later_batches(cfg, metric):
    cfg.merge_from_list(["TEST.METRICS", [f"{__name__}:of_each_class"], "CHECKPOINT.BEST.METRIC", metric])
    cfg.merge_from_list(["SOLVER.MAX_ITER", 2])
    DefaultTrainer(cfg).train()


def test_a_hook_of_the_name_of_ours_is_not_ours(monitored):
    hook = type("EarlyStopping", (HookBase,), {})()
    assert monitored([hook]).train().reason == "completed"


def test_a_metric_of_a_schedule_that_is_not_used_may_be_any(cfg):
    cfg.merge_from_list(["SOLVER.LR_SCHEDULER_METRIC", "val/loss", "SOLVER.MAX_ITER", 2])
    DefaultTrainer(cfg).train()


class Drawing:
    """Draws random numbers when it is built."""

    def __init__(self):
        self.layer = nn.Linear(3, 3)

    def reset(self):
        pass

    def update(self, preds, target):
        pass

    def compute(self):
        return 1.0


def test_metrics_do_not_change_the_models_first_weights(monitored):
    first = monitored(model=nn.Linear, config={"MODEL.ARGS": {"in_features": 2, "out_features": 1}})
    second = monitored(model=nn.Linear, metrics=[Drawing], config={"MODEL.ARGS": {"in_features": 2, "out_features": 1}})
    assert torch.equal(first.model.weight, second.model.weight)


def test_reduce_on_plateau_needs_evaluations_and_a_metric(cfg):
    cfg.SOLVER.LR_SCHEDULER_NAME = PLATEAU
    assert not_begun(cfg.clone(), "CHECKPOINT.BEST.METRIC", "").startswith("SOLVER.LR_SCHEDULER_METRIC: ")
    assert not_begun(cfg, "TEST.EVAL_PERIOD", 0).startswith("TEST.EVAL_PERIOD: ")


# ---------------------------------------------------------------------------- the monitor of the whole run


@pytest.fixture
def monitored(tmp_path):
    def monitored(hooks=(), config=None, model=None, **options):
        data = (torch.randn(8, 2), torch.zeros(8, 1))
        given = {"loss": nn.MSELoss(), "metrics": ["Loss"], "length": 6, "batch_size": 8, "eval_period": 1, "seed": 1}
        config = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False, **(config or {})}
        folder = tmp_path / "run"
        return Trainer(
            model or nn.Linear(2, 1), data, data, hooks=hooks, output_dir=folder, config=config, **given | options
        )

    return monitored


MONITOR = {"monitor": "test/loss", "monitor_mode": "min"}


@pytest.mark.parametrize("hook", [EarlyStopping(patience=2), {"NAME": "EarlyStopping", "ARGS": {"patience": 2}}])
def test_early_stopping_best_and_plateau_follow_the_monitor(monitored, tmp_path, hook):
    trainer = monitored([hook], lr=0.0, lr_scheduler={"NAME": PLATEAU, "ARGS": {"patience": 0}}, **MONITOR)
    assert trainer.scheduler.mode == "min"
    result = trainer.train()
    assert result.reason.startswith("early stopping: test/loss ")
    assert result.iteration == 3
    assert trainer.find_hook(BestCheckpointer).best[0][0] == result.metrics["test/loss"]
    assert (tmp_path / "run/model_best.pth").exists()


def two_terms(output, target):
    return {"mse": ((output - target) ** 2).mean(), "dice": (output - target).abs().mean()}


def offset(preds, target):
    return float((preds - target).mean())


@pytest.mark.parametrize("metrics", [["Loss"], ["Loss", offset]])
@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"monitor": "test/dice"}, "CHECKPOINT.BEST.METRIC"),
        ({"hooks": [EarlyStopping("test/dice")]}, "EarlyStopping of HOOKS"),
        (
            {"lr_scheduler": PLATEAU, "config": {"SOLVER.LR_SCHEDULER_METRIC": "test/dice"}},
            "SOLVER.LR_SCHEDULER_METRIC",
        ),
    ],
)
def test_more_of_a_term_of_the_loss_does_not_count_as_better_by_its_name(monitored, tmp_path, metrics, options, key):
    with pytest.raises(ConfigError, match=f'^{key}: test/dice is a term of the loss, .*"min"'):
        monitored(loss=two_terms, metrics=metrics, **options).train()
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_term_of_the_loss_is_monitored_by_the_mode_that_is_given(monitored):
    options = {"loss": two_terms, "monitor": "test/dice", "monitor_mode": "min"}
    trainer = monitored([EarlyStopping()], lr_scheduler=PLATEAU, **options)
    assert trainer.train().reason == "completed"
    assert {trainer.find_hook(EarlyStopping).mode, trainer.scheduler.mode} == {"min"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"hooks": [EarlyStopping()]}, "EarlyStopping has no metric"),
        ({"loss": two_terms, "metrics": ["Loss", offset], "monitor": "test/ofset"}, "did you mean 'test/offset'"),
        ({"hooks": [EarlyStopping()], "monitor": "test/los"}, "did you mean 'test/loss'"),
        ({"monitor": "test/loss", "monitor_mode": "mn"}, r"Trainer\(monitor_mode=...\)"),
        ({"lr_scheduler": PLATEAU, "monitor": "my_module:score"}, "my_module:score"),
    ],
)
def test_a_missing_or_wrong_monitor_is_named_at_its_key(monitored, options, names):
    with pytest.raises(ConfigError, match=names):
        monitored(**options).train()


def test_a_trainer_without_a_config_needs_the_argument():
    trainer = SimpleTrainer(nn.Linear(1, 1), [torch.ones(1)], torch.optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(ConfigError, match="EarlyStopping has no metric"):
        trainer.register_hooks([EarlyStopping()])


def test_hooks_that_save_get_the_checkpointer_of_the_run(make, tmp_path):
    components = [
        "ExceptionCheckpointer",
        {"NAME": "PeriodicCheckpointer", "ARGS": {"period": 3, "file_prefix": "mine"}},
        {"NAME": "RollingCheckpointer", "ARGS": {"period": 2}},
        {"NAME": "BestCheckpointer", "ARGS": {"eval_period": 0, "val_metric": "synthetic/accuracy"}},
    ]
    DefaultTrainer(make("HOOKS", components, "SOLVER.MAX_ITER", 3, "TEST.EVAL_PERIOD", 1)).train()
    assert {"mine_0000002.pth", "rolling_0000001.pth", "model_best.pth"} <= set(os.listdir(tmp_path / "run"))
