"""Config objects as YAML and as Python-like text."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from .errors import ConfigError
from .instantiate import target_name
from .registry import locate

__all__ = ["read_yaml", "to_python", "write_yaml"]

_NAME = "tag:yaml.org,2002:python/name:"
_WIDTH = 88


# ---------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Reads plain values, tuples and names of Python objects. Imports the modules of names, and calls nothing."""


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads, without references between equal values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _read_name(loader: _Loader, name: str, node: yaml.Node) -> Any:
    return locate(name)


def _read_tuple(loader: _Loader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


def _refuse(loader: _Loader, tag: str, node: yaml.Node) -> Any:
    raise ConfigError(
        f"line {node.start_mark.line + 1}: the tag !!python/{tag} runs code while the file is read; hookline reads "
        "plain values, !!python/tuple and !!python/name"
    )


_Loader.add_multi_constructor(_NAME, _read_name)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _refuse)  # the first prefix that fits counts
_Loader.add_constructor("tag:yaml.org,2002:python/tuple", _read_tuple)


def _write_object(dumper: _Dumper, value: Any) -> yaml.Node:
    for name in (target_name(value), repr(value)):  # a class or function; torch.float16
        try:
            found = locate(name)
            if found is value or (callable(value) and found == value):  # each access creates a bound method
                return dumper.represent_scalar(_NAME + name, "")
        except ConfigError:
            continue
    raise yaml.representer.RepresenterError(f"{value!r} has no name")


_Dumper.add_multi_representer(object, _write_object)


def read_yaml(text: str) -> Any:
    """Read YAML of :func:`write_yaml`, or of detectron2's LazyConfig."""
    return yaml.load(text, _Loader)


def write_yaml(value: Any) -> tuple[str, list[str]]:
    """Write plain values, and calls that configs describe.

    Returns:
        The YAML, and the keys of values that have no name and are written as text.
    """
    lost: list[str] = []
    text = yaml.dump(_plain(value, "", lost), Dumper=_Dumper, default_flow_style=None, allow_unicode=True, width=9999)
    return text, lost


def _plain(value: Any, key: str, lost: list[str]) -> Any:
    """Copy a value, with names of targets, dataclasses and partial functions as calls."""
    if isinstance(value, Mapping):
        copy = {name: _plain(item, f"{key}.{name}" if key else str(name), lost) for name, item in value.items()}
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
    try:
        yaml.dump(value, Dumper=_Dumper)
    except yaml.YAMLError:
        lost.append(key)
        return re.sub(r" at 0x\w+", "", repr(value))  # the same on all ranks
    return value


# ---------------------------------------------------------------------- Python


def to_python(cfg: Mapping[str, Any], prefix: str) -> str:
    """Write a config as assignments, calls as calls."""
    return "".join(f"{line}\n" for line in _assignments(cfg, prefix))


def _assignments(cfg: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in sorted(cfg.items()):
        if isinstance(value, Mapping) and "_target_" not in value:
            yield from _assignments(value, f"{prefix}{name}.")
        else:
            yield _layout(f"{prefix}{name} = ", value, "")


def _layout(head: str, value: Any, tail: str, indent: str = "") -> str:
    """Write a value in one line if it fits, otherwise its items, in one line or in one each."""
    line = f"{indent}{head}{_parts(value, False)}{tail}"
    opening, items, closing = _parts(value, True)
    if len(line) <= _WIDTH or not items:
        return line
    inner = indent + "    "
    body = inner + ", ".join(f"{name}{_parts(item, False)}" for name, item in items)
    if len(body) > _WIDTH or closing != ")":
        body = "\n".join(_layout(name, item, ",", inner) for name, item in items)
    return f"{indent}{head}{opening}\n{body}\n{indent}{closing}{tail}"


def _parts(value: Any, split: bool) -> Any:
    """Write a value in one line; with ``split``, its opening, its items with what stands before each, its closing."""
    if isinstance(value, Mapping) and "_target_" in value:
        target = value["_target_"]
        opening, closing = f"{target if isinstance(target, str) else target_name(target)}(", ")"
        items = [(f"{name}=", item) for name, item in sorted(value.items()) if name != "_target_"]
    elif isinstance(value, Mapping):
        opening, closing = "{", "}"
        items = [(f"{_literal(name)}: ", item) for name, item in sorted(value.items())]
    elif isinstance(value, list):
        opening, closing, items = "[", "]", [("", item) for item in value]
    else:
        opening, closing, items = _literal(value), "", []
    if split:
        return opening, items, closing
    return opening + ", ".join(f"{name}{_parts(item, False)}" for name, item in items) + closing


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return target_name(value) if callable(value) else repr(value)
