"""Configs written in Python: detectron2's LazyConfig. Needs omegaconf (the extra ``lazy``)."""

import builtins
import dataclasses
import functools
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import yaml
from iopath.common.file_io import g_pathmgr

from .errors import ConfigError, UnknownKeyError, suggest, suggest_file
from .registry import locate

__all__ = ["LazyCall", "LazyConfig", "as_yaml", "instantiate"]

logger = logging.getLogger(__name__)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise TypeError(f"LazyCall({self._target}): give all arguments by name, not {args[0]!r} by position")
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
        content = _run(path) if extension == ".py" else _node(yaml.load(_read(path), _Loader) or {})
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
        if not g_pathmgr.isfile(caller):
            raise ConfigError(f"load_rel('{filename}') is called outside of a file: use LazyConfig.load")
        return LazyConfig.load(os.path.join(os.path.dirname(caller), filename), keys)

    @staticmethod
    def save(cfg: Any, filename: str) -> None:
        """Write a config as YAML, which :meth:`load` reads.

        Targets are written by name. Values that have no name, such as lambdas, are written as text; a warning lists
        their keys.
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
                if "{" in value and re.search(r"[{,]\s*\w+:[^\s/]", value):  # YAML takes {a:1} for {"a:1": null}
                    raise ConfigError(f"{text}: write a dict as {{key: value}}, with a space")
                if re.fullmatch(r"\(.*\)|[-+.\de]+(,\s*[-+.\de]+)+", value):  # a string in YAML
                    raise ConfigError(f"{text}: write a list as [a, b]; quote a string that looks like one")
                cfg.merge_with_dotlist([f"{name}={value or repr('')}"])
            except yaml.YAMLError as error:
                raise ConfigError(
                    f"{text}: the value is not YAML; write a list as [a, b], or quote a string"
                ) from error
        return cfg

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """Write a config as Python-like text, for people: one assignment for each value and call."""
        return "".join(_assignments(_omegaconf().OmegaConf.to_container(cfg, resolve=True), prefix))


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
            target = parent.get("_target_")
            if target is None:
                hint = suggest(name, [f"{above}.{known}".lstrip(".") for known in parent]) or "."
                raise UnknownKeyError(f"{key}: there is no such key{hint} To add it, write +{key}=…")
            if why := _unknown_argument(target, [part]) if callable(target) else "":
                raise UnknownKeyError(f"{key}: {target_name(target)} {why}")
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
    if not callable(target):
        raise ConfigError(f"_target_ {name}: is not callable, but {type(target).__name__}")
    if arguments.pop("_partial_", False):
        return functools.partial(target, **arguments)
    try:
        return target(**arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:  # the call itself, not the target
            if why := _unknown_argument(target, arguments):
                raise ConfigError(f"_target_ {name}: {why}") from error
            error.add_note(f"(in the call of _target_ {name})")
        raise


def _unknown_argument(target: Any, names: Iterable[str]) -> str:
    """Say which of the names is no argument of a callable; empty if all are, or if that is not known."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (ValueError, TypeError):
        return ""
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    return f"takes no argument '{unknown}'{suggest(unknown, known) or '.'} It takes: {', '.join(known) or 'none'}"


def target_name(target: Any) -> str:
    """Return a name under which :func:`~hookline.config.locate` finds an object, as short as possible."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name:
        return repr(target)
    parts = module.split(".")
    shorter = (f"{'.'.join(parts[:end])}.{name}" for end in range(1, len(parts)))  # torch.nn.Linear
    return next((short for short in shorter if _is_named(target, short)), f"{module}.{name}")


def _is_named(value: Any, name: str) -> bool:
    try:
        found = locate(name)
    except ConfigError:
        return False
    return found is value or (callable(value) and bool(found == value))  # each access creates a bound method


# ---------------------------------------------------------------------- text


class _Loader(yaml.SafeLoader):
    """Reads plain values, tuples and names of Python objects. Imports the modules of names, and calls nothing."""

    def name(self, name: str, node: yaml.Node) -> Any:
        return locate(name)

    def tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node, deep=True))

    def refuse(self, tag: str, node: yaml.Node) -> Any:
        raise ConfigError(
            f"line {node.start_mark.line + 1}: the tag !!python/{tag} runs code while the file is read; hookline reads "
            "plain values, !!python/tuple and !!python/name"
        )


class _Name(str):
    """The name of an object, which YAML has a tag for."""


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads, without references between equal values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def name(self, name: _Name) -> yaml.Node:
        return self.represent_scalar(_NAME + name, "")


_NAME = "tag:yaml.org,2002:python/name:"
_Loader.add_multi_constructor(_NAME, _Loader.name)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _Loader.refuse)  # the first prefix that fits counts
_Loader.add_constructor("tag:yaml.org,2002:python/tuple", _Loader.tuple)
_Dumper.add_representer(_Name, _Dumper.name)


def as_yaml(cfg: Any) -> tuple[str, list[str]]:
    """Write a config as YAML.

    Returns:
        The text, and the keys of values that have no name and are written as text.
    """
    omegaconf, lost = _omegaconf(), list[str]()
    # Dataclasses in a config stay objects.
    content = omegaconf.OmegaConf.to_container(cfg, structured_config_mode=omegaconf.SCMode.INSTANTIATE)
    plain = _plain(content, "", lost)
    return yaml.dump(plain, Dumper=_Dumper, default_flow_style=None, allow_unicode=True, width=9999), lost


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
            return _Name(name)
    lost.append(key)
    return re.sub(r" at 0x\w+", "", repr(value))  # the same on all ranks


def _assignments(cfg: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in sorted(cfg.items()):
        if isinstance(value, Mapping) and "_target_" not in value:
            yield from _assignments(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {_expression(value)}\n"


def _expression(value: Any) -> str:
    if isinstance(value, Mapping) and "_target_" in value:
        target = value["_target_"]
        arguments = (f"{name}={_expression(item)}" for name, item in sorted(value.items()) if name != "_target_")
        return f"{target if isinstance(target, str) else target_name(target)}({', '.join(arguments)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_expression(name)}: {_expression(item)}' for name, item in sorted(value.items()))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_expression, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return target_name(value) if callable(value) else repr(value)


# ---------------------------------------------------------------------- Python files


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
