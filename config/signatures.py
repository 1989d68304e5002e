"""Arguments and signatures: check a call without making it, and ``@configurable`` targets, which take a config."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from yacs.config import CfgNode as _YacsCfgNode

from .errors import ConfigError, suggest

_Parameter = inspect.Parameter
_F = TypeVar("_F", bound=Callable[..., Any])
# Attribute of functions that @configurable decorates: their from_config, or True for an __init__.
_MARK = "_configurable_from"
_BY_POSITION = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass
class Taken:
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


@dataclass(frozen=True)
class Plan:
    """How to call a target with the offered arguments.

    Attributes:
        cfg_first: whether the config is the first positional argument.
        offered: names of the other offered arguments that the target takes, by keyword.
        tensors: the given arguments that become tensors, with the class.
    """

    cfg_first: bool = False
    offered: tuple[str, ...] = ()
    tensors: Mapping[str, Any] = field(default_factory=dict)


def bind(
    target: Any, args: Mapping[str, Any], *, positional: int, offered: Collection[str], key: str, label: str
) -> Plan:
    """Check a call of ``target`` without making it.

    Args:
        target: a class or callable.
        args: arguments by name.
        positional: number of positional arguments.
        offered: names of arguments that are passed if the target takes them.
        key: the config key of ``args``, for messages; may be empty.
        label: the target's name, for messages.

    Returns:
        How to call it.

    Raises:
        ConfigError: an argument is unknown, missing or of the wrong type; the message has one line per argument.
    """
    prefix = f"{key}." if key else ""
    offers_cfg = "cfg" in offered and "cfg" not in args
    taken = what_it_takes(target, with_cfg=offers_cfg)
    if taken is None:
        return Plan()
    cfg_first = offers_cfg and taken.positions[:1] == ["cfg"] and "cfg" in taken.required
    free = taken.positions[cfg_first:]
    if positional > len(free) and not taken.any_position:
        raise ConfigError(f"{key or label}: {label} takes {len(free)} arguments by position, not {positional}")
    given = {*free[:positional], *(["cfg"] if cfg_first else [])}
    choices = [name for name in taken.keywords if name not in given and name not in offered]

    problems, tensors = [], {}
    for name, value in args.items():
        if name in given:
            problems.append(f"{prefix}{name}: {label} already receives '{name}'")
        elif name in taken.keywords:
            parameter = taken.keywords[name]
            if not fits(value, parameter.annotation) and not (value is None and parameter.default is None):
                expected = inspect.formatannotation(parameter.annotation)
                problems.append(f"{prefix}{name}: expected {expected}, got {value!r} ({type(value).__name__})")
            elif (kind := _tensor_class(value, parameter.annotation)) is not None:
                tensors[name] = kind
        elif not taken.any_keyword:
            hint = suggest(str(name), [*choices, *(n for n in offered if n in taken.keywords)]) or "."
            takes = f"It takes: {', '.join(choices)}." if choices else "It takes no arguments."
            problems.append(f"{prefix}{name}: {label} takes no argument '{name}'{hint} {takes}")
    supplied = tuple(name for name in offered if name in taken.keywords and name not in given and name not in args)
    for name in taken.required:
        if name not in given and name not in args and name not in supplied:
            problems.append(f"{prefix}{name}: {label} needs the argument '{name}', which is not given")
    if problems:
        raise ConfigError("\n".join(problems))
    return Plan(cfg_first, supplied, tensors)


def is_function_of_two(target: Any, args: Mapping[str, Any]) -> bool:
    """Return whether a component is a function of outputs and targets, and not one that builds such a function.

    Args:
        target: the class or function.
        args: its arguments in the config. A function of outputs and targets needs two more.
    """
    taken = what_it_takes(target) if isinstance(target, types.FunctionType) else None
    if taken is None:
        return False
    return len([name for name in taken.positions[:2] if name in taken.required and name not in args]) == 2


def what_it_takes(target: Any, with_cfg: bool = False) -> Taken | None:
    """Collect the parameters of a class or callable.

    An ``__init__`` with ``**kwargs`` is assumed to pass them to the next base class. If the last one has ``**kwargs``
    too, any keyword is allowed. ``__signature__`` of a class takes precedence.

    Args:
        target: the class or callable.
        with_cfg: whether it is called with a config (for ``@configurable`` targets).

    Returns:
        The parameters; None if they are unknown, as for some builtins.
    """
    chain = _signature_chain(target)
    if not chain:
        return None
    taken = _take(chain[0])
    for parameters in chain[1:]:
        if not taken.any_keyword:
            break
        below = _take(parameters)
        taken.keywords = {**below.keywords, **taken.keywords}
        taken.any_keyword = below.any_keyword
    source = source_of(target) if with_cfg else None
    if source is not None:
        # from_config fills the required arguments of __init__, and defines the positional parameters.
        first = _take(_parameters(source) or [])
        first.keywords = {**taken.keywords, **first.keywords}
        first.any_keyword |= taken.any_keyword
        first.required = list(dict.fromkeys(["cfg", *first.required]))
        return first
    return taken


def _signature_chain(target: Any) -> list[list[inspect.Parameter]]:
    """The parameters of a callable; for a class, of each ``__init__`` in its MRO."""
    inits = []
    if inspect.isclass(target) and "__signature__" not in vars(target):
        inits = [vars(cls)["__init__"] for cls in target.__mro__[:-1] if "__init__" in vars(cls)]
    chain: list[list[inspect.Parameter]] = []
    for function in inits or [target]:
        parameters = _parameters(function)
        if parameters is None:
            break
        has_self = inits and parameters and parameters[0].kind in _BY_POSITION
        chain.append(parameters[1:] if has_self else parameters)
    return chain


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError, NameError):
        return None
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return [parameter.replace(annotation=_resolved(parameter.annotation, names)) for parameter in parameters]


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """Return the annotation; one written as a string is evaluated in its module."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except Exception:  # such as a name that is only imported for type checkers
        return _Parameter.empty


def _take(parameters: list[inspect.Parameter]) -> Taken:
    named = [p for p in parameters if p.kind not in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)]
    return Taken(
        positions=[p.name for p in named if p.kind in _BY_POSITION],
        keywords={p.name: p for p in named if p.kind in _BY_KEYWORD},
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
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
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
        if not isinstance(value, (list, tuple)):
            return False
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            return len(value) == len(inner) and all(map(fits, value, inner))
        return not inner or all(fits(item, inner[0]) for item in value)
    if origin in MAPPINGS:
        if not isinstance(value, Mapping):
            return False
        return not inner or all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    return True


def _tensor_class(value: Any, annotation: Any) -> Any:
    """The class of tensors if numbers of a config are meant as a tensor: ``weight: [1, 2]`` of CrossEntropyLoss."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    found = next(filter(is_tensor, members), None)
    others = [one for one in members if one is not found]
    return found if found is not None and _is_numbers(value) and not any(fits(value, one) for one in others) else None


def to_tensor(value: Any, kind: Any) -> Any:
    """A tensor of floats with the values of nested lists, or a number. Does not import torch."""
    return kind(value) if isinstance(value, (list, tuple)) else kind([value]).reshape(())


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
        TypeError: the target or ``from_config`` is not as described.
        AttributeError: the class has no ``from_config``.
    """
    if init_func is not None:
        if from_config is not None or not inspect.isfunction(init_func) or init_func.__name__ != "__init__":
            raise TypeError(
                "write @configurable on the __init__ of a class, or @configurable(from_config=...) on a function"
            )
        return _takes_config(init_func)
    if from_config is None:
        raise TypeError("@configurable() needs from_config=...; on the __init__ of a class, leave out the parentheses")
    _check_first_parameter(from_config)
    return functools.partial(_takes_config, from_config=from_config)


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
    return _class_from_config(target)


def _takes_config(function: Callable[..., Any], from_config: Callable[..., dict[str, Any]] | None = None) -> Any:
    """Wrap a function, or an ``__init__`` if there is no ``from_config``, so that it takes a config."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        own, args = (args[:0], args) if from_config else (args[:1], args[1:])
        source = from_config or _class_from_config(type(own[0]))
        if _called_with_config(args, kwargs):
            kwargs, args = _explicit_arguments(source, args, kwargs), ()
        return function(*own, *args, **kwargs)

    setattr(wrapped, _MARK, from_config or True)
    if from_config is not None:
        wrapped.from_config = from_config  # type: ignore[attr-defined]  # detectron2's users call it
    return wrapped


def _class_from_config(cls: type) -> Callable[..., dict[str, Any]]:
    from_config = getattr(cls, "from_config", None)
    if from_config is None:
        raise AttributeError(f"{cls.__name__} is @configurable, so it needs a class method from_config(cls, cfg)")
    if not inspect.ismethod(from_config):
        raise TypeError(f"{cls.__name__}.from_config must be a class method")
    _check_first_parameter(from_config)
    return from_config


def _check_first_parameter(from_config: Callable[..., Any]) -> None:
    if not callable(from_config) or next(iter(inspect.signature(from_config).parameters), None) != "cfg":
        name = getattr(from_config, "__qualname__", repr(from_config))
        raise TypeError(f"{name}: the first parameter of a from_config function is 'cfg'")


def _called_with_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first = args[0] if args else kwargs.get("cfg")
    omegaconf: Any = sys.modules.get("omegaconf")  # a LazyConfig
    return isinstance(first, _YacsCfgNode) or (omegaconf is not None and isinstance(first, omegaconf.DictConfig))


def _explicit_arguments(
    from_config: Callable[..., dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    parameters = inspect.signature(from_config).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    passed_on = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
    explicit = from_config(*args, **passed_on)
    if not isinstance(explicit, dict):
        raise TypeError(f"{from_config.__qualname__} must return a dict of arguments, not a {type(explicit).__name__}")
    return {**explicit, **{name: value for name, value in kwargs.items() if name not in passed_on}}
