"""The seed of a run."""

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from ...config import CfgNode
from .. import comm
from ..checkpoint.find_checkpoint import named_checkpoint, saved_config, saved_run

logger = logging.getLogger(__name__)


def choose_seed(cfg: CfgNode, resume: bool | str) -> None:
    """Set SEED to a random seed if it is negative. All ranks get the same one.

    Args:
        cfg: the full config; it is changed.
        resume: reuse the seed of the run that is resumed: see :func:`saved_seed`.
    """
    if cfg.SEED >= 0:
        return

    def choose() -> int:
        seed = saved_seed(cfg.OUTPUT_DIR, resume) if resume else -1
        return seed if seed >= 0 else int.from_bytes(os.urandom(4), "little") % 2**31

    set_seed(cfg, comm.on_main_process(choose))


def saved_seed(folder: str, resume: bool | str = True) -> int:
    """Return the seed of a run; negative if there is none.

    Args:
        folder: its folder. The seed is in its ``config.yaml``, or else in its last readable checkpoint.
        resume: the path of a checkpoint whose seed is returned instead, if it has one.
    """
    path = os.path.join(folder, "config.yaml")
    text = saved_run(named_checkpoint(resume, folder)).get("config", "") if isinstance(resume, str) else ""
    if os.path.isfile(path) and not text:
        saved: Any = CfgNode.load_yaml_with_base(path)
    else:
        saved = CfgNode.load_cfg(text or saved_config(folder) or "{}")
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
