"""Checks that all ranks were started with the same config."""

import platform
from collections.abc import Mapping
from typing import Any

import torch

import hookline

from ...config import CfgNode, ConfigError
from .. import comm

__all__ = ["check_same_config"]


def check_same_config(cfg: CfgNode, options: Mapping[str, Any]) -> None:
    """Check that all ranks have the same config, command line and versions. Every rank must call it.

    Args:
        cfg: the full config.
        options: the command line's options, by name.

    Raises:
        ConfigError: a rank differs from rank 0. All ranks raise it, and the message lists the differences.
    """
    mine = {key: repr(value) for key, value in {**cfg.flatten(), **options, **_versions()}.items()}
    (_, first), *others = comm.all_gather((platform.node(), mine))
    for rank, (node, other) in enumerate(others, start=1):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if keys:
            found = [f"{key} is {other.get(key, 'missing')} (rank 0: {first.get(key, 'missing')})" for key in keys]
            raise ConfigError(
                f"rank {rank}, on {node}, has another config than rank 0: {'; '.join(found)}. "
                "Start all machines with the same config, command line and versions"
            )


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hookline": hookline.__version__, "torch": torch.__version__.partition("+")[0], "Python": python}
