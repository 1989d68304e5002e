"""Configs that cannot work are refused before anything is read or written, by the key that is wrong."""

import pytest

from hookline.config import ConfigError, get_cfg
from hookline.engine import check_config


@pytest.fixture
def cfg(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_file("configs/digits/convnet.yaml")
    cfg.OUTPUT_DIR = str(tmp_path / "run")
    return cfg


def refused(cfg, *overrides):
    def check():
        cfg.merge_from_list(list(overrides))
        check_config(cfg)

    with pytest.raises(ConfigError) as info:
        check()
    return str(info.value)


def test_the_examples_are_sound(cfg):
    check_config(cfg)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("SOLVER.BASE_LR", -1.0, "SOLVER.BASE_LR: must be at least 0"),
        ("SOLVER.NONFINITE_LIMIT", 0, "SOLVER.NONFINITE_LIMIT: must be at least 1"),
        ("SOLVER.MAX_ITER", 0, "SOLVER.MAX_ITER: is 0"),
        ("SOLVER.ACCUMULATION_STEPS", 0, "SOLVER.ACCUMULATION_STEPS: must be at least 1"),
        ("CHECKPOINT.MAX_TO_KEEP", -1, "CHECKPOINT.MAX_TO_KEEP: must be at least 0"),
        ("SOLVER.ACCUMULATION_STEPS", 1000, "SOLVER.ACCUMULATION_STEPS: a batch of 64 samples (DATALOADER.BATCH_SIZE)"),
        ("DATALOADER.NUM_WORKERS", 1000, "DATALOADER.NUM_WORKERS: must be at most 64 on this machine, not 1000"),
        ("VERSION", 99, "VERSION: this hookline reads version 1, not 99"),
        ("TEST.EXPECTED_RESULTS", [["a", "b"]], "is not [set, metric, expected value, tolerance]"),
        ("SOLVER.OPTIMIZER.ARGS.weight_decay", -1, "SOLVER.OPTIMIZER.ARGS of AdamW: ValueError: Invalid weight_decay"),
        ("SOLVER.OPTIMIZER.ARGS.weight_decays", 1, "did you mean 'weight_decay'"),
        ("MODEL.ARGS.dropout", 1.5, "MODEL.ARGS of ConvNet: ValueError: dropout probability"),
        ("MODEL.ARGS.width", 0, "MODEL.ARGS of ConvNet: ValueError: width must be at least 1"),
        ("HOOKS", ["LRScheduler"], "HOOKS[0]: every run has one LRScheduler already"),
        ("HOOKS", ["SanityCheck", "SanityCheck"], "HOOKS: there is a SanityCheck already"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_key(cfg, key, value, says):
    assert says in refused(cfg, key, value)


def test_a_hooks_own_complaint_is_told_with_its_place(cfg):
    stopping = {"NAME": "EarlyStopping", "ARGS": {"metric": "digits_test/accuracy", "patience": 0}}
    assert refused(cfg, "HOOKS", ["SanityCheck", stopping]) == (
        "HOOKS[1]: EarlyStopping: patience must be at least 1, not 0"
    )


@pytest.mark.parametrize("key", ["CHECKPOINT.BEST.METRIC", "SOLVER.LR_SCHEDULER_METRIC", "HOOKS[0].ARGS.metric"])
def test_a_monitor_that_no_evaluation_puts_is_refused_with_the_nearest(cfg, key):
    metric = "digits_test/acuracy"
    if key == "SOLVER.LR_SCHEDULER_METRIC":
        cfg.SOLVER.LR_SCHEDULER_NAME = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    if not key.startswith("HOOKS"):
        message = refused(cfg, key, metric)
    else:
        message = refused(cfg, "HOOKS", [{"NAME": "EarlyStopping", "ARGS": {"metric": metric}}])
    assert message.startswith(f"{key}: there is no metric 'digits_test/acuracy' among digits_test/accuracy")
    assert message.endswith("did you mean 'digits_test/accuracy'?")


@pytest.mark.parametrize("test_sets", [["digits_test"], []])
@pytest.mark.parametrize("metric", ["total_loss", "loss", "lr", "my_hook/score"])
def test_the_best_may_be_chosen_by_what_any_hook_puts(cfg, metric, test_sets):
    cfg.DATASETS.TEST = test_sets
    cfg.CHECKPOINT.BEST.METRIC = metric
    check_config(cfg)


@pytest.mark.parametrize("metric", ["digits_test/loss_of_weight", "digits_train/accuracy", "digit_test/accuracy"])
def test_a_set_that_is_not_tested_or_has_no_such_metric_chooses_no_best(cfg, metric):
    assert f"there is no metric {metric!r}" in refused(cfg, "CHECKPOINT.BEST.METRIC", metric)


def test_early_stopping_goes_by_evaluations_only(cfg):
    stopping = {"NAME": "EarlyStopping", "ARGS": {"metric": "total_loss"}}
    assert "there is no metric 'total_loss'" in refused(cfg, "HOOKS", [stopping])


def test_a_schedule_that_goes_by_evaluations_needs_some(cfg):
    cfg.SOLVER.LR_SCHEDULER_NAME = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    cfg.SOLVER.LR_SCHEDULER_METRIC = "digits_test/accuracy"
    check_config(cfg)
    assert refused(cfg, "TEST.EVAL_PERIOD", 0).startswith("TEST.EVAL_PERIOD: is 0")


def test_a_file_that_holds_no_weights_is_refused(cfg):
    assert "README.md is damaged, or is not a checkpoint" in refused(cfg, "MODEL.WEIGHTS", "README.md")


def test_checking_leaves_the_random_numbers_alone(cfg):
    import torch

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    check_config(cfg)
    assert torch.equal(torch.rand(1), expected)
