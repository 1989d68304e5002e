"""The config of a run on disk."""

import os

from ...config import CfgNode, ConfigError, get_cfg

__all__ = ["run_config"]


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
    cfg.merge_from_file(path)
    return cfg
