"""``@configurable``: call a class or function with a config, or with explicit arguments."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from yacs.config import CfgNode as _YacsCfgNode

_F = TypeVar("_F", bound=Callable[..., Any])
# Attribute of decorated functions: their from_config, or True for an __init__.
_MARK = "_configurable_from"


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
        return _configurable_init(init_func)
    if from_config is None:
        raise TypeError("@configurable() needs from_config=...; on the __init__ of a class, leave out the parentheses")
    _check_first_parameter(from_config)
    return functools.partial(_configurable_function, from_config)


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


def _configurable_init(init_func: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init_func)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if _called_with_config(args, kwargs):
            kwargs, args = _explicit_arguments(_class_from_config(type(self)), args, kwargs), ()
        elif not inspect.ismethod(getattr(type(self), "from_config", None)):
            _class_from_config(type(self))  # raises
        init_func(self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


def _configurable_function(from_config: Callable[..., dict[str, Any]], function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _called_with_config(args, kwargs):
            kwargs, args = _explicit_arguments(from_config, args, kwargs), ()
        return function(*args, **kwargs)

    setattr(wrapped, _MARK, from_config)
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
