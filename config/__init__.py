"""Config of a run: keys and defaults, registries, ``@configurable``, durations. Does not import torch."""

from .components import component, components, name_of
from .configurable import configurable
from .defaults import Config, get_cfg
from .duration import Duration
from .errors import ConfigError, UnknownKeyError, suggest, suggest_file
from .instantiate import instantiate
from .kinds import Typed, one_of
from .lazy import LazyCall, LazyConfig
from .node import MISSING, CfgNode, global_cfg, set_global_cfg
from .registry import Registry, locate

__all__ = [
    "MISSING",
    "CfgNode",
    "Config",
    "ConfigError",
    "Duration",
    "LazyCall",
    "LazyConfig",
    "Registry",
    "Typed",
    "UnknownKeyError",
    "component",
    "components",
    "configurable",
    "get_cfg",
    "global_cfg",
    "instantiate",
    "locate",
    "name_of",
    "one_of",
    "set_global_cfg",
    "suggest",
    "suggest_file",
]
