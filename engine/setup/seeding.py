"""The seed of a run and of its random number generators."""

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from ...config import CfgNode
from .. import comm
from ..checkpoint.candidates import saved_config

__all__ = ["choose_seed", "saved_seed", "seed_all_rng", "set_seed", "use_deterministic_algorithms"]

logger = logging.getLogger(__name__)


def choose_seed(cfg: CfgNode, resume: bool) -> None:
    """Set SEED to a random seed if it is negative. All ranks get the same one.

    Args:
        cfg: the full config; it is changed.
        resume: reuse the seed of the run in OUTPUT_DIR, from its ``config.yaml`` or else from its last readable
            checkpoint.
    """
    if cfg.SEED >= 0:
        return

    def choose() -> int:
        seed = saved_seed(cfg.OUTPUT_DIR) if resume else -1
        return seed if seed >= 0 else int.from_bytes(os.urandom(4), "little") % 2**31

    set_seed(cfg, comm.on_main_process(choose))


def saved_seed(folder: str) -> int:
    """Return the seed of the run in a folder; negative if there is none."""
    path = os.path.join(folder, "config.yaml")
    if os.path.isfile(path):
        saved: Any = CfgNode.load_yaml_with_base(path)
    else:
        saved = CfgNode.load_cfg(saved_config(folder) or "{}")
    return int(saved.get("SEED", -1))


def set_seed(cfg: CfgNode, seed: int) -> None:
    """Set SEED, also in a frozen config."""
    frozen = cfg.is_frozen()
    cfg.defrost()
    cfg.SEED = seed
    if frozen:
        cfg.freeze()


def seed_all_rng(seed: int | None = None) -> None:
    """Seed the random number generators of python, numpy and torch.

    Args:
        seed: not negative. None: a random seed, which is logged.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        logger.info("Random seed: %d", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_deterministic_algorithms(mode: Any) -> None:
    """Make torch use deterministic operations, from here on in this process.

    Args:
        mode: the value of DETERMINISTIC. False: nothing is changed.
    """
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is used first
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
