"""What drives a run: the loop, trainers, data, models, optimisation, evaluation, checkpoints."""

from .. import hooks
from ..hooks import *  # noqa: F403 (as detectron2.engine does)
from .amp import AMPTrainer
from .check import check_config
from .checkpoint.export import export_weights
from .defaults import DefaultTrainer
from .fsdp import FSDP2
from .launch import launch
from .logger import setup_logger
from .predictor import DefaultPredictor
from .simple_trainer import SimpleTrainer
from .start import (
    begin_run,
    choose_seed,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    default_writers,
    seed_all_rng,
)
from .train_loop import TrainerBase, TrainResult

__all__ = [
    "FSDP2",
    "AMPTrainer",
    "DefaultPredictor",
    "DefaultTrainer",
    "SimpleTrainer",
    "TrainResult",
    "TrainerBase",
    "begin_run",
    "check_config",
    "choose_seed",
    "config_errors_exit",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "export_weights",
    "hooks",
    "launch",
    "seed_all_rng",
    "setup_logger",
]
__all__ += hooks.__all__
