"""The start of a run from a LazyConfig: its folder, its seed, and the keys that a start reads."""

import os
from typing import Any

from ...config import CfgNode, ConfigError, get_cfg
from .. import comm
from ..checkpoint.find_checkpoint import named_checkpoint

# The key of the defaults, and where LazyConfigs have it.
_KEYS = {
    "OUTPUT_DIR": ("OUTPUT_DIR", "output_dir", "train.output_dir"),
    "SEED": ("SEED", "seed", "train.seed"),
    "CUDNN_BENCHMARK": ("CUDNN_BENCHMARK", "train.cudnn_benchmark"),
    "FLOAT32_PRECISION": ("FLOAT32_PRECISION", "train.float32_precision"),
    "MODEL.WEIGHTS": ("train.init_checkpoint",),
}


def folder_of(cfg: Any) -> str:
    """Return the output folder of a LazyConfig.

    Raises:
        ConfigError: it is not set.
    """
    _, folder = _find(cfg, "OUTPUT_DIR")
    if not folder:
        raise ConfigError("train.output_dir: is not set; it is the folder of the run")
    return folder


def lazy_run(cfg: Any, resume: bool | str) -> tuple[CfgNode, str]:
    """Return the keys that the start of a run uses, and the text of ``config.yaml``.

    A seed that is missing or negative is drawn, the same for all ranks, or taken from the run that is resumed. It is
    put into the config.

    Args:
        cfg: a config of :class:`~hookline.config.LazyConfig`.
        resume: whether the run in the output folder is resumed, or the path of a checkpoint that is.
    """
    from omegaconf import OmegaConf

    from ...config.lazy import as_yaml

    run = get_cfg()
    run.OUTPUT_DIR = folder_of(cfg)
    for name in ("CUDNN_BENCHMARK", "FLOAT32_PRECISION", "MODEL.WEIGHTS"):
        _, value = _find(cfg, name)
        if value is not None:
            run.merge_from_list([name, value])
    key, seed = _find(cfg, "SEED")
    if seed is None or seed < 0:
        seed = comm.broadcast_object(_draw(run.OUTPUT_DIR, resume))
        OmegaConf.update(cfg, key, seed, force_add=True)
    run.SEED = seed
    return run, as_yaml(cfg)[0]


def _find(cfg: Any, name: str) -> tuple[str, Any]:
    """Return the key under which a config has a value, and the value; the last key, and None, if it has none."""
    from omegaconf import OmegaConf

    for key in _KEYS[name]:
        value = OmegaConf.select(cfg, key)
        if value is not None:
            return key, value
    return _KEYS[name][-1], None


def _draw(folder: str, resume: bool | str) -> int:
    """Draw a seed, or read the resumed run's."""
    from ...config import LazyConfig

    if isinstance(resume, str):
        folder = os.path.dirname(os.path.realpath(named_checkpoint(resume, folder)))
    path = os.path.join(folder, "config.yaml")
    seed = _find(LazyConfig.load(path), "SEED")[1] if resume and os.path.isfile(path) else None
    return int.from_bytes(os.urandom(4), "little") % 2**31 if seed is None else seed
