"""Results as text, the test batches that are tried before training, and evaluations of a run."""

import logging
from contextlib import nullcontext

import pytest
import torch
from small_runs import SMALL_IMAGES, config_trainer, kill_at, load
from starts import contents
from torch import nn

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.data import DATASET_REGISTRY, ArrayDataset
from hookline.engine.evaluation import (
    DatasetEvaluator,
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
        ([], True, ""),
        ([["val", "accuracy", 0.91, 0.02]], True, ""),
        ([["val", "accuracy", 0.95, 0.02]], False, "val/accuracy is 0.9"),
        ([["val", "f1", 0.95, 0.02]], False, "val/f1"),
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


# ---------------------------------------------------------------------------- a few test batches before training


@DATASET_REGISTRY.register()
def wrong_labels() -> ArrayDataset:
    return ArrayDataset(torch.zeros(40, 8), torch.zeros(40, 2))


@pytest.fixture
def cfg(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
            *("MODEL.ARGS", {"in_features": 8, "num_classes": 4, "hidden": [8], "dropout": 0.5}),
            *("DATASETS.TRAIN", ["synthetic"], "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"]),
            *("DATALOADER.BATCH_SIZE", 8, "SOLVER.MAX_ITER", 3, "LOG.WRITERS", []),
            *("OUTPUT_DIR", str(tmp_path / "run"), "SEED", 1),
        ]
    )
    return cfg


def weights(cfg, trainer=DefaultTrainer):
    trainer = trainer(cfg)
    trainer.train()
    return nn.utils.parameters_to_vector(trainer.model.parameters())


def test_an_error_of_the_evaluation_stops_the_run_before_its_first_step_and_changes_no_file(cfg, tmp_path):
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


def test_it_is_made_once_before_each_training(cfg):
    made = []
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([CallbackHook(before_sanity_check=lambda t: made.append(t.finished_iter + 1))])
    trainer.train()
    trainer.max_iter = 5
    trainer.train()
    trainer.train()  # nothing to train
    assert made == [0, 3]


class WholeSet(DatasetEvaluator):
    """Fails on a part of the data."""

    def reset(self):
        self.batches = 0

    def process(self, inputs, outputs):
        self.batches += 1

    def evaluate(self):
        assert self.batches == 128
        return {"synthetic": {"batches": self.batches}}


def test_it_reads_two_batches_in_silence_and_the_run_is_the_same(cfg):
    seen, lengths = [], []

    class Trainer(DefaultTrainer):
        def build_hooks(self):
            return [*super().build_hooks(), CallbackHook(after_eval_step=lambda trainer, *_: seen.append(trainer.iter))]

        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            loader = super().build_test_loader(cfg, dataset_name)
            lengths.append(len(loader))
            return loader

        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return WholeSet()  # need not work on a part

    checked = weights(cfg, Trainer)
    assert lengths == [2, 128]
    assert set(seen) == {3}
    cfg.TEST.SANITY_CHECK_BATCHES = 0
    assert torch.equal(checked, weights(cfg))


class OwnTest(DefaultTrainer):
    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}


@pytest.mark.parametrize(("trainer", "sets"), [(OwnTest, ("synthetic",)), (DefaultTrainer, ())])
def test_no_check_without_test_sets_or_with_an_own_test(cfg, trainer, sets):
    cfg.DATASETS.TEST, made = sets, []
    trainer = trainer(cfg)
    trainer.register_hooks([CallbackHook(before_sanity_check=made.append)])
    trainer.train()
    assert not made


# ---------------------------------------------------------------------------- several test sets


TWO_SETS = [
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 1}, "AS": "val"},
    {"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 2}, "AS": "full"},
]
OPTIONS = [
    *("DATASETS.TEST", TWO_SETS, "TEST.EVAL_PERIOD", 5, "SOLVER.MAX_ITER", 20, "TEST.EVAL_ON_START", True),
    *("CHECKPOINT.BEST.METRIC", "val/accuracy", "CHECKPOINT.LOAD_BEST_AT_END", True),
    *("HOOKS", [{"NAME": "EarlyStopping", "ARGS": {"metric": "val/accuracy", "patience": 9}}]),
]


def iterations(trainer, name):
    return [iteration for _, iteration in trainer.storage.history(name).values()]


def test_evaluations_before_during_and_after_training_are_the_same_after_a_kill(tmp_path):
    whole = config_trainer(tmp_path / "whole", *OPTIONS)
    whole.train()
    assert iterations(whole, "val/accuracy") == iterations(whole, "full/accuracy") == [0, 4, 9, 14, 20]
    assert whole._last_eval_results == whole.evaluate()  # of the best weights
    assert whole.evaluate().keys() == {"val", "full"}
    kill_at(config_trainer(tmp_path / "killed", *OPTIONS), 17)
    resumed = config_trainer(tmp_path / "killed", *OPTIONS, resume=True)
    resumed.train()
    for name in ("val/accuracy", "full/accuracy", "full/loss"):
        assert resumed.storage.history(name).values() == whole.storage.history(name).values()
    assert resumed._last_eval_results == whole._last_eval_results
    states = [load(tmp_path / run)["trainer"]["hooks"]["EarlyStopping"] for run in ("whole", "killed")]
    assert states[0] == states[1]


def test_evaluation_and_prediction_run_in_the_precision_of_the_weights(tmp_path):
    trainer = config_trainer(tmp_path, "SOLVER.AMP.ENABLED", True)
    loss = trainer.evaluate()["synthetic"]["loss"]
    loader = trainer.build_test_loader(trainer.cfg, "synthetic")
    outputs = torch.cat(list(trainer.predict(loader)))
    assert outputs.dtype is torch.float32
    targets = torch.cat([y for _, y in loader])
    assert torch.nn.functional.cross_entropy(outputs, targets).item() == pytest.approx(loss, rel=1e-6)
