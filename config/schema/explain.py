"""Texts for a terminal: what a key means, and which components there are. They come from the schema, without torch."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from ..errors import UnknownKeyError, suggest
from ..literals import spell
from .arguments import first_sentence
from .file import read_schema

__all__ = ["explain", "explain_all", "list_components", "list_registries"]

_ENDINGS = ("", "S", "ES")


def explain(name: str, width: int = 80) -> str:
    """Return what a key of the config means, or what a registered component takes.

    Args:
        name: a full key such as ``"SOLVER.BASE_LR"``, a section, or a component such as ``"EMA"``.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is neither a key nor a component of that name; the message suggests the nearest.
    """
    wanted = name.strip().strip(".")
    keys = dict(_keys(read_schema(), ""))
    for key, schema in keys.items():
        if key.upper() == wanted.upper():
            return "\n".join(_section(key, schema, width) if "properties" in schema else _key(key, schema, width))
    found = [(label, one) for label in _labels() for one in _names(label) if one == wanted]
    if found:
        return "\n\n".join("\n".join(_component(label, one, width, arguments=True)) for label, one in found)
    everything = [*keys, *(one for label in _labels() for one in _names(label))]
    raise UnknownKeyError(
        f"there is no config key '{name}'{suggest(name, everything) or '.'} All keys: hookline config explain"
    )


def explain_all(width: int = 80) -> str:
    """Return all keys at the top of the config."""
    return "\n".join(_section("", read_schema(), width))


def list_registries(width: int = 80) -> str:
    """Return a line for each registry: how many components it has, and the keys that name them."""
    keys = [(key, schema) for key, schema in _keys(read_schema(), "") if "properties" not in schema]
    lines = []
    for label in _labels():
        named_by = ", ".join(key for key, schema in keys if _registry(schema) == label)
        lines += _wrap(f"{label:<14}{len(_names(label)):>3}  {named_by}", width, 19)
    return "\n".join(lines)


def list_components(registry: str, width: int = 80) -> str:
    """Return the components of a registry, each with its arguments and the first line of its docstring.

    Args:
        registry: such as ``"MODEL"``, ``"model"``, ``"models"`` or ``"MODEL_REGISTRY"``.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is no such registry; the message lists all.
    """
    wanted = registry.upper().replace("-", "_").removesuffix("_REGISTRY")
    labels = [label for label in _labels() if wanted in [label + ending for ending in _ENDINGS]]
    if not labels:
        known = ", ".join(_labels())
        raise UnknownKeyError(f"there is no registry '{registry}'{suggest(wanted, _labels()) or '.'} Known: {known}")
    blocks = ["\n".join(_component(labels[0], name, width)) for name in _names(labels[0])]
    return "\n".join(blocks)


def _keys(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, below in schema.get("properties", {}).items():
        key = f"{path}.{name}" if path else name
        if name != "_BASE_":
            yield key, below
            yield from _keys(below, key)


def _labels() -> list[str]:
    return [name for name in read_schema()["definitions"] if "." not in name]


def _registry(schema: dict[str, Any]) -> str:
    """Return the registry of the names that a key takes; empty if it names no component."""
    found = re.search(r'"#/definitions/(\w+)"', json.dumps(schema))
    return found[1] if found else ""


def _names(label: str) -> list[str]:
    return [one["const"] for one in read_schema()["definitions"][label]["anyOf"] if "const" in one]


def _section(key: str, schema: dict[str, Any], width: int) -> list[str]:
    lines = _wrap(f"{key}: {schema['description']}", width, 2) if "description" in schema else []
    for name, below in schema["properties"].items():
        value = "..." if "properties" in below else _text(below["default"]) if "default" in below else ""
        lines += _wrap(f"{f'{key}.' if key else ''}{name} {value}".rstrip(), width, 4)
        if below.get("description", "") not in ("", schema.get("description")):
            lines += _wrap(f"  {first_sentence(below['description'])}", width, 2)
    return lines


def _key(key: str, schema: dict[str, Any], width: int) -> list[str]:
    lines = [key]
    if "description" in schema:
        lines += _wrap(f"  {schema['description']}", width, 2)
    if "default" in schema:
        lines += _wrap(f"  default: {_text(schema['default'])}", width, 4)
    if kind := _kind(schema):
        lines += _wrap(f"  type: {kind}", width, 4)
    if label := _registry(schema):
        lines += _wrap(f"  names: {', '.join(_names(label))}; or package.module:Name", width, 4)
        lines += _wrap(f"  details: hookline config list {label.lower()}", width, 4)
    if key.endswith("ARGS"):
        lines += _wrap("  details: hookline config explain NAME, such as AdamW", width, 4)
    return lines


def _component(label: str, name: str, width: int, arguments: bool = False) -> list[str]:
    schema = read_schema()["definitions"][f"{label}.{name}"]
    properties = schema.get("properties", {})
    needed = schema.get("$comment", "needs ").removeprefix("needs ").split(", ")
    shown = []
    for argument, one in properties.items():
        text = argument
        if not arguments and "default" in one:
            text += f"={_text(one['default'])}"
        elif not arguments and argument not in needed:
            text += "=..."
        shown.append(text)
    if schema.get("additionalProperties", True) and "properties" in schema:
        shown.append("**kwargs")
    lines = _wrap(
        f"{name}({', '.join(shown)})" if not arguments else f"{name}: {label.lower().replace('_', ' ')}", width, 4
    )
    if schema["description"]:
        lines += _wrap(f"  {schema['description']}", width, 2)
    for argument, one in properties.items() if arguments else ():
        kind = _kind(one)
        default = f" = {_text(one['default'])}" if "default" in one else " (needed)" if argument in needed else ""
        lines += _wrap(f"  {argument}{f': {kind}' if kind else ''}{default}", width, 6)
        if "description" in one:
            lines += _wrap(f"      {one['description']}", width, 6)
    return lines


def _kind(schema: dict[str, Any]) -> str:
    """Return the values that a schema allows, in words; empty if any."""
    if "enum" in schema:
        return ", ".join(_text(choice) for choice in schema["enum"] if choice != "None")
    if "const" in schema:
        return _text(schema["const"])
    if "anyOf" in schema:
        parts = [_kind(one) for one in schema["anyOf"]]
        return " or ".join(dict.fromkeys(part for part in parts if part not in ("", "mapping")))
    if "$ref" in schema:
        return "component"
    if "pattern" in schema:
        return _words(schema["pattern"])
    kinds = schema.get("type", "")
    text = " or ".join(kinds if isinstance(kinds, list) else [kinds]) if kinds else ""
    if "items" in schema and (items := _kind(schema["items"])):
        text = text.replace("array", f"list of {items}")
    text = text.replace("array", "list").replace("object", "mapping").replace("null", "None")
    least, most = schema.get("minimum"), schema.get("maximum")
    limits = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None and most < 10**9)
    return ", ".join([text, *limits])


def _words(pattern: str) -> str:
    if "min" not in pattern and "ep" not in pattern:
        return ""
    forms = ["'500it', '2ep'"] * ("epochs" in pattern) + ["'45s', '30min', '2h'"] * ("min" in pattern)
    return ", ".join(forms)


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else spell(value) if not isinstance(value, list) else str(value)


def _wrap(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
