"""Training: loop, trainers, data, models, optimization, evaluation, checkpoints."""

from typing import TYPE_CHECKING, Any

from .. import hooks
from ..command_line import default_argument_parser
from ..hooks import *  # noqa: F403 (as detectron2.engine does)
from .compat import aliases as _aliases  # noqa: F401 (imported for its side effect)
from .compat.amp_trainer import AMPTrainer
from .compat.ddp import create_ddp_model
from .compat.writers import default_writers
from .defaults import DefaultTrainer
from .export.export import export_weights
from .export.predictor import DefaultPredictor
from .launch import DEFAULT_TIMEOUT, launch
from .program.run import run
from .setup.check import check_config
from .setup.exit_codes import config_errors_exit
from .setup.logger import setup_logger
from .setup.seeding import choose_seed, seed_all_rng
from .setup.start import begin_run, default_setup
from .simple_trainer import SimpleTrainer
from .train_loop import TrainerBase, TrainResult
from .trainer import Trainer

if TYPE_CHECKING:
    from .parallel import FSDP2, Mesh

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
    "check_config",
    "choose_seed",
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


def __getattr__(name: str) -> Any:
    if name in ("FSDP2", "Mesh"):  # imported when used
        from . import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
