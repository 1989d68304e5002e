"""Names of ``detectron2.utils.env``."""

import torch

from ..setup.seeding import seed_all_rng

__all__ = ["TORCH_VERSION", "seed_all_rng"]

#: torch's version as two ints, to compare with: ``TORCH_VERSION >= (2, 6)``.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
