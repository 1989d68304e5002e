"""Training: loop, trainers, data, models, optimization, evaluation, checkpoints.

What a usual run does not need is imported when it is used.
"""

from typing import TYPE_CHECKING

from ..command_line import without_collecting

with without_collecting():  # before the other imports, which import torch too
    import torch  # noqa: F401

from .. import hooks
from ..config.rare_names import imported_when_used
from .defaults import DefaultTrainer
from .launch import DEFAULT_TIMEOUT, launch  # not later: the module has the name of the function
from .run import begin_run, default_setup
from .setup.check import check_config
from .setup.logger import setup_logger
from .setup.seeds import choose_seed, seed_all_rng
from .simple_trainer import SimpleTrainer
from .train_loop import TrainerBase, TrainResult

from .program.run import run  # isort: skip  # after the module of this name

if TYPE_CHECKING:
    from ..command_line import default_argument_parser
    from ..hooks import *  # noqa: F403 (as detectron2.engine does)
    from .compat.amp_trainer import AMPTrainer
    from .compat.functions import create_ddp_model, default_writers
    from .export.export import export_weights
    from .export.predictor import DefaultPredictor
    from .launch import config_errors_exit
    from .parallel.fsdp import FSDP2
    from .parallel.mesh import Mesh
    from .trainer import Trainer

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

__getattr__ = imported_when_used(
    __name__,
    {
        **dict.fromkeys(hooks.__all__, "..hooks"),
        "FSDP2": ".parallel.fsdp",
        "AMPTrainer": ".compat.amp_trainer",
        "DefaultPredictor": ".export.predictor",
        "Mesh": ".parallel.mesh",
        "Trainer": ".trainer",
        "config_errors_exit": ".launch",
        "create_ddp_model": ".compat.functions",
        "default_argument_parser": "..command_line",
        "default_writers": ".compat.functions",
        "export_weights": ".export.export",
    },
)


def __dir__() -> list[str]:
    return __all__
