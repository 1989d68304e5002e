"""Names that detectron2 has in other modules than hookline; ``hookline.engine`` imports this module."""

from .. import train_loop
from ..simple_trainer import SimpleTrainer
from .amp_trainer import AMPTrainer

for _trainer in (SimpleTrainer, AMPTrainer):  # detectron2.engine.train_loop holds all trainers
    setattr(train_loop, _trainer.__name__, _trainer)
