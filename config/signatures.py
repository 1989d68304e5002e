"""Arguments and signatures: check a call without making it, and ``@configurable`` targets, which take a config."""

from __future__ import annotations

import collections.abc
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
SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


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
    args: Mapping[str, Any],
    *,
    positional: tuple[Any, ...] = (),
    offered: Mapping[str, Any] | None = None,
    key: str,
    label: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check a call of ``target`` without making it.

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
        ConfigError: an argument is unknown, missing or of the wrong type; the message has one line per argument.
    """
    prefix = f"{key}." if key else ""
    offered = offered or {}
    offers_cfg = "cfg" in offered and "cfg" not in args
    taken = parameters_of(target, with_cfg=offers_cfg)
    keywords = {name: _plain(value) for name, value in args.items()}
    if taken is None:
        return positional, keywords
    cfg_first = offers_cfg and taken.positions[:1] == ["cfg"] and "cfg" in taken.required
    free = taken.positions[cfg_first:]
    if len(positional) > len(free) and not taken.any_position:
        raise ConfigError(f"{key or label}: {label} takes {len(free)} arguments by position, not {len(positional)}")
    given = {*free[: len(positional)], *(["cfg"] if cfg_first else [])}
    choices = [name for name in taken.keywords if name not in given and name not in offered]

    problems = []
    for name, value in args.items():
        if name in given:
            problems.append(f"{prefix}{name}: {label} already receives '{name}'")
        elif name in taken.keywords:
            parameter = taken.keywords[name]
            if not fits(value, parameter.annotation) and not (value is None and parameter.default is None):
                expected = inspect.formatannotation(parameter.annotation)
                problems.append(f"{prefix}{name}: expected {expected}, got {value!r} ({type(value).__name__})")
            elif (kind := _tensor_class(value, parameter.annotation)) is not None:
                keywords[name] = kind(value) if isinstance(value, (list, tuple)) else kind([value]).reshape(())
        elif not taken.any_keyword:
            hint = suggest(str(name), [*choices, *(n for n in offered if n in taken.keywords)]) or "."
            takes = f"It takes: {', '.join(choices)}." if choices else "It takes no arguments."
            problems.append(f"{prefix}{name}: {label} takes no argument '{name}'{hint} {takes}")
    supplied = [name for name in offered if name in taken.keywords and name not in given and name not in args]
    for name in taken.required:
        if name not in given and name not in args and name not in supplied:
            problems.append(f"{prefix}{name}: {label} needs the argument '{name}', which is not given")
    if problems:
        raise ConfigError("\n".join(problems))
    first = (offered["cfg"],) if cfg_first else ()
    return (*first, *positional), {**{name: offered[name] for name in supplied}, **keywords}


def _plain(value: Any) -> Any:
    """Copy config nodes to dicts and frozen lists to lists, so that the target may change its arguments."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def is_function_of_two(target: Any, args: Mapping[str, Any]) -> bool:
    """Return whether a component is a function of outputs and targets, and not one that builds such a function.

    Args:
        target: the class or function.
        args: its arguments in the config. A function of outputs and targets needs two more.
    """
    taken = parameters_of(target) if isinstance(target, types.FunctionType) else None
    if taken is None:
        return False
    return len([name for name in taken.positions[:2] if name in taken.required and name not in args]) == 2


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
    taken = _merged(target)
    source = source_of(target) if with_cfg else None
    if taken is None or source is None:
        return taken
    # from_config fills the required arguments of __init__, and defines the positional parameters.
    first = _merged(source) or Parameters()
    first.keywords = {**taken.keywords, **first.keywords}
    first.any_keyword |= taken.any_keyword
    first.required = list(dict.fromkeys(["cfg", *first.required]))
    return first


def _merged(target: Any) -> Parameters | None:
    """The parameters of a callable; for a class, of each ``__init__`` in its MRO, as far as there is ``**kwargs``."""
    inits = []
    if inspect.isclass(target) and "__signature__" not in vars(target):
        inits = [vars(cls)["__init__"] for cls in target.__mro__[:-1] if "__init__" in vars(cls)]
    taken: Parameters | None = None
    for function in inits or [target]:
        parameters = _parameters(function)
        if parameters is None:
            break
        below = _take(parameters[1:] if inits and parameters and parameters[0].kind in _BY_POSITION else parameters)
        if taken is None:
            taken = below
        else:
            taken.keywords = {**below.keywords, **taken.keywords}
            taken.any_keyword = below.any_keyword
        if not taken.any_keyword:
            break
    return taken


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        signature = inspect.signature(function)
        with suppress(Exception):  # such as a name that is only imported for type checkers
            signature = inspect.signature(function, eval_str=True)
    except (ValueError, TypeError, NameError):
        return None
    return list(signature.parameters.values())


def _take(parameters: list[inspect.Parameter]) -> Parameters:
    named = [p for p in parameters if p.kind not in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)]
    return Parameters(
        positions=[p.name for p in named if p.kind in _BY_POSITION],
        keywords={p.name: p for p in named if p.kind is not _Parameter.POSITIONAL_ONLY},
        required=[p.name for p in named if p.default is _Parameter.empty],
        any_position=any(p.kind is _Parameter.VAR_POSITIONAL for p in parameters),
        any_keyword=any(p.kind is _Parameter.VAR_KEYWORD for p in parameters),
    )


def fits(value: Any, annotation: Any) -> bool:
    """Whether a config value matches an annotation.

    Checked are numbers (an int is a float, a bool is neither), str, bool, None, sequences (lists and tuples are
    equivalent) and mappings of these, tensors (numbers, in lists or not), unions and ``Literal``. Any value matches
    other annotations.

    Args:
        value: plain data.
        annotation: the annotation, not a string.

    Returns:
        False if it certainly does not match.
    """
    if annotation in (None, type(None)):
        return value is None
    if annotation in (int, float):
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    if annotation in (str, bool):
        return isinstance(value, annotation)
    if is_tensor(annotation):
        return _is_numbers(value) or not isinstance(value, (str, bool, list, tuple, Mapping, type(None)))
    origin, inner = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is typing.Annotated:
        return fits(value, inner[0])
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin in SEQUENCES:
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            return isinstance(value, (list, tuple)) and len(value) == len(inner) and all(map(fits, value, inner))
        return isinstance(value, (list, tuple)) and all(fits(item, one) for item in value for one in inner[:1])
    if origin in MAPPINGS:
        return isinstance(value, Mapping) and all(all(map(fits, pair, inner)) for pair in value.items())
    return True


def _tensor_class(value: Any, annotation: Any) -> Any:
    """The class of tensors if numbers of a config are meant as a tensor: ``weight: [1, 2]`` of CrossEntropyLoss."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    found = next(filter(is_tensor, members), None)
    others = [one for one in members if one is not found]
    return found if found is not None and _is_numbers(value) and not any(fits(value, one) for one in others) else None


def is_tensor(annotation: Any) -> bool:
    return getattr(annotation, "__name__", "") == "Tensor" and getattr(annotation, "__module__", "") == "torch"


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numbers, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    def wrapped(*args: Any, **kwargs: Any) -> Any:
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


def _called_with_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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
