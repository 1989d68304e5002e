"""Config of a run: keys and defaults, registries, ``@configurable``, durations. Does not import torch."""

from .components import component, components
from .configurable import configurable
from .defaults import get_cfg
from .duration import Duration
from .errors import ConfigError, UnknownKeyError, suggest, suggest_file
from .kinds import Typed, one_of
from .node import MISSING, CfgNode, global_cfg, set_global_cfg
from .registry import Registry, locate

__all__ = [
    "MISSING",
    "CfgNode",
    "ConfigError",
    "Duration",
    "Registry",
    "Typed",
    "UnknownKeyError",
    "component",
    "components",
    "configurable",
    "get_cfg",
    "global_cfg",
    "locate",
    "one_of",
    "set_global_cfg",
    "suggest",
    "suggest_file",
]
