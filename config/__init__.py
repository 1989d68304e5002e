"""Config of a run: keys and defaults, registries, ``@configurable``, durations. Does not import torch."""

from .components import component, components, name_of
from .defaults import Config, get_cfg
from .duration import Duration
from .errors import ConfigError, UnknownKeyError, suggest
from .lazy import LazyCall, LazyConfig, instantiate
from .node import CfgNode, global_cfg, set_global_cfg
from .registry import Registry, locate
from .signatures import configurable
from .values import Typed, one_of

__all__ = [
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
]
