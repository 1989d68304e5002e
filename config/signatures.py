"""Arguments and signatures: check a call without making it, and ``@configurable`` targets, which take a config."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from yacs.config import CfgNode as _YacsCfgNode

from .errors import ConfigError, suggest

_Parameter = inspect.Parameter
_F = TypeVar("_F", bound=Callable[..., Any])
# Attribute of functions that @configurable decorates: their from_config, or True for an __init__.
_MARK = "_configurable_from"
_BY_POSITION = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)


@dataclass
class Parameters:
    """The parameters of a target.

    Attributes:
        positions: names of the positional parameters, in order.
        keywords: the keyword parameters, their annotations resolved where possible.
        required: names without a default.
        any_position: whether there is ``*args``.
        any_keyword: whether there is ``**kwargs``.
    """

    positions: list[str] = field(default_factory=list)
    keywords: dict[str, inspect.Parameter] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    any_position: bool = False
    any_keyword: bool = False


def bind(
    target: Any,
    args: Mapping[str, object],
    *,
    positional: tuple[object, ...] = (),
    offered: Mapping[str, object] | None = None,
    key: str,
    label: str,
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Check the names of a call's arguments, and values of a ``Literal``, without making it.

    Args:
        target: a class or callable.
        args: arguments by name.
        positional: positional arguments. ``offered["cfg"]`` comes before them if the target's first required
            parameter is ``cfg``.
        offered: arguments that are passed if the target takes them.
        key: the config key of ``args``, for messages; may be empty.
        label: the target's name, for messages.

    Returns:
        The positional arguments and the keyword arguments of the call. Config nodes are copied to dicts, and numbers
        for a parameter that is a tensor become one.

    Raises:
        ConfigError: an argument is unknown or missing, or none of a ``Literal``; the message has its full key.
    """
    prefix, offered = f"{key}." if key else "", offered or {}
    offers_cfg = "cfg" in offered and "cfg" not in args
    taken = parameters_of(target, with_cfg=offers_cfg)
    keywords = _copied(args)
    if taken is None:
        return positional, keywords
    if offers_cfg and taken.positions[:1] == ["cfg"] and "cfg" in taken.required:
        positional = (offered["cfg"], *positional)
    given = taken.positions[: len(positional)]
    by_name = {name: parameter for name, parameter in taken.keywords.items() if name not in given}
    for name, value in keywords.items():
        if name in by_name:
            keywords[name] = _fitted(value, by_name[name].annotation, f"{prefix}{name}")
        elif name in given or not taken.any_keyword:
            hint = suggest(str(name), by_name) or "."
            choices = ", ".join(one for one in by_name if one not in offered)
            takes = f"It takes: {choices}." if choices else "It takes no arguments."
            raise ConfigError(f"{prefix}{name}: {label} takes no argument '{name}'{hint} {takes}")
    keywords = {**{name: value for name, value in offered.items() if name in by_name}, **keywords}
    for name in taken.required:
        if name not in given and name not in keywords:
            raise ConfigError(f"{prefix}{name}: {label} needs the argument '{name}', which is not given")
    return positional, keywords


def _copied(value: Any) -> Any:
    """Copy mappings and lists, config nodes as dicts, so that the target may change its arguments."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _fitted(value: object, annotation: object, key: str) -> object:
    """Check the value of a parameter that is a ``Literal``; if it is a tensor, return numbers as one.

    CrossEntropyLoss takes ``weight: [1, 2]``.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = [one for one in typing.get_args(annotation) if one is not type(None)] if is_union else [annotation]
    if value is None or len(members) != 1:
        return value
    if typing.get_origin(members[0]) is typing.Literal and value not in (choices := typing.get_args(members[0])):
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(map(repr, choices))}")
    is_tensor = getattr(members[0], "__name__", "") == "Tensor" and type(value) in (int, float, list, tuple)
    torch = sys.modules.get("torch")
    return torch.tensor(value, dtype=torch.get_default_dtype()) if is_tensor and torch else value


def parameters_of(target: Any, with_cfg: bool = False) -> Parameters | None:
    """Collect the parameters of a class or callable.

    An ``__init__`` with ``**kwargs`` is assumed to pass them to the next base class. If the last one has ``**kwargs``
    too, any keyword is allowed. ``__signature__`` of a class takes precedence.

    Args:
        target: the class or callable.
        with_cfg: whether it is called with a config (for ``@configurable`` targets).

    Returns:
        The parameters; None if they are unknown, as for some builtins.
    """
    functions = [target]
    if inspect.isclass(target) and "__signature__" not in vars(target):
        functions = [vars(cls)["__init__"] for cls in target.__mro__[:-1] if "__init__" in vars(cls)] or functions
    taken: Parameters | None = None
    for function in functions:
        try:
            signature = inspect.signature(function)
            with suppress(Exception):  # such as a name that is only imported for type checkers
                signature = inspect.signature(function, eval_str=True)
        except (ValueError, TypeError):
            break
        is_first, taken = taken is None, taken or Parameters()
        taken.any_keyword = False
        for index, parameter in enumerate(signature.parameters.values()):
            name, kind = parameter.name, parameter.kind
            if index == 0 and function is not target and kind in _BY_POSITION:
                continue  # self
            if kind is _Parameter.VAR_KEYWORD:
                taken.any_keyword = True
            elif kind is _Parameter.VAR_POSITIONAL:
                taken.any_position |= is_first
            else:
                if kind is not _Parameter.POSITIONAL_ONLY:
                    taken.keywords.setdefault(name, parameter)
                if is_first and kind in _BY_POSITION:
                    taken.positions.append(name)
                if is_first and parameter.default is _Parameter.empty:
                    taken.required.append(name)
        if not taken.any_keyword:
            break
    source = source_of(target) if with_cfg and taken else None
    if taken is None or source is None:
        return taken
    # from_config fills the required arguments of __init__, and defines the positional parameters.
    first = parameters_of(source) or Parameters()
    first.keywords = {**taken.keywords, **first.keywords}
    first.any_keyword |= taken.any_keyword
    first.required = list(dict.fromkeys(["cfg", *first.required]))
    return first


# ---------------------------------------------------------------------- configurable


@overload
def configurable(init_func: _F, *, from_config: None = None) -> _F: ...
@overload
def configurable(init_func: None = None, *, from_config: Callable[..., dict[str, Any]]) -> Callable[[_F], _F]: ...
def configurable(init_func: Any = None, *, from_config: Callable[..., dict[str, Any]] | None = None) -> Any:
    """Make a class or function callable with a config.

    On the ``__init__`` of a class, which has a class method ``from_config(cls, cfg, ...)``::

        class Net:
            @configurable
            def __init__(self, width, depth=2): ...

            @classmethod
            def from_config(cls, cfg):
                return {"width": cfg.MODEL.WIDTH}

        Net(cfg)             # Net(width=cfg.MODEL.WIDTH)
        Net(cfg, depth=3)    # Net(width=cfg.MODEL.WIDTH, depth=3)
        Net(width=8)

    On a function: ``@configurable(from_config=lambda cfg: {"width": cfg.MODEL.WIDTH})``.

    The config, a CfgNode or omegaconf's DictConfig, is the first positional argument, or ``cfg=``. ``from_config``
    receives the arguments that it names. The others go to the target, and override what ``from_config`` returns.

    Args:
        init_func: the ``__init__``, when used without parentheses.
        from_config: for a function: returns its arguments from a config. The first parameter is ``cfg``.

    Returns:
        The decorated function, or the decorator.

    Raises:
        TypeError: it decorates something else; or, when the target is called, ``from_config`` is not a class method or
            its first parameter is not ``cfg``.
        AttributeError: the class has no ``from_config``.
    """
    is_init = getattr(init_func, "__name__", "") == "__init__"
    if is_init == (from_config is not None):
        raise TypeError(
            "write @configurable on the __init__ of a class, or @configurable(from_config=...) on a function"
        )
    return _takes_config(init_func) if is_init else functools.partial(_takes_config, from_config=from_config)


def source_of(target: Any) -> Callable[..., dict[str, Any]] | None:
    """The ``from_config`` of a target that ``@configurable`` decorates.

    Args:
        target: a class or function.

    Returns:
        Its ``from_config`` (bound, for a class); None if it is not decorated.
    """
    if not inspect.isclass(target):
        return getattr(target, _MARK, None)
    if not getattr(target.__init__, _MARK, None):
        return None
    owner: Any = target
    from_config: Callable[..., dict[str, Any]] = owner.from_config
    return from_config


def _takes_config(function: Callable[..., Any], from_config: Callable[..., dict[str, Any]] | None = None) -> Any:
    """Wrap a function, or an ``__init__`` if there is no ``from_config``, so that it takes a config."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> object:
        own, args = (args[:0], args) if from_config else (args[:1], args[1:])
        source = from_config or type(own[0]).from_config
        if from_config is None and not inspect.ismethod(source):
            raise TypeError(
                f"{type(own[0]).__name__}.from_config must be a classmethod, since __init__ is @configurable"
            )
        if _called_with_config(args, kwargs):
            kwargs, args = _explicit_arguments(source, args, kwargs), ()
        return function(*own, *args, **kwargs)

    setattr(wrapped, _MARK, from_config or True)
    if from_config is not None:
        wrapped.from_config = from_config  # type: ignore[attr-defined]  # detectron2's users call it
    return wrapped


def _called_with_config(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    first = args[0] if args else kwargs.get("cfg")
    omegaconf: Any = sys.modules.get("omegaconf")  # a LazyConfig
    return isinstance(first, _YacsCfgNode) or (omegaconf is not None and isinstance(first, omegaconf.DictConfig))


def _explicit_arguments(
    from_config: Callable[..., dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    parameters = inspect.signature(from_config).parameters
    if next(iter(parameters), "") != "cfg":
        raise TypeError(f"{from_config.__qualname__} must take 'cfg' as its first argument")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    passed_on = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
    explicit = from_config(*args, **passed_on)
    return {**explicit, **{name: value for name, value in kwargs.items() if name not in passed_on}}
