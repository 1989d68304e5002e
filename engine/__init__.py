"""What drives a run: the loop, trainers, data, models, optimisation, evaluation, checkpoints."""

from .. import hooks
from ..hooks import CallbackHook, EventStorage, HookBase, StopTraining, get_event_storage
from .defaults import DefaultTrainer
from .launch import launch
from .logger import setup_logger
from .predictor import DefaultPredictor
from .simple_trainer import AMPTrainer, SimpleTrainer
from .start import (
    check_config,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    default_writers,
    seed_all_rng,
)
from .train_loop import TrainerBase, TrainResult

__all__ = [
    "AMPTrainer",
    "CallbackHook",
    "DefaultPredictor",
    "DefaultTrainer",
    "EventStorage",
    "HookBase",
    "SimpleTrainer",
    "StopTraining",
    "TrainResult",
    "TrainerBase",
    "check_config",
    "config_errors_exit",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "get_event_storage",
    "hooks",
    "launch",
    "seed_all_rng",
    "setup_logger",
]
