"""Registries of classes and functions, with calls that are checked before they are made."""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

from .errors import ConfigError, UnknownKeyError, UnknownNameError, suggest
from .signatures import bind, parameters_of
from .values import OBJECT, ObjectName

_T = TypeVar("_T")
_Arguments = Mapping[str, object]
# Errors list the known names, up to this many.
_MAX_LISTED = 20


class Registry:
    """A table of classes and functions by name::

        MODEL_REGISTRY = Registry("MODEL")

        @MODEL_REGISTRY.register()
        class ConvNet: ...

        MODEL_REGISTRY.build("ConvNet", {"width": 32}, key="MODEL.NAME")

    The interface is fvcore's. ``"package.module:Name"`` works as a name without registration, for a class of the
    registry's kind or a function that returns an instance. The standard library is refused.

    Args:
        name: what it holds, such as ``"MODEL"``; messages say "model".
        kind: a class, or a tuple of classes, that entries build instances of. Default: any.
        hint: ends the message about a function that returns something else.
        function_of: a function with this many required positional parameters, without those in its arguments, is the
            component itself, and not one that builds it: 2 for a loss of outputs and targets. 1: any is. 0: none is.
        by_name: further arguments that such a function is called with if it names them.
    """

    def __init__(
        self, name: str, kind: Any = object, hint: str = "", *, function_of: int = 0, by_name: Collection[str] = ()
    ) -> None:
        self._name = name
        self._obj_map: dict[str, Any] = {}
        self.kind = kind
        self._hint = hint
        self._function_of = function_of
        self._by_name = dict.fromkeys(by_name)

    def __repr__(self) -> str:
        return f"Registry of {self._name}: {', '.join(name for name, _ in self)}"

    def __contains__(self, name: object) -> bool:
        return name in self._obj_map

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._obj_map.items())

    @property
    def _label(self) -> str:
        return self._name.removesuffix("_REGISTRY").replace("_", " ").lower()

    @overload
    def register(self, obj: None = None, *, name: str | None = None) -> Callable[[_T], _T]: ...
    @overload
    def register(self, obj: _T, *, name: str | None = None) -> _T: ...
    def register(self, obj: Any = None, *, name: str | None = None) -> Any:
        """Add a class or function, as a decorator (with or without parentheses) or by a call.

        A class or function with the module and name of a registered one replaces it: a notebook's cell can run again.

        Args:
            obj: the class or function.
            name: its name here, by default its ``__name__``.

        Returns:
            ``obj``, or a decorator.

        Raises:
            ConfigError: an object from elsewhere has the name; the message says where both are defined.
        """
        if obj is None:
            return lambda target: self.register(target, name=name)
        name = name or obj.__name__
        known = self._obj_map.get(name, obj)
        if known is not obj and not is_again(known, obj):
            raise ConfigError(
                f"the {self._label} '{name}' is already registered: {_origin(known)}, and now {_origin(obj)}"
            )
        self._obj_map[name] = obj
        return obj

    def get(self, name: str, key: str = "") -> Any:
        """Look up a name.

        Args:
            name: a registered name, or ``"package.module:Name"`` (or with a dot before the name).
            key: the config key that holds ``name``, for messages.

        Returns:
            The class or function.

        Raises:
            UnknownKeyError: the name is unknown; the message suggests the nearest.
            ConfigError: a module fails on import, or the object is not of the registry's kind.
        """
        prefix = f"{key}: " if key else ""
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}the name of a {self._label} is a string, not {name!r}")
        if name in self:
            return self._obj_map[name]
        target = name.value if isinstance(name, ObjectName) else self._import(name, prefix)
        if isinstance(name, ObjectName) and name.is_component:
            if not isinstance(target, self.kind):
                raise self._refusal(name, key, f"it is of type {type(target).__name__}, not a {self._kind_text}")
            return name.component
        if isinstance(target, type) and not issubclass(target, self.kind):
            raise self._refusal(name, key, f"it is not a subclass of {self._kind_text}")
        if not callable(target):
            raise self._refusal(name, key, f"it is of type {type(target).__name__}, not a class or a function")
        return target

    def build(
        self,
        name: str,
        args: _Arguments | None = None,
        *,
        positional: tuple[object, ...] = (),
        offered: _Arguments | None = None,
        key: str = "",
    ) -> Any:
        """Check the arguments, then call the class or function of a name.

        Args:
            name: see :meth:`get`.
            args: the arguments, by name; config nodes are passed as dicts.
            positional: positional arguments. A target whose first required parameter is ``cfg``, or that is
                ``@configurable``, receives ``offered["cfg"]`` before them.
            offered: arguments that are passed if the signature names them and ``args`` does not set them.
            key: the config key that holds ``name``, such as ``"MODEL.NAME"``, for messages.

        Returns:
            The result of the call; or a function that is the component itself, with ``args`` in a partial.

        Raises:
            UnknownKeyError: the name is unknown.
            ConfigError: an argument is unknown or missing; the message has its full key. Or an imported function
                returns an object that is not of the registry's kind.
        """
        target, by_position, keywords = self.bind(name, args or {}, positional, offered or {}, key)
        if by_position is None:
            return functools.partial(target, **keywords) if keywords else target
        built = target(*by_position, **keywords)
        if name not in self and not isinstance(built, self.kind):
            problem = f"it returned an object of type {type(built).__name__}, not a {self._kind_text}{self._hint}"
            raise self._refusal(name, key, problem)
        return built

    def bind(
        self, name: str, args: _Arguments, positional: tuple[object, ...], offered: _Arguments, key: str
    ) -> tuple[Any, tuple[object, ...] | None, dict[str, Any]]:
        """Check the arguments of :meth:`build` without making the call.

        Returns:
            The class or function, and its arguments: by position (None if it is the component itself), and by name.

        Raises:
            ConfigError: as :meth:`build`.
        """
        target, own = self.get(name, key), args_key(key) or ""
        label = getattr(target, "__name__", name)
        if self._is_itself(target, args):
            later = (None,) * self._function_of
            _, keywords = bind(target, args, positional=later, offered=self._by_name, key=own, label=label)
            return target, None, {name: value for name, value in keywords.items() if name in args}
        try:
            return target, *bind(target, args, positional=positional, offered=offered, key=own, label=label)
        except ConfigError as error:
            if self._function_of and not isinstance(target, type):  # perhaps it was meant to be the component itself
                error.args = (f"{error}{self._hint}",)
            raise

    def _is_itself(self, target: Any, args: _Arguments) -> bool:
        """Whether a function is the component, and does not build it."""
        number = self._function_of
        if not number or isinstance(target, type) or isinstance(getattr(target, "__self__", None), ObjectName):
            return False
        taken = parameters_of(target)
        if number == 1 or taken is None:
            return True
        return len(set(taken.positions[:number]).intersection(taken.required) - {*args}) == number

    def _import(self, name: str, prefix: str) -> Any:
        if name.startswith(OBJECT):  # of the config.yaml of a run from Python
            raise ConfigError(
                f"{prefix}{name} is an object that the Python script of this run passed to Trainer; a config file "
                'cannot hold it. Run that script, or name a class or function here, as "module:Name"'
            )
        names = sorted(self._obj_map)
        known = f" Known: {', '.join(names)}." if 0 < len(names) <= _MAX_LISTED else ""
        hint = suggest(name, names)
        if ":" not in name and "." not in name:
            raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}'{hint or '.'}{known}")
        try:
            if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:  # not imported
                raise ConfigError(f"'{name}' is in Python's standard library, which has no components; name your own")
            return locate(name)
        except UnknownKeyError as error:
            raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}': {error}{hint}") from error
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from error

    def _refusal(self, name: str, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{key}{': ' if key else ''}'{name}' cannot be the {self._label}: {problem}")

    @property
    def _kind_text(self) -> str:
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        return " or ".join(kind.__name__.lstrip("_") for kind in kinds)


def args_key(key: str) -> str | None:
    """Return the key of the arguments of the component that ``key`` names; None if it does not name a component.

    Args:
        key: a key or its last part, such as ``"MODEL.NAME"`` or ``"LR_SCHEDULER_NAME"``.
    """
    if key.endswith("SAMPLER_TRAIN"):  # detectron2's name
        return key.removesuffix("TRAIN") + "ARGS"
    return key.removesuffix("NAME") + "ARGS" if re.search(r"(^|[._])NAME$", key) else None


def is_again(known: object, obj: object) -> bool:
    """Return whether ``obj`` is ``known``, defined again by a notebook's cell that ran twice or a reloaded module."""
    name = getattr(obj, "__qualname__", "<")
    if known is obj or "<" in name or name == "_":  # a function may define several of one name
        return False
    return all(getattr(known, key, None) == getattr(obj, key, None) for key in ("__module__", "__qualname__"))


def locate(name: str) -> Any:
    """Import an object by its name. The current working directory is added to the end of ``sys.path``.

    Args:
        name: ``"package.module:Name"`` or ``"package.module.Name"``.

    Returns:
        The object.

    Raises:
        UnknownNameError: the module or the name in it does not exist. It is also an ImportError.
        ConfigError: the module fails on import; the cause is attached.
    """
    path, colon, attributes = name.partition(":")
    if colon:
        candidates = [(path, attributes.split("."))]
    else:
        parts = name.split(".")
        candidates = [(".".join(parts[:n]), parts[n:]) for n in range(len(parts) - 1, 0, -1)]
    for module_name, attribute_names in candidates:
        module = _import(module_name) if all(module_name.split(".")) else None
        if module is not None:
            return functools.reduce(_attribute, attribute_names, module)
    if not candidates:
        raise UnknownNameError(f"'{name}' names no module")
    module_name = candidates[0][0]
    near = suggest(module_name, (name[:-3] for name in os.listdir() if name.endswith(".py")))
    where = f" in {os.getcwd()} or on Python's path: start in its folder, or set PYTHONPATH"
    raise UnknownNameError(f"there is no module '{module_name}'{near or where}")


def _import(module_name: str) -> ModuleType | None:
    """Import a module from Python's path or, last, the current folder; None if it does not exist."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # loader workers and spawned ranks inherit it, so they find the module too
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 75:  # a signal's
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            return None  # the module itself is missing, not one that it imports
        raise ConfigError(f"importing '{module_name}' fails: {type(error).__name__}: {error}") from error


def _attribute(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", repr(owner))
        hint = suggest(name, (n for n in dir(owner) if not n.startswith("_")))
        raise UnknownNameError(f"there is no '{name}' in '{owner_name}'{hint}") from None


def _origin(obj: object) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', repr(obj))}"
