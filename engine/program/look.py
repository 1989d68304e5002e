"""Evaluation and prediction without training: ``--eval-only`` and ``--predict``."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ...config import CfgNode, ConfigError, name_of
from ...hooks.common.models import optimizers_of
from .. import comm
from ..data.build import NoTrainData, check_same_length
from ..defaults import DefaultTrainer
from ..evaluation import format_results, prediction_rows, verify_results, write_predictions

__all__ = ["evaluate", "load_weights", "looking", "predict"]


def looking(trainer: type[DefaultTrainer]) -> type[DefaultTrainer]:
    """Return a subclass that evaluates and predicts, with the hooks of a run. It has no training data."""

    class Look(trainer):  # type: ignore[misc, valid-type]
        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> NoTrainData:
            return NoTrainData()

        @classmethod
        def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Any) -> list[Any]:
            return [torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0) for one in optimizers_of(optimizer)]

    return Look


def load_weights(trainer: DefaultTrainer, resume: bool) -> None:
    """Load MODEL.WEIGHTS, or with ``resume`` the weights of the last checkpoint, without the trainer's state.

    Raises:
        ConfigError: there are none, or they are of another model.
    """
    cfg = trainer.cfg
    checkpointer = type(trainer.checkpointer)(trainer.model, cfg.OUTPUT_DIR)
    checkpointer.resume_or_load(
        "" if resume else cfg.MODEL.WEIGHTS,
        resume=resume,
        strict=cfg.MODEL.WEIGHTS_STRICT,
        weights_from=cfg.MODEL.WEIGHTS_FROM,
    )
    if resume and not checkpointer.resumed_from:
        raise ConfigError(f"OUTPUT_DIR: there is no complete checkpoint in {cfg.OUTPUT_DIR}, except copies of the best")
    if checkpointer.missing_keys:
        report = checkpointer.load_report
        what = [f"{name} is {there}, the model's is {own}" for name, there, own in report.mismatched]
        what += [f"it has no {name}" for name in report.missing]
        raise ConfigError(
            f"MODEL.WEIGHTS: {checkpointer.loaded_from} is of another model than {cfg.MODEL.NAME} with its MODEL.ARGS: "
            f"{'; '.join(what[:3])}"
        )


def evaluate(trainer: DefaultTrainer) -> Mapping[str, Any]:
    """Evaluate on DATASETS.TEST, print the results, and compare them with TEST.EXPECTED_RESULTS."""
    results = trainer.evaluate()
    if comm.is_main_process():
        print(f"Results:\n{format_results(results)}")
    verify_results(trainer.cfg, results)
    return results


def predict(trainer: DefaultTrainer) -> list[str]:
    """Write predictions for each of DATASETS.TEST, and print the names of the files. Returns the names."""
    cfg, paths = trainer.cfg, []
    for entry in cfg.DATASETS.TEST:
        name = name_of(entry)
        loader = check_same_length(trainer.build_test_loader(cfg, name), f"DATASETS.TEST ({name})")
        outputs = trainer.predict(loader, with_batches=True)
        path, count = write_predictions(
            prediction_rows(outputs, cfg.TEST.PREDICTIONS_COLUMNS, trainer.adapter, loader),
            os.path.join(cfg.OUTPUT_DIR, "inference", name),
            format=cfg.TEST.PREDICTIONS_FORMAT,
        )
        if comm.is_main_process():
            print(f"{path}: {count} samples")
        paths.append(path)
    return paths
