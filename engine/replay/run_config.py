"""What a run on disk was: its config and its number of ranks."""

import glob
import os

from ...config import CfgNode, ConfigError, UnknownKeyError, get_cfg
from ..checkpoint.candidates import saved_ranks

__all__ = ["ranks_of", "run_config"]


def run_config(run: str, cfg: CfgNode | None = None) -> CfgNode:
    """Return the config in ``config.yaml`` of a run.

    Args:
        run: the folder of the run.
        cfg: the config that the file is merged into, with the project's own keys. Default: ``get_cfg()``.

    Raises:
        ConfigError: there is no such run, or its config is invalid.
    """
    path = os.path.join(run, "config.yaml")
    if not os.path.isfile(path):
        raise ConfigError(f"{run}: no run of hookline is here (it has no config.yaml)")
    cfg = get_cfg() if cfg is None else cfg.clone()
    cfg.defrost()
    try:
        cfg.merge_from_file(path)
    except UnknownKeyError as error:
        raise UnknownKeyError(
            f"{error}\nIf the run's script adds the key, call the script, which ends with run(Trainer, args, cfg): "
            f"python SCRIPT --config-file {path} with --replay N or --samples N"
        ) from None
    return cfg


def ranks_of(run: str, checkpoint: str = "") -> int:
    """Return the number of ranks of a run, from one of its checkpoints, or else from its log files."""
    ranks = saved_ranks(checkpoint) if checkpoint else 0
    return ranks or 1 + len(glob.glob(os.path.join(glob.escape(run), "log.txt.rank*")))
