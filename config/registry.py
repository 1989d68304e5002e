"""Registries of classes and functions, with calls that are checked before they are made."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, overload

from fvcore.common.registry import Registry as _FvcoreRegistry

from .components import name_key as name_key_of
from .errors import ConfigError, UnknownKeyError, UnknownNameError, suggest
from .signatures import Plan, check_call, to_tensor
from .values import FrozenList, ObjectName, is_object_text
from .yaml_files import folders

_T = TypeVar("_T")
# Errors list the known names, up to this many.
_MAX_LISTED = 20


class Registry(_FvcoreRegistry):
    """A table of classes and functions by name::

        MODEL_REGISTRY = Registry("MODEL")

        @MODEL_REGISTRY.register()
        class ConvNet: ...

        MODEL_REGISTRY.build("ConvNet", {"width": 32}, key="MODEL.ARGS")

    ``"package.module:Name"`` works as a name without registration, for a class of the registry's kind or a function
    that returns an instance. The standard library is refused.

    Args:
        name: what it holds, such as ``"MODEL"``; messages say "model".
        kind: a class, or a tuple of classes, that entries build instances of. Default: any.
        package: a package of hookline that registers further entries when its names are imported, as they are when a
            name is not found.
    """

    def __init__(self, name: str, kind: Any = object, package: str = "") -> None:
        super().__init__(name)
        self.kind = kind
        self._package = package

    def _load_all(self) -> None:
        package, self._package = self._package, ""
        if package:
            module = importlib.import_module(package)
            for name in module.__all__:
                getattr(module, name)

    def __contains__(self, name: object) -> bool:
        if name not in self._obj_map:
            self._load_all()
        return name in self._obj_map

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self._load_all()
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
        self._do_register(name or obj.__name__, obj)
        return obj

    def _do_register(self, name: str, obj: Any) -> None:
        if not obj.__module__.startswith("hookline."):
            self._load_all()  # an entry of hookline may have the name
        known = self._obj_map.get(name, obj)
        if known is not obj and not is_again(known, obj):
            raise ConfigError(
                f"the {self._label} '{name}' is already registered: {_origin(known)}, and now {_origin(obj)}"
            )
        self._obj_map[name] = obj

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
        return self._resolve(name, f"{key}: " if key else "")

    def in_any_case(self, name: str) -> str:
        """Return the registered name that equals ``name`` except for upper and lower case; without one, ``name``."""
        return name if name in self else {known.lower(): known for known in self._obj_map}.get(name.lower(), name)

    def check(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        positional: int = 0,
        offered: Collection[str] = (),
        key: str = "",
        name_key: str | None = None,
    ) -> Any:
        """Check the name and arguments of a call of :meth:`build` without making it.

        Args:
            name: see :meth:`get`.
            args: the arguments, by name.
            positional: number of positional arguments of the call.
            offered: names of the arguments that the call will offer.
            key: the config key of ``args``, for messages.
            name_key: the config key of ``name``, by default ``key`` with ``NAME`` for ``ARGS``.

        Returns:
            The class or function.

        Raises:
            ConfigError: as :meth:`build`.
        """
        return self._plan(name, args, positional, offered, key, name_key)[0]

    def build(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        positional: tuple[Any, ...] = (),
        offered: Mapping[str, Any] | None = None,
        key: str = "",
        name_key: str | None = None,
    ) -> Any:
        """Check the arguments, then call the class or function of a name.

        Args:
            name: see :meth:`get`.
            args: the arguments, by name; config nodes are passed as dicts.
            positional: positional arguments. A target whose first required parameter is ``cfg``, or that is
                ``@configurable``, receives ``offered["cfg"]`` before them.
            offered: arguments that are passed if the signature names them and ``args`` does not set them.
            key: the config key of ``args``, such as ``"MODEL.ARGS"``, for messages.
            name_key: the config key of ``name``, by default ``key`` with ``NAME`` for ``ARGS``.

        Returns:
            The result of the call.

        Raises:
            UnknownKeyError: the name is unknown.
            ConfigError: arguments are unknown, missing or of the wrong type; the message has one line per argument,
                with its full key. Or an imported function returns an object that is not of the registry's kind.
        """
        offered = offered or {}
        target, plan = self._plan(name, args, len(positional), offered, key, name_key)
        if plan.cfg_first:
            positional = (offered["cfg"], *positional)
        keywords = {item: offered[item] for item in plan.offered}
        given = {
            item: to_tensor(value, plan.tensors[item]) if item in plan.tensors else value
            for item, value in _plain(args or {}).items()
        }
        built = target(*positional, **keywords, **given)
        if name not in self._obj_map and not isinstance(built, self.kind):
            where = name_key_of(key) if name_key is None else name_key
            raise ConfigError(
                f"{where + ': ' if where else ''}'{name}' cannot be the {self._label}: it returned an "
                f"object of type {type(built).__name__}, not a {self._kind_text}"
            )
        return built

    def _plan(
        self,
        name: str,
        args: Mapping[str, Any] | None,
        positional: int,
        offered: Collection[str],
        key: str,
        name_key: str | None,
    ) -> tuple[Any, Plan]:
        name_key = name_key_of(key) if name_key is None else name_key
        target = self._resolve(name, f"{name_key}: " if name_key else "")
        label = getattr(target, "__name__", name)
        plan = check_call(target, args or {}, positional=positional, offered=offered, key=key, label=label)
        return target, plan

    def _resolve(self, name: str, prefix: str) -> Any:
        if isinstance(name, ObjectName):
            return self._resolve_object(name, prefix)
        if isinstance(name, str) and name in self:
            return self._obj_map[name]
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}the name of a {self._label} is a string, not {name!r}")
        if is_object_text(name):
            raise ConfigError(
                f"{prefix}{name} is an object that the Python script of this run passed to Trainer; a config file "
                'cannot hold it. Run that script, or name a class or function here, as "module:Name"'
            )
        names = sorted(self._obj_map)
        known = f" Known: {', '.join(names)}." if 0 < len(names) <= _MAX_LISTED else ""
        if not name:
            raise UnknownKeyError(f"{prefix}no {self._label} is named.{known}")
        hint = suggest(name, names)
        if ":" in name or "." in name:
            try:
                _refuse_standard_library(name)  # without importing it
                target = locate(name)
            except UnknownKeyError as error:
                raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}': {error}{hint}") from error
            except ConfigError as error:
                raise ConfigError(f"{prefix}{error}") from error
            if problem := self._problem(target):
                raise ConfigError(f"{prefix}'{name}' cannot be the {self._label}: {problem}")
            return target
        raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}'{hint or '.'}{known}")

    def _resolve_object(self, name: ObjectName, prefix: str) -> Any:
        value, problem = name.value, ""
        if name.is_component and not isinstance(value, self.kind):
            problem = f"it is of type {type(value).__name__}, not a {self._kind_text}"
        elif isinstance(value, type) and not name.is_component and not issubclass(value, self.kind):
            problem = f"it is not a subclass of {self._kind_text}"
        if problem:
            raise ConfigError(f"{prefix}{name} cannot be the {self._label}: {problem}")
        return name.component if name.is_component else value

    def _problem(self, target: Any) -> str:
        """Why an imported object is not of the registry's kind; empty if it is."""
        function = target
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, type | FunctionType | MethodType):
            return f"it is of type {type(target).__name__}, not a class or a function written in Python"
        if _is_standard(getattr(function, "__module__", None) or ""):
            return f"it is {_origin(function)}, of Python's standard library"
        if isinstance(target, type) and not issubclass(target, self.kind):
            return f"it is not a subclass of {self._kind_text}"
        return ""

    @property
    def _kind_text(self) -> str:
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        return " or ".join(kind.__name__.lstrip("_") for kind in kinds)


def is_again(known: Any, obj: Any) -> bool:
    """Return whether ``obj`` is ``known``, defined again by a notebook's cell that ran twice or a reloaded module."""
    name = getattr(obj, "__qualname__", "<")
    if known is obj or "<" in name or name == "_":  # a function may define several of one name
        return False
    return all(getattr(known, key, None) == getattr(obj, key, None) for key in ("__module__", "__qualname__"))


def _refuse_standard_library(name: str) -> None:
    if _is_standard(name.partition(":")[0]):
        raise ConfigError(f"'{name}' is in Python's standard library, which has no components; name your own module")


def _is_standard(module_name: str) -> bool:
    return module_name.partition(".")[0] in sys.stdlib_module_names


def locate(name: str) -> Any:
    """Import an object by its name.

    Args:
        name: ``"package.module:Name"`` or ``"package.module.Name"``. A module that is not on ``sys.path``
            is imported from the current working directory, which is then added to ``sys.path``.

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
            return _attribute(module, attribute_names)
    if not candidates:
        raise UnknownNameError(f"'{name}' names no module")
    raise UnknownNameError(f"there is no module '{candidates[0][0]}'{_where(candidates[0][0])}")


def import_module(module_name: str) -> ModuleType:
    """Import a module from Python's path or the current folder.

    Raises:
        ConfigError: there is no such module, or it fails on import.
    """
    module = _import(module_name) if all(module_name.split(".")) else None
    if module is None:
        raise UnknownNameError(f"there is no module '{module_name}'{_where(module_name)}")
    return module


def _where(module_name: str) -> str:
    """Return what to do if a missing module is beside a config file that was read, or is misspelt."""
    path = module_name.replace(".", os.sep)
    for folder in folders:
        if os.path.isfile(os.path.join(folder, f"{path}.py")) or os.path.isdir(os.path.join(folder, path)):
            return f". It is beside the config file: start in {folder}, or set PYTHONPATH={folder}"
    return suggest(module_name, (name[:-3] for name in os.listdir() if name.endswith(".py")))


def _import(module_name: str) -> ModuleType | None:
    """Import a module; None if it does not exist."""
    try:
        return _import_on_path(module_name)
    except ModuleNotFoundError:
        pass
    root = module_name.partition(".")[0]
    folder = os.getcwd()
    if root in sys.modules or folder in sys.path or "" in sys.path:
        return None
    # Loader workers and spawned ranks inherit sys.path, so they find the module too.
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return _import_on_path(module_name)
    except ModuleNotFoundError:
        return None
    finally:
        if root not in sys.modules:
            sys.path.remove(folder)


def _import_on_path(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 75:  # a signal's
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise  # the module itself is missing, not one that it imports
        raise ConfigError(f"importing '{module_name}' fails: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, names: list[str]) -> Any:
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            owner = getattr(found, "__name__", repr(found))
            hint = suggest(name, (n for n in dir(found) if not n.startswith("_")))
            raise UnknownNameError(f"there is no '{name}' in '{owner}'{hint}") from None
    return found


def _plain(value: Any) -> Any:
    """Copy config nodes to dicts, so that the target may change its arguments."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, FrozenList):
        return (tuple if type(value) is tuple else list)(map(_plain, value))
    return value


def _origin(obj: Any) -> str:
    name = f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', repr(obj))}"
    try:
        return f"{name} ({inspect.getsourcefile(obj)}:{inspect.getsourcelines(obj)[1]})"
    except (OSError, TypeError):
        return name
