"""Invalid configs are errors that name the key, before anything is read or written."""

import os

import pytest
from starts import arguments

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, check_config, default_setup
from hookline.hooks import BestCheckpointer


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


def test_the_example_config_is_valid(cfg):
    check_config(cfg)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("SOLVER.BASE_LR", -1.0, "SOLVER.BASE_LR: must be at least 0"),
        ("SOLVER.NONFINITE_LIMIT", 0, "SOLVER.NONFINITE_LIMIT: must be at least 1"),
        ("SOLVER.MAX_ITER", 0, "SOLVER.MAX_ITER: is 0"),
        ("TEST.AUG.ENABLED", True, "TEST.AUG.ENABLED: there is no test-time augmentation"),
        ("SOLVER.ACCUMULATION_STEPS", 0, "SOLVER.ACCUMULATION_STEPS: must be at least 1"),
        ("CHECKPOINT.MAX_TO_KEEP", -1, "CHECKPOINT.MAX_TO_KEEP: must be at least 0"),
        ("SOLVER.ACCUMULATION_STEPS", 1000, "SOLVER.ACCUMULATION_STEPS: a batch of 64 samples (DATALOADER.BATCH_SIZE)"),
        ("DATALOADER.NUM_WORKERS", 1000, "DATALOADER.NUM_WORKERS: must be at most 64 on this machine, not 1000"),
        ("VERSION", 99, "VERSION: this hookline reads version 1, not 99"),
        ("TEST.EXPECTED_RESULTS", [["a", "b"]], "is not [set, metric, expected value, tolerance]"),
        ("SOLVER.OPTIMIZER.ARGS.eps", -1, "SOLVER.OPTIMIZER.ARGS of AdamW: ValueError: Invalid epsilon"),
        ("SOLVER.OPTIMIZER.ARGS.weight_decays", 1, "did you mean 'weight_decay'"),
        ("MODEL.ARGS.dropout", 1.5, "MODEL.ARGS of ConvNet: ValueError: dropout probability"),
        ("MODEL.ARGS.width", 0, "MODEL.ARGS of ConvNet: ValueError: width must be at least 1"),
        ("HOOKS", ["LRScheduler"], "HOOKS[0]: every run already has one LRScheduler"),
        ("HOOKS", ["SanityCheck", "SanityCheck"], "HOOKS: there is a SanityCheck already"),
    ],
)
def test_invalid_values_are_errors_that_name_the_key(cfg, key, value, says):
    assert says in refused(cfg, key, value)


def test_an_error_of_a_hook_names_its_position(cfg):
    stopping = {"NAME": "EarlyStopping", "ARGS": {"metric": "digits_test/accuracy", "patience": 0}}
    assert refused(cfg, "HOOKS", ["SanityCheck", stopping]) == (
        "HOOKS[1]: EarlyStopping: patience must be at least 1, not 0"
    )


@pytest.mark.parametrize("key", ["CHECKPOINT.BEST.METRIC", "SOLVER.LR_SCHEDULER_METRIC", "HOOKS[0].ARGS.metric"])
def test_an_unknown_metric_suggests_the_nearest(cfg, key):
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
def test_an_unknown_test_set_or_metric_for_the_best_is_an_error(cfg, metric):
    assert f"there is no metric {metric!r}" in refused(cfg, "CHECKPOINT.BEST.METRIC", metric)


def test_early_stopping_needs_a_metric_of_an_evaluation_or_a_loss(cfg):
    stopping = {"NAME": "EarlyStopping", "ARGS": {"metric": "total_loss"}}
    cfg.merge_from_list(["HOOKS", [stopping]])
    check_config(cfg)
    stopping["ARGS"]["metric"] = "accuracy"
    assert "there is no metric 'accuracy'" in refused(cfg, "HOOKS", [stopping])


def test_without_test_sets_there_is_no_best_checkpoint(quick, log):
    cfg = quick("CHECKPOINT.BEST.METRIC", "synthetic/loss", "CHECKPOINT.LOAD_BEST_AT_END", True, "DATASETS.TEST", [])
    trainer = DefaultTrainer(cfg)
    assert not trainer.find_hooks(BestCheckpointer)
    assert "DATASETS.TEST is empty, so there is no best synthetic/loss" in log.text
    assert trainer.train().reason == "completed"


def test_reduce_on_plateau_needs_evaluations(cfg):
    cfg.SOLVER.LR_SCHEDULER_NAME = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    cfg.SOLVER.LR_SCHEDULER_METRIC = "digits_test/accuracy"
    check_config(cfg)
    assert refused(cfg, "TEST.EVAL_PERIOD", 0).startswith("TEST.EVAL_PERIOD: is 0")


def test_a_file_that_holds_no_weights_is_refused(cfg):
    assert "README.md is damaged, or is not a checkpoint" in refused(cfg, "MODEL.WEIGHTS", "README.md")


def test_the_check_does_not_change_random_numbers(cfg):
    import torch

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    check_config(cfg)
    assert torch.equal(torch.rand(1), expected)


def test_checking_a_valid_config_writes_nothing(make, tmp_path):
    check_config(make())
    assert os.listdir(tmp_path) == []


def test_the_defaults_are_valid():
    check_config(get_cfg())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["MODEL.NAME", "MPL"], "MODEL.NAME.*'MPL'.*did you mean 'MLP'"),
        (["MODEL.ARGS.hiden", [3]], r"MODEL\.ARGS\.hiden.*hidden"),
        (["MODEL.ARGS.in_features", "eight"], r"MODEL\.ARGS\.in_features.*'eight'"),
        (["MODEL.LOSS.NAME", "CrossEntropy"], "MODEL.LOSS.NAME.*CrossEntropyLoss"),
        (["MODEL.DEVICE", "gpu"], "MODEL.DEVICE.*'gpu'"),
        (["DATASETS.TRAIN", ["sinthetic"]], r"DATASETS\.TRAIN\[0\].*synthetic"),
        (["DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"sise": 3}}]], r"DATASETS\.TEST\[0\]\.ARGS\.sise.*size"),
        (["DATALOADER.BATCH_SIZE", "0"], "DATALOADER.BATCH_SIZE"),
        (["DATALOADER.SAMPLER_TRAIN", "EpochSample"], "DATALOADER.SAMPLER_TRAIN.*EpochSampler"),
        (["SOLVER.OPTIMIZER.NAME", "AdmaW"], "SOLVER.OPTIMIZER.NAME.*AdamW"),
        (["SOLVER.OPTIMIZER.ARGS.lr", "0.1"], r"SOLVER\.OPTIMIZER\.ARGS\.lr.*SOLVER\.BASE_LR"),
        (["SOLVER.LR_SCHEDULER_NAME", "WarmupCosinLR"], "SOLVER.LR_SCHEDULER_NAME.*WarmupCosineLR"),
        (["SOLVER.ACCUMULATION_STEPS", "0"], "SOLVER.ACCUMULATION_STEPS: must be at least 1, not 0"),
        (["TEST.METRICS", ["Acuracy"]], r"TEST\.METRICS\[0\].*Accuracy"),
        (["HOOKS", [{"NAME": "IterationTimr"}]], r"HOOKS\[0\].*IterationTimer"),
        (["HOOKS", [{"NAME": "IterationTimer", "ARGS": {"warmup": 1}}]], r"HOOKS\[0\]\.ARGS\.warmup.*warmup_iter"),
        (["LOG.WRITERS", ["JSONWritr"]], r"LOG\.WRITERS\[0\].*JSONWriter"),
        (["MODEL.WEIGHTS", "nowhere.pth"], "MODEL.WEIGHTS: there is no file nowhere.pth"),
        (["CHECKPOINT.BEST.METRIC", "synthetic/acuracy"], "CHECKPOINT.BEST.METRIC.*synthetic/accuracy"),
        (["OUTPUT_DIR", ""], "OUTPUT_DIR: is empty"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_an_invalid_config_is_an_error_that_names_the_key(make, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        default_setup(make(*overrides), arguments())
    assert os.listdir(tmp_path) == []


def test_missing_weights_suggest_the_nearest_file(make, tmp_path):
    (tmp_path / "model_final.pth").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"did you mean '.*model_final\.pth'"):
        check_config(make("MODEL.WEIGHTS", str(tmp_path / "model_finl.pth")))
