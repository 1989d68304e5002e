"""Names for classes and functions, and calls of them that are checked beforehand."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

from fvcore.common.registry import Registry as _FvcoreRegistry

from .components import name_key as name_key_of
from .errors import ConfigError, UnknownKeyError, suggest
from .signatures import Plan, check_call

_T = TypeVar("_T")
# An error lists all names up to this many.
_MAX_LISTED = 20


class Registry(_FvcoreRegistry):
    """A table of classes and functions by name::

        MODEL_REGISTRY = Registry("MODEL")

        @MODEL_REGISTRY.register()
        class ConvNet: ...

        MODEL_REGISTRY.build("ConvNet", {"width": 32}, key="MODEL.ARGS")

    Wherever a name is asked for, ``"package.module:Name"`` works without registration.

    Args:
        name: what it holds, such as ``"MODEL"``; messages say "model".
    """

    @property
    def _label(self) -> str:
        return self._name.removesuffix("_REGISTRY").replace("_", " ").lower()

    @overload
    def register(self, obj: None = None, *, name: str | None = None) -> Callable[[_T], _T]: ...
    @overload
    def register(self, obj: _T, *, name: str | None = None) -> _T: ...
    def register(self, obj: Any = None, *, name: str | None = None) -> Any:
        """Add a class or function, as a decorator (with or without parentheses) or by a call.

        Args:
            obj: the class or function.
            name: its name here, by default its ``__name__``.

        Returns:
            ``obj``, or a decorator.

        Raises:
            ConfigError: another object has the name; the message says where both are defined.
        """
        if obj is None:
            return lambda target: self.register(target, name=name)
        self._do_register(name or obj.__name__, obj)
        return obj

    def _do_register(self, name: str, obj: Any) -> None:
        known = self._obj_map.get(name, obj)
        if known is not obj:
            raise ConfigError(
                f"the {self._label} '{name}' is registered already: {_origin(known)}, and now {_origin(obj)}"
            )
        self._obj_map[name] = obj

    def get(self, name: str, key: str = "") -> Any:
        """Look a name up.

        Args:
            name: a registered name, or ``"package.module:Name"`` (or with a dot before the name).
            key: the config key that holds ``name``, for messages.

        Returns:
            The class or function.

        Raises:
            UnknownKeyError: there is none; the message suggests the nearest.
            ConfigError: a module fails on import.
        """
        return self._resolve(name, f"{key}: " if key else "")

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
        """Check a call as :meth:`build` does, without making it.

        Args:
            name: see :meth:`get`.
            args: the arguments, by name.
            positional: how many arguments will come by position.
            offered: the names of what will be offered.
            key: the config key of ``args``, for messages.
            name_key: the config key of ``name``, by default ``key`` with ``NAME`` for ``ARGS``.

        Returns:
            What is going to be called.

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
        """Call what is registered under a name, its arguments checked first.

        Args:
            name: see :meth:`get`.
            args: the arguments, by name; config nodes among them are passed as dicts.
            positional: arguments by position. A target whose first required parameter is ``cfg``, or that is
                ``@configurable``, is given ``offered["cfg"]`` before them.
            offered: what the target gets if its signature names it and ``args`` do not.
            key: the config key of ``args``, such as ``"MODEL.ARGS"``, for messages.
            name_key: the config key of ``name``, by default ``key`` with ``NAME`` for ``ARGS``.

        Returns:
            What the call returns.

        Raises:
            UnknownKeyError: there is no such name.
            ConfigError: arguments are unknown, missing or of the wrong type. The message has a line for each, with
                its full key.
        """
        offered = offered or {}
        target, plan = self._plan(name, args, len(positional), offered, key, name_key)
        if plan.cfg_first:
            positional = (offered["cfg"], *positional)
        keywords = {item: offered[item] for item in plan.offered}
        return target(*positional, **keywords, **_plain(args or {}))

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
        if name in self._obj_map:
            return self._obj_map[name]
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}the name of a {self._label} is a string, not {name!r}")
        names = sorted(self._obj_map)
        known = f" Known: {', '.join(names)}." if 0 < len(names) <= _MAX_LISTED else ""
        if not name:
            raise UnknownKeyError(f"{prefix}no {self._label} is named.{known}")
        hint = suggest(name, names)
        if ":" in name or "." in name:
            try:
                target = locate(name)
            except UnknownKeyError as error:
                raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}': {error}{hint}") from error
            except ConfigError as error:
                raise ConfigError(f"{prefix}{error}") from error
            if not callable(target):
                raise ConfigError(f"{prefix}'{name}' cannot be called: it is a {type(target).__name__}")
            return target
        raise UnknownKeyError(f"{prefix}unknown {self._label} '{name}'{hint or '.'}{known}")


def locate(name: str) -> Any:
    """Import an object by its name.

    Args:
        name: ``"package.module:Name"`` or ``"package.module.Name"``. A module that ``sys.path`` does not have is
            looked for in the current working directory, which then joins ``sys.path``.

    Returns:
        The object.

    Raises:
        UnknownKeyError: there is no such module, or nothing of that name in it.
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
    raise UnknownKeyError(f"there is no module '{candidates[0][0]}'" if candidates else f"'{name}' names no module")


def _import(module_name: str) -> ModuleType | None:
    """The module, or None if there is none of this name."""
    try:
        return _import_on_path(module_name)
    except ModuleNotFoundError:
        pass
    root = module_name.partition(".")[0]
    folder = os.getcwd()
    if root in sys.modules or folder in sys.path or "" in sys.path:
        return None
    # Like a script's own folder, so that loader workers and spawned ranks, which are given sys.path, find it as well.
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
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise  # it is this module that is missing, not one that it imports
        raise ConfigError(f"importing '{module_name}' fails: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, names: list[str]) -> Any:
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            owner = getattr(found, "__name__", repr(found))
            hint = suggest(name, (n for n in dir(found) if not n.startswith("_")))
            raise UnknownKeyError(f"there is no '{name}' in '{owner}'{hint}") from None
    return found


def _plain(value: Any) -> Any:
    """Config nodes as dicts, so that a target can do with its arguments what it likes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _origin(obj: Any) -> str:
    name = f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', repr(obj))}"
    try:
        return f"{name} ({inspect.getsourcefile(obj)}:{inspect.getsourcelines(obj)[1]})"
    except (OSError, TypeError):
        return name
