"""Configs written in Python: detectron2's LazyConfig. Needs omegaconf (the extra ``lazy``)."""

import builtins
import dataclasses
import functools
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import yaml
from iopath.common.file_io import g_pathmgr

from .errors import ConfigError, UnknownKeyError, suggest, suggest_file
from .registry import locate
from .yaml_files import dump_text, load_text

logger = logging.getLogger(__name__)

# What Python reads as a list or dict, and YAML as text: (1, 2); 1,2; {a:1}.
_NOT_YAML = re.compile(r"\(.*\)$|[-+.\de]+(,\s*[-+.\de]+)+$|\{\w+:[^\s/]")


def _omegaconf() -> Any:
    try:
        import omegaconf
    except ImportError:
        raise ConfigError("LazyConfig and LazyCall need omegaconf: pip install 'hookline[lazy]'") from None
    return omegaconf


def _node(value: Any) -> Any:
    """Turn a dict into a node of OmegaConf, which may hold any objects. Return everything else."""
    return _omegaconf().DictConfig(value, flags={"allow_objects": True}) if isinstance(value, dict) else value


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

    def __call__(self, **kwargs: object) -> Any:
        target, structures = self._target, (dict, list, tuple, Enum)
        if isinstance(target, type) and (dataclasses.is_dataclass(target) or issubclass(target, structures)):
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
        content = _run(path) if extension == ".py" else _node(load_text(_read(path), path))
        if isinstance(keys, str):
            return _get(content, keys, path)
        if keys is not None:
            return tuple(_get(content, key, path) for key in keys)
        if extension != ".py":
            return content
        kinds = (_omegaconf().DictConfig, _omegaconf().ListConfig, dict)
        return _node({k: _node(v) for k, v in content.items() if isinstance(v, kinds) and not k.startswith("_")})

    @staticmethod
    def load_rel(filename: str, keys: str | tuple[str, ...] | None = None) -> Any:
        """Load a file whose path is relative to the file that calls this. See :meth:`load`."""
        caller = sys._getframe(1).f_code.co_filename
        return LazyConfig.load(os.path.join(os.path.dirname(caller), filename), keys)

    @staticmethod
    def save(cfg: Any, filename: str) -> None:
        """Write a config as YAML, which :meth:`load` reads.

        Targets are written by name; a class, function or dtype as a value becomes a call of
        :func:`~hookline.config.locate`. What has no name, such as a lambda, is written as text, with a warning.
        """
        text, lost = as_yaml(cfg)
        if lost:
            keys = ", ".join(lost)
            logger.warning(
                "%s does not reproduce this config: %s cannot be written. Use a function with a name", filename, keys
            )
        with g_pathmgr.open(filename, "w", encoding="utf-8") as file:
            file.write(text)

    @staticmethod
    def apply_overrides(cfg: Any, overrides: Iterable[str]) -> Any:
        """Change a config by texts such as ``"train.max_iter=100"`` and ``"model.channels=[8,16]"``.

        A key must be there, or be an argument of the call that it is in. ``"+key=value"`` adds a new one. Values are
        YAML.

        Returns:
            The config.

        Raises:
            UnknownKeyError: there is no such key.
            ConfigError: an override is written otherwise.
        """
        for text in overrides:
            key, equals, value = text.partition("=")
            name = key.lstrip("+")
            if not equals or not re.fullmatch(r"[\w./@$\[\]-]+", name):
                raise ConfigError(f"{text}: write overrides as key=value, such as train.max_iter=100")
            _check_key(cfg, name, add=name != key)
            try:
                if _NOT_YAML.match(value):
                    raise ConfigError(f"{text}: write lists as [1, 2] and dicts as {{a: 1}}; quote other text")
                cfg.merge_with_dotlist([f"{name}={value or repr('')}"])
            except yaml.YAMLError as error:
                raise ConfigError(f"{text}: the value is not YAML; write lists as [1, 2], or quote the text") from error
        return cfg


def _get(content: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in content:
        names = [name for name in content if not name.startswith("_")]
        raise UnknownKeyError(f"{path}: there is no '{key}'{suggest(key, names)}")
    return _node(content[key])


def _check_key(cfg: Any, key: str, add: bool) -> None:
    """Check that a key is in the config, is an argument of the call there, or may be added."""
    parent, above = cfg, ""
    for part in key.replace("[", ".").replace("]", "").split("."):
        name = f"{above}.{part}".lstrip(".")
        if not _omegaconf().OmegaConf.is_config(parent):
            raise UnknownKeyError(f"{key}: {above} has no keys; it is {parent!r}, of type {type(parent).__name__}")
        if isinstance(parent, Mapping) and part not in parent:
            if add:
                return
            if "_target_" not in parent:  # the call checks its arguments
                hint = suggest(name, [f"{above}.{known}".lstrip(".") for known in parent]) or "."
                raise UnknownKeyError(f"{key}: there is no such key{hint} To add it, write +{key}=…")
            return
        above, parent = name, _omegaconf().OmegaConf.select(cfg, name)


# ---------------------------------------------------------------------- calls


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
    if isinstance(cfg, Mapping) and "_target_" in cfg:
        return _call(cfg)
    if type(cfg).__module__.startswith("omegaconf."):
        omegaconf = _omegaconf()
        if isinstance(cfg, omegaconf.ListConfig):
            return omegaconf.ListConfig([instantiate(item) for item in cfg], flags={"allow_objects": True})
        if isinstance(cfg, omegaconf.DictConfig) and omegaconf.OmegaConf.get_type(cfg) not in (dict, None):
            return omegaconf.OmegaConf.to_object(cfg)  # made from a dataclass
    return cfg


def _call(cfg: Mapping[Any, Any]) -> Any:
    arguments = {name: instantiate(value) for name, value in cfg.items()}
    target = arguments.pop("_target_")
    name = target if isinstance(target, str) else target_name(target)
    if isinstance(target, str):
        try:
            target = locate(target)
        except ConfigError as error:
            raise type(error)(f"_target_ {name}: {error}") from error.__cause__
    try:
        if arguments.pop("_partial_", False):
            return functools.partial(target, **arguments)
        return target(**arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:  # the call itself, not the target
            raise ConfigError(f"_target_ {name}: {error}") from error
        raise


def target_name(target: Any) -> str:
    """Return a name under which :func:`~hookline.config.locate` finds an object that is defined in a module."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(target)


def _is_named(value: Any, name: str) -> bool:
    try:
        found = locate(name)
    except ConfigError:
        return False
    return found is value or (callable(value) and bool(found == value))  # each access creates a bound method


# ---------------------------------------------------------------------- text


def as_yaml(cfg: Any) -> tuple[str, list[str]]:
    """Write a config as YAML.

    Returns:
        The text, and the keys of values that have no name and are written as text.
    """
    omegaconf, lost = _omegaconf(), list[str]()
    # Dataclasses in a config stay objects.
    content = omegaconf.OmegaConf.to_container(cfg, structured_config_mode=omegaconf.SCMode.INSTANTIATE)
    plain = _plain(content, "", lost)
    return dump_text(plain, default_flow_style=None), lost


def _plain(value: Any, key: str, lost: list[str]) -> Any:
    """Copy a value, with names of targets, dataclasses and partial functions as calls."""
    if isinstance(value, Mapping):
        copy = {name: _plain(item, f"{key}.{name}".lstrip("."), lost) for name, item in value.items()}
        if callable(value.get("_target_")):
            copy["_target_"] = target_name(value["_target_"])
        return copy
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{index}]", lost) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain({"_target_": type(value), **fields}, key, lost)
    if isinstance(value, functools.partial) and not value.args:
        return _plain({"_target_": value.func, "_partial_": True, **value.keywords}, key, lost)
    if value is None or type(value) in (bool, int, float, str):
        return value
    for name in (target_name(value), repr(value)):  # a class or function; torch.float16
        if _is_named(value, name):
            return {"_target_": "hookline.config.locate", "name": name}
    lost.append(key)
    return re.sub(r" at 0x\w+", "", repr(value))  # the same on all ranks


# ---------------------------------------------------------------------- files


def _read(path: str) -> str:
    try:
        with g_pathmgr.open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{suggest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _run(path: str) -> dict[str, Any]:
    """Run a config file, and return its names."""
    try:
        code = compile(_read(path), path, "exec")
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
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
    if not g_pathmgr.isfile(path + ".py"):
        raise ImportError(f"{globals['__file__']}: cannot import {'.' * level}{name}: {path}.py does not exist")
    module = ModuleType(name)
    for key, value in _run(path + ".py").items():
        if not key.startswith("__"):
            setattr(module, key, _node(value))
    return module
