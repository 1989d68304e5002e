import pytest
import torch
from small_runs import SMALL_IMAGES, assert_equal_models, config_trainer, kill_at

from hookline.config import ConfigError, get_cfg
from hookline.engine import check_config
from hookline.engine.resume.lengths import scale_config
from hookline.hooks import EvalHook

TWO_SETS = [
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 1}, "AS": "val"},
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 2}, "AS": "full", "EVAL_PERIOD": "8it"},
]
OPTIONS = [
    *("DATASETS.TEST", TWO_SETS, "TEST.EVAL_PERIOD", 5, "SOLVER.MAX_ITER", 20, "TEST.EVAL_ON_START", True),
    *("CHECKPOINT.BEST.METRIC", "val/accuracy", "CHECKPOINT.LOAD_BEST_AT_END", True),
    *("HOOKS", [{"NAME": "EarlyStopping", "ARGS": {"metric": "val/accuracy", "patience": 9}}]),
]


def iterations(trainer, name):
    return [iteration for _, iteration in trainer.storage.history(name).values()]


def test_a_set_with_a_period_of_its_own(tmp_path):
    trainer = config_trainer(tmp_path, *OPTIONS)
    assert len(trainer.find_hooks(EvalHook)) == 2
    trainer.train()
    assert iterations(trainer, "val/accuracy") == [0, 4, 9, 14, 20]
    assert iterations(trainer, "full/accuracy") == [0, 7, 15, 20]
    assert trainer._last_eval_results == trainer.evaluate()  # of the best weights
    assert trainer.evaluate().keys() == {"val", "full"}


def test_a_resumed_run_has_the_same_evaluations(tmp_path):
    whole = config_trainer(tmp_path / "whole", *OPTIONS)
    whole.train()
    for iteration in (10, 17):
        trainer = config_trainer(tmp_path / "killed", *OPTIONS, resume=iteration > 10)
        kill_at(trainer, iteration)
    resumed = config_trainer(tmp_path / "killed", *OPTIONS, resume=True)
    resumed.train()
    assert_equal_models(tmp_path / "whole", tmp_path / "killed")
    for name in ("val/accuracy", "full/accuracy", "full/loss"):
        assert resumed.storage.history(name).values() == whole.storage.history(name).values()
    assert resumed._last_eval_results == whole._last_eval_results
    states = [torch.load(tmp_path / run / "model_final.pth", weights_only=True) for run in ("whole", "killed")]
    assert states[0]["trainer"]["hooks"]["EarlyStopping"] == states[1]["trainer"]["hooks"]["EarlyStopping"]


def test_a_test_outside_of_training_logs_its_results_once(tmp_path, log):
    trainer = config_trainer(tmp_path, "TEST.EVAL_PERIOD", 5, "SOLVER.MAX_ITER", 5)
    trainer.train()
    assert not [message for message in log.messages if message.startswith("copypaste")]
    log.clear()
    results = trainer.test(trainer.cfg, trainer.model)
    accuracy, loss = results["synthetic"]["accuracy"], results["synthetic"]["loss"]
    shown = [message for message in log.messages if message.startswith(("copypaste", "Results"))]
    assert ["synthetic", "accuracy", f"{accuracy:.5g}"] in [line.split() for line in shown[0].splitlines()]
    assert shown[1:] == [
        "copypaste: Task: synthetic",
        "copypaste: accuracy,loss",
        f"copypaste: {accuracy:.4f},{loss:.4f}",
    ]


def small_config(**keys):
    cfg = get_cfg()
    cfg.merge_from_list(["DATASETS.TEST", TWO_SETS, "TEST.METRICS", ["Loss"], "MODEL.LOSS.NAME", "MSELoss"])
    cfg.merge_from_list([part for pair in keys.items() for part in pair])
    return cfg


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"DATASETS.TEST": TWO_SETS[1:]}, "DATASETS.TEST: each set has an EVAL_PERIOD of its own"),
        (
            {"CHECKPOINT.BEST.METRIC": "full/loss"},
            "CHECKPOINT.BEST.METRIC: there is no metric .full/loss. among val/loss; sets with",
        ),
        ({"CHECKPOINT.BEST.METRIC": "val/los"}, "did you mean 'val/loss'"),
        ({"CHECKPOINT.BEST.METRIC": "small_runs:Nets"}, "CHECKPOINT.BEST.METRIC: there is no 'Nets' in 'small_runs'"),
    ],
)
def test_what_the_check_refuses(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_config(small_config(**keys))


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("DATASETS.TEST", {"NAME": "synthetic", "EVAL_PERIOD": "5 pages"}, "DATASETS.TEST: entry 0: EVAL_PERIOD: "),
        ("TEST.METRICS", {"NAME": "Loss", "EVAL_PERIOD": 5}, "entry 0: EVAL_PERIOD is for test sets only"),
        ("HOOKS", {"NAME": "EMA", "EVAL_PERIOD": 5}, "entry 0: EVAL_PERIOD is for test sets only"),
    ],
)
def test_periods_are_checked_when_they_are_set(key, entry, message):
    with pytest.raises(ConfigError, match=message):
        get_cfg().merge_from_list([key, [entry]])


def test_periods_in_iterations_are_scaled_with_the_number_of_ranks():
    cfg = small_config(**{"SOLVER.REFERENCE_WORLD_SIZE": 1})
    assert [entry.get("EVAL_PERIOD") for entry in scale_config(cfg, 2).DATASETS.TEST] == [None, 4]


def test_evaluation_and_prediction_run_in_the_precision_of_the_weights(tmp_path):
    trainer = config_trainer(tmp_path, "SOLVER.AMP.ENABLED", True)
    loss = trainer.evaluate()["synthetic"]["loss"]
    loader = trainer.build_test_loader(trainer.cfg, "synthetic")
    outputs = torch.cat(list(trainer.predict(loader)))
    assert outputs.dtype is torch.float32
    targets = torch.cat([y for _, y in loader])
    assert torch.nn.functional.cross_entropy(outputs, targets).item() == pytest.approx(loss, rel=1e-6)
