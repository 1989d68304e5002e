"""Results as text, the test batches that are tried before training, and evaluations of a run."""

import logging
from contextlib import nullcontext

import pytest
import torch
from small_runs import SMALL_IMAGES, config_trainer, mlp_config
from starts import contents
from torch import nn

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.data import DATASET_REGISTRY, ArrayDataset
from hookline.engine.evaluation import (
    flatten_results_dict,
    format_results,
    print_csv_format,
    verify_results,
)
from hookline.hooks import CallbackHook

RESULTS = {"val": {"accuracy": 0.9, "loss": {"cls": 1.5}}, "score": 2.0}


def test_results_are_flattened_and_logged_for_pasting(caplog):
    assert flatten_results_dict(RESULTS) == {"val/accuracy": 0.9, "val/loss/cls": 1.5, "score": 2.0}
    with caplog.at_level(logging.INFO):
        print_csv_format(RESULTS)
        print_csv_format({"val": {"file": "rows.csv", "accuracy": 0.5}})  # no number
    assert caplog.messages == [
        *("copypaste: Task: val", "copypaste: accuracy,loss/cls", "copypaste: 0.9000,1.5000", "copypaste: score=2.0"),
        *("copypaste: Task: val", "copypaste: file,accuracy", "copypaste: rows.csv,0.5000"),
    ]
    assert "rows.csv" in format_results({"val": {"file": "rows.csv"}})


@pytest.mark.parametrize(
    ("expected", "met", "message"),
    [
        ([["val", "accuracy", 0.91, 0.02]], True, ""),
        ([["val", "accuracy", 0.95, 0.02]], False, "val/accuracy is 0.9"),
        ([["val", "accuracy", 0.9, 0.1], ["nan", "loss", 1.0, 9.0]], False, "nan/loss"),
    ],
)
def test_results_are_compared_with_the_expected_ones(caplog, expected, met, message):
    cfg = get_cfg()
    cfg.TEST.EXPECTED_RESULTS = expected
    exits = nullcontext() if met else pytest.raises(SystemExit, match="1")  # as in detectron2
    with caplog.at_level(logging.INFO), exits:
        assert verify_results(cfg, {**RESULTS, "nan": {"loss": float("nan")}})
    assert message in caplog.text


@DATASET_REGISTRY.register()
def wrong_labels() -> ArrayDataset:
    return ArrayDataset(torch.zeros(40, 8), torch.zeros(40, 2))


@pytest.fixture
def cfg(tmp_path):
    cfg = mlp_config(tmp_path / "run")
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.ARGS.dropout", 0.5, "DATASETS.TEST", ["synthetic"]])
    cfg.merge_from_list(["TEST.METRICS", ["Accuracy"], "DATALOADER.BATCH_SIZE", 8, "SOLVER.MAX_ITER", 3, "SEED", 1])
    return cfg


def weights(cfg):
    trainer = DefaultTrainer(cfg)
    trainer.train()
    return nn.utils.parameters_to_vector(trainer.model.parameters())


def test_an_error_of_the_evaluation_comes_before_the_first_step_and_changes_no_file(cfg, tmp_path):
    weights(cfg)
    before = contents(tmp_path)
    cfg.DATASETS.TEST, cfg.SEED = ["wrong_labels"], 2
    trainer = DefaultTrainer(cfg)
    with pytest.raises(ValueError, match="Accuracy needs scores") as caught:
        trainer.train()
    assert trainer.iter == 0
    assert any("TEST.SANITY_CHECK_BATCHES" in note for note in caught.value.__notes__)
    assert contents(tmp_path) == before
    cfg.TEST.SANITY_CHECK_BATCHES, cfg.OUTPUT_DIR = 0, str(tmp_path / "unchecked")
    trainer = DefaultTrainer(cfg)
    with pytest.raises(ValueError, match="Accuracy needs scores"):
        trainer.train()
    assert trainer.iter == 3


def test_it_calls_no_hooks_of_evaluations_and_the_run_is_the_same(cfg):
    seen, trainer = [], DefaultTrainer(cfg)
    trainer.register_hooks([CallbackHook(after_eval_step=lambda trainer, *_: seen.append(trainer.iter))])
    trainer.train()
    assert set(seen) == {3}
    cfg.TEST.SANITY_CHECK_BATCHES = 0
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), weights(cfg))


TWO_SETS = [
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 1}, "AS": "val"},
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 2}, "AS": "full"},
]


def test_sets_are_evaluated_before_during_and_after_training(tmp_path):
    options = ["DATASETS.TEST", TWO_SETS, "TEST.EVAL_PERIOD", 5, "SOLVER.MAX_ITER", 12, "TEST.EVAL_ON_START", True]
    trainer = config_trainer(tmp_path, *options)
    trainer.train()
    for name in ("val/accuracy", "full/accuracy", "full/loss"):
        assert [iteration for _, iteration in trainer.storage.history(name).values()] == [0, 4, 9, 12]
    assert trainer.evaluate().keys() == {"val", "full"}


def test_evaluation_and_prediction_run_in_the_precision_of_the_weights(tmp_path):
    trainer = config_trainer(tmp_path, "SOLVER.AMP.ENABLED", True)
    loss = trainer.evaluate()["synthetic"]["loss"]
    loader = trainer.build_test_loader(trainer.cfg, "synthetic")
    outputs = torch.cat(list(trainer.predict(loader)))
    assert outputs.dtype is torch.float32
    targets = torch.cat([y for _, y in loader])
    assert torch.nn.functional.cross_entropy(outputs, targets).item() == pytest.approx(loss, rel=1e-6)
