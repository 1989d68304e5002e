"""Two configs side by side."""

import os
from typing import Any

from .defaults import get_cfg
from .node import CfgNode
from .values import MISSING, spell

__all__ = ["differences", "resolved"]


def resolved(path: str) -> CfgNode:
    """Return the defaults with a config file, or with the ``config.yaml`` of a run's folder, merged into them.

    A run's own keys are kept, also those that its project adds to the config.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    cfg = get_cfg()
    if os.path.isdir(path):
        path = os.path.join(path, "config.yaml")
        for node in cfg.walk():
            node.set_new_allowed(True)
    cfg.merge_from_file(path)
    return cfg


def differences(old: CfgNode, new: CfgNode) -> str:
    """Return a line for each key that differs, as ``KEY: old → new``; empty if none does."""
    return "\n".join(f"{key}: {_text(before)} → {_text(after)}" for key, (before, after) in new.diff(old).items())


def _text(value: Any) -> str:
    if value is MISSING:
        return "(not set)"
    return repr(value) if isinstance(value, list) else spell(value) if not isinstance(value, str) else f'"{value}"'
