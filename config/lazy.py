"""Configs written in Python: detectron2's LazyConfig. Needs omegaconf (the extra ``lazy``)."""

import builtins
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import CodeType, ModuleType
from typing import Any

from iopath.common.file_io import g_pathmgr

from .errors import ConfigError, UnknownKeyError, suggest, suggest_file
from .instantiate import target_name, unknown_argument
from .lazy_text import read_yaml, to_python, write_yaml
from .overrides import parse_override

__all__ = ["LazyCall", "LazyConfig"]

logger = logging.getLogger(__name__)


def _omegaconf() -> Any:
    try:
        import omegaconf
    except ImportError:
        raise ConfigError("LazyConfig and LazyCall need omegaconf: pip install 'hookline[lazy]'") from None
    return omegaconf


class LazyCall:
    """Describes a call instead of making it::

        layer = LazyCall(nn.Linear)(in_features=8, out_features=4)
        layer.out_features = 2
        instantiate(layer)  # nn.Linear(in_features=8, out_features=2)

    Args:
        target: what is called, its name, or another LazyCall's result.
    """

    def __init__(self, target: Any) -> None:
        if not (callable(target) or isinstance(target, str | Mapping)):
            raise TypeError(f"LazyCall: the target must be callable, or the name of a callable, not {target!r}")
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise TypeError(f"LazyCall({self._target}): give all arguments by name, not {args[0]!r} by position")
        target, structures = self._target, (dict, list, tuple, Enum)
        if isinstance(target, type) and (is_dataclass(target) or issubclass(target, structures)):
            target = target_name(target)  # OmegaConf would take the class for a type of configs
        return _node({**kwargs, "_target_": target})


class LazyConfig:
    """Loads, saves and changes configs: trees of OmegaConf's nodes, in which a call is a dict with ``_target_``.

    A config file is a Python file. Its config objects are the dicts, lists and calls at its top. A relative import in
    it loads another config file, anew for each import. Loading a Python file runs it.
    """

    @staticmethod
    def load(filename: str, keys: str | tuple[str, ...] | None = None) -> Any:
        """Load a Python or YAML file.

        Args:
            filename: the file.
            keys: which objects to return: one, or a tuple of several. Default: all config objects, as one config.

        Raises:
            ConfigError: the file cannot be read, its syntax is wrong, or it has no such key.
        """
        path = os.fspath(filename)
        extension = os.path.splitext(path)[1]
        if extension not in (".py", ".yaml", ".yml"):
            raise ConfigError(f"{path}: a config file ends in .py, .yaml or .yml")
        content = _run(path) if extension == ".py" else _node(read_yaml(_read(path)) or {})
        if keys is not None:
            found = tuple(_get(content, key, path) for key in ((keys,) if isinstance(keys, str) else keys))
            return found[0] if isinstance(keys, str) else found
        if extension != ".py":
            return content
        omegaconf = _omegaconf()
        kinds = (omegaconf.DictConfig, omegaconf.ListConfig, dict)
        return _node({k: _node(v) for k, v in content.items() if isinstance(v, kinds) and not k.startswith("_")})

    @staticmethod
    def load_rel(filename: str, keys: str | tuple[str, ...] | None = None) -> Any:
        """Load a file whose path is relative to the file that calls this. See :meth:`load`."""
        caller = sys._getframe(1).f_code.co_filename
        if not g_pathmgr.isfile(caller):
            raise ConfigError(f"load_rel('{filename}') is called outside of a file: use LazyConfig.load")
        return LazyConfig.load(os.path.join(os.path.dirname(caller), filename), keys)

    @staticmethod
    def save(cfg: Any, filename: str) -> None:
        """Write a config as YAML, which :meth:`load` reads.

        Targets are written by name. Values that have no name, such as lambdas, are written as text; a warning lists
        their keys.
        """
        text, lost = write_yaml(
            _omegaconf().OmegaConf.to_container(cfg, resolve=False, structured_config_mode=_objects())
        )
        if lost:
            logger.warning(
                "%s does not reproduce this config: %s cannot be written. Use a function with a name",
                filename,
                ", ".join(lost),
            )
        with g_pathmgr.open(filename, "w", encoding="utf-8") as file:
            file.write(text)

    @staticmethod
    def apply_overrides(cfg: Any, overrides: Iterable[str]) -> Any:
        """Change a config by texts such as ``"train.max_iter=100"`` and ``"model.channels=[8,16]"``.

        A key must be there, or be an argument of the call that it is in. ``"+key=value"`` adds a new one.

        Returns:
            The config.

        Raises:
            UnknownKeyError: there is no such key.
            ConfigError: an override is written otherwise.
        """
        for text in overrides:
            sign, key, value = parse_override(text)
            _check_key(cfg, key, bool(sign))
            _omegaconf().OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        return cfg

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """Write a config as Python-like text, for people: one assignment for each value and call."""
        return to_python(_omegaconf().OmegaConf.to_container(cfg, resolve=True), prefix)


def _objects() -> Any:
    """Dataclasses in a config are returned as such."""
    return _omegaconf().SCMode.INSTANTIATE


def _node(value: Any) -> Any:
    """Turn a dict into a node of OmegaConf, which may hold any objects. Return everything else."""
    return _omegaconf().DictConfig(value, flags={"allow_objects": True}) if isinstance(value, dict) else value


def _get(content: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in content:
        names = [name for name in content if not name.startswith("_")]
        raise UnknownKeyError(f"{path}: there is no '{key}'{suggest(key, names)}")
    return _node(content[key])


def _check_key(cfg: Any, key: str, add: bool) -> None:
    """Check that a key is in the config, or may be added."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    parent, above = cfg, ""
    for part in parts:
        if not _omegaconf().OmegaConf.is_config(parent):
            raise UnknownKeyError(f"{key}: {above} has no keys; it is {parent!r}, of type {type(parent).__name__}")
        if isinstance(parent, Mapping) and part not in parent:
            if not add:
                _refuse_key(key, parent, f"{above}.{part}" if above else part)
            return
        above = f"{above}.{part}" if above else part
        parent = _omegaconf().OmegaConf.select(cfg, above)


def _refuse_key(key: str, parent: Mapping[str, Any], name: str) -> None:
    """Raise an error for a key that is not in its parent, unless it is an argument of the call there."""
    above, _, last = name.rpartition(".")
    target = parent.get("_target_")
    if target is None:
        hint = suggest(name, [f"{above}.{known}" if above else str(known) for known in parent]) or "."
        raise UnknownKeyError(f"{key}: there is no such key{hint} To add it, write +{key}=…")
    why = unknown_argument(target, [last]) if callable(target) else ""
    if why:
        raise UnknownKeyError(f"{key}: {target_name(target)} {why}")


# ---------------------------------------------------------------------- Python files


def _read(path: str) -> str:
    try:
        with g_pathmgr.open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{suggest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _compile(path: str) -> CodeType:
    try:
        return compile(_read(path), path, "exec")
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error


def _run(path: str) -> dict[str, Any]:
    """Run a config file, and return its names."""
    code = _compile(path)
    namespace = {
        "__name__": "<config>",
        "__file__": path,
        # Import statements use this __import__. Everything else imports as usual, at the same time.
        "__builtins__": {**vars(builtins), "__import__": _import},
    }
    exec(code, namespace)
    return namespace


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Import what a config file imports: relative imports load config files, others are Python's."""
    if level == 0:
        return builtins.__import__(name, globals, locals, fromlist, level)
    folder = globals["__file__"]
    for _ in range(level):
        folder = os.path.dirname(folder)
    path = os.path.join(folder, *name.split("."))
    if not name or (g_pathmgr.isdir(path) and not g_pathmgr.isfile(path + ".py")):
        raise ImportError(
            f"{globals['__file__']}: {path} is a folder. A relative import in a config file names another config file: "
            "from .folder.file import name"
        )
    if not g_pathmgr.isfile(path + ".py"):
        raise ImportError(f"{globals['__file__']}: cannot import {'.' * level}{name}: {path}.py does not exist")
    module = ModuleType(name)
    for key, value in _run(path + ".py").items():
        if not key.startswith("__"):
            setattr(module, key, _node(value))
    return module
