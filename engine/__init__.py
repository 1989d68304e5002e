"""Training: loop, trainers, data, models, optimization, evaluation, checkpoints."""

from ..command_line import without_collecting

with without_collecting():  # before the other imports, which import torch too
    import torch  # noqa: F401

from .. import hooks
from ..command_line import config_errors_exit, default_argument_parser
from ..hooks import *  # noqa: F403 (as detectron2.engine does)
from .defaults import DefaultTrainer
from .detectron2_names import AMPTrainer, default_writers
from .launch import DEFAULT_TIMEOUT, launch  # not later: the module has the name of the function
from .parallel.ddp import create_ddp_model
from .parallel.fsdp import FSDP2
from .parallel.mesh import Mesh
from .program.export import export_weights
from .program.predictor import DefaultPredictor
from .run import begin_run, default_setup
from .setup.logger import setup_logger
from .setup.seeds import seed_all_rng
from .simple_trainer import SimpleTrainer
from .train_loop import TrainerBase, TrainResult
from .trainer import Trainer

from .program.run import run  # isort: skip  # after the module of this name

__all__ = [
    "DEFAULT_TIMEOUT",
    "FSDP2",
    "AMPTrainer",
    "DefaultPredictor",
    "DefaultTrainer",
    "Mesh",
    "SimpleTrainer",
    "TrainResult",
    "Trainer",
    "TrainerBase",
    "begin_run",
    "config_errors_exit",
    "create_ddp_model",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "export_weights",
    "hooks",
    "launch",
    "run",
    "seed_all_rng",
    "setup_logger",
]
__all__ += hooks.__all__
