"""A few test batches are tried before training."""

import logging

import pytest
import torch
from starts import contents
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.data import DATASET_REGISTRY, ArrayDataset
from hookline.engine.evaluation import DatasetEvaluator
from hookline.hooks import CallbackHook


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


def test_an_error_of_the_evaluation_stops_the_run_before_its_first_step(cfg):
    cfg.DATASETS.TEST = ["wrong_labels"]
    trainer = DefaultTrainer(cfg)
    with pytest.raises(ValueError, match="Accuracy needs scores") as caught:
        trainer.train()
    assert trainer.iter == 0
    assert any("TEST.SANITY_CHECK_BATCHES: 0 skips it" in note for note in caught.value.__notes__)
    cfg.TEST.SANITY_CHECK_BATCHES = 0
    trainer = DefaultTrainer(cfg)
    with pytest.raises(ValueError, match="Accuracy needs scores"):
        trainer.train()
    assert trainer.iter == 3


def test_an_error_of_the_evaluation_leaves_an_earlier_run_in_its_place(cfg, tmp_path):
    earlier = weights(cfg)
    before = contents(tmp_path)
    cfg.DATASETS.TEST, cfg.SEED = ["wrong_labels"], 2
    with pytest.raises(ValueError, match="Accuracy needs scores"):
        DefaultTrainer(cfg).train()
    after = contents(tmp_path)
    assert after == before
    cfg.DATASETS.TEST, cfg.SEED, cfg.SOLVER.MAX_ITER = ["synthetic"], 1, 4
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), earlier)
    assert trainer.train().iteration == 4


def test_it_is_made_once_before_each_training(cfg):
    made = []
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([CallbackHook(before_sanity_check=lambda t: made.append(t.finished_iter + 1))])
    trainer.train()
    trainer.max_iter = 5
    trainer.train()
    trainer.train()  # nothing to train
    assert made == [0, 3]


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

    checked = weights(cfg, Trainer)
    assert lengths == [2, 128]
    assert set(seen) == {3}
    cfg.TEST.SANITY_CHECK_BATCHES = 0
    assert torch.equal(checked, weights(cfg))


def test_other_evaluators_need_not_work_on_a_part(cfg):
    class WholeSet(DatasetEvaluator):
        def reset(self):
            self.batches = 0

        def process(self, inputs, outputs):
            self.batches += 1

        def evaluate(self):
            assert self.batches == 128
            return {"synthetic": {"batches": self.batches}}

    class Trainer(DefaultTrainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return WholeSet()

    weights(cfg, Trainer)


@pytest.mark.parametrize("own", [True, False])
def test_no_check_without_test_sets_or_with_an_own_test(cfg, own):
    class Trainer(DefaultTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            return {}

    if not own:
        cfg.DATASETS.TEST = ()
    trainer = (Trainer if own else DefaultTrainer)(cfg)
    assert "SanityCheck" not in trainer.describe_hooks()


def test_a_check_among_hooks_replaces_the_default_one(cfg):
    cfg.HOOKS = [{"NAME": "SanityCheck", "ARGS": {"num_batches": 1}}]
    assert DefaultTrainer(cfg).describe_hooks().count("SanityCheck") == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["Accuracy", "Accuracy"], r"TEST\.METRICS\[1\]: there is already a metric named 'accuracy'"),
        ([{"NAME": "Accuracy", "ARGS": {"top": 3}}], r"TEST\.METRICS\[0\]\.ARGS\.top"),
        ([], r"TEST\.METRICS is empty"),
    ],
)
def test_metrics_are_built_with_the_trainer(cfg, metrics, message):
    cfg.TEST.METRICS = metrics
    with pytest.raises(ConfigError, match=message):
        DefaultTrainer(cfg)


def test_a_wrong_path_of_test_data_is_reported_without_a_traceback(cfg, log):
    cfg.DATASETS.TEST = [{"NAME": "ImageFolder", "ARGS": {"root": "nowhere"}, "AS": "val"}]
    pytest.importorskip("PIL")
    with pytest.raises(ConfigError, match=r"DATASETS\.TEST\[0\] \(ImageFolder\): root: there is no folder nowhere"):
        DefaultTrainer(cfg).train()
    assert not [record for record in log.records if record.levelno >= logging.ERROR]
