"""Calls described by dicts: ``{"_target_": function or its name, argument: value}``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError, suggest
from .registry import locate

__all__ = ["instantiate", "target_name"]


def instantiate(cfg: Any) -> Any:
    """Make the call that a config describes, after those in its arguments.

    Args:
        cfg: a mapping with ``_target_``, a function or the name of one, and the arguments; or a list of such. With
            ``_partial_: true`` the result is ``functools.partial`` of the call.

    Returns:
        What the target returns; a list of results; ``cfg`` itself if it describes no call.

    Raises:
        ConfigError: the target does not exist, or it does not take an argument.
    """
    if isinstance(cfg, list):
        return [instantiate(item) for item in cfg]
    if type(cfg).__module__.startswith("omegaconf."):
        return _instantiate_node(cfg)
    return _call(cfg) if isinstance(cfg, Mapping) and "_target_" in cfg else cfg


def _instantiate_node(cfg: Any) -> Any:
    """Instantiate a node of OmegaConf."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(cfg, ListConfig):
        return ListConfig([instantiate(item) for item in cfg], flags={"allow_objects": True})
    if not isinstance(cfg, DictConfig):
        return cfg
    if "_target_" in cfg:
        return _call(cfg)
    made_from = OmegaConf.get_type(cfg)
    return OmegaConf.to_object(cfg) if made_from not in (dict, None) else cfg  # made from a dataclass


def _call(cfg: Mapping[Any, Any]) -> Any:
    arguments = {name: instantiate(value) for name, value in cfg.items()}
    target = arguments.pop("_target_")
    name = target if isinstance(target, str) else target_name(target)
    if isinstance(target, str):
        try:
            target = locate(target)
        except ConfigError as error:
            raise type(error)(f"_target_ {name}: {error}") from error.__cause__
    if not callable(target):
        raise ConfigError(f"_target_ {name}: is not callable, but {type(target).__name__}")
    if arguments.pop("_partial_", False):
        return functools.partial(target, **arguments)
    try:
        return target(**arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from inside of the target
        why = unknown_argument(target, arguments)
        if why:
            raise ConfigError(f"_target_ {name}: {why}") from error
        error.add_note(f"(in the call of _target_ {name})")
        raise


def unknown_argument(target: Callable[..., Any], names: Mapping[str, Any] | list[str]) -> str:
    """Say which of the names is no argument of a callable; empty if all are, or if that is not known."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (ValueError, TypeError):
        return ""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return ""
    hint = suggest(unknown, known) or "."
    return f"takes no argument '{unknown}'{hint} It takes: {', '.join(known) or 'none'}"


def target_name(target: Any) -> str:
    """Return a name under which :func:`~hookline.config.locate` finds an object, as short as possible."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name:
        return repr(target)
    parts = module.split(".")
    for end in range(1, len(parts)):  # torch.nn.Linear, not torch.nn.modules.linear.Linear
        short = f"{'.'.join(parts[:end])}.{name}"
        try:
            if locate(short) is target:
                return short
        except ConfigError:
            continue
    return f"{module}.{name}"
