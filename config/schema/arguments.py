"""JSON schemas of the arguments of components, from their signatures and docstrings."""

import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from ..signatures import MAPPINGS, SEQUENCES, is_tensor, what_it_takes

__all__ = ["argument_schema", "first_sentence", "summary", "type_schema"]

_NUMBERS = {"anyOf": [{"type": "number"}, {"type": "array"}]}


def argument_schema(target: Any, *, positional: int = 0, offered: Collection[str] = ()) -> dict[str, Any]:
    """Return the schema of a component's arguments.

    Args:
        target: the class or function.
        positional: number of arguments that it receives by position.
        offered: names of arguments that it receives unless the config sets them.

    Returns:
        The schema of an object: a property per argument, with type, default and description where they are known.
    """
    schema: dict[str, Any] = {"type": "object", "description": summary(target)}
    taken = what_it_takes(target, with_cfg="cfg" in offered)
    if taken is None:
        return schema
    cfg_first = "cfg" in offered and taken.positions[:1] == ["cfg"] and "cfg" in taken.required
    given = {"cfg", *taken.positions[cfg_first:][:positional]}
    described = _described_arguments(target)
    properties: dict[str, Any] = {}
    for name, parameter in taken.keywords.items():
        if name in given:
            continue
        properties[name] = type_schema(parameter.annotation)
        if parameter.default is None and properties[name]:
            properties[name] = _any_of([properties[name], {"type": "null"}])
        if _is_plain(parameter.default):
            properties[name]["default"] = parameter.default
        if text := described.get(name):
            properties[name]["description"] = text
    schema["properties"] = properties
    needed = [name for name in taken.required if name in properties and name not in offered]
    if needed:
        schema["$comment"] = "needs " + ", ".join(needed)  # "required" would refuse ARGS that a base file completes
    if not taken.any_keyword:
        schema["additionalProperties"] = False
    return schema


def type_schema(annotation: Any) -> dict[str, Any]:
    """Return the schema of the values that :func:`hookline.config.signatures.fits` accepts; ``{}`` for any value."""
    simple = {int: "integer", float: "number", str: "string", bool: "boolean", None: "null", type(None): "null"}
    try:
        if annotation in simple:
            return {"type": simple[annotation]}
    except TypeError:  # not hashable
        return {}
    if is_tensor(annotation):
        return dict(_NUMBERS)
    origin, inner = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _any_of([type_schema(one) for one in inner])
    if origin is typing.Annotated:
        return type_schema(inner[0])
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in SEQUENCES:
        items = type_schema(inner[0]) if inner and (origin is not tuple or inner[-1] is Ellipsis) else {}
        return {"type": "array", **({"items": items} if items else {})}
    if origin in MAPPINGS:
        return {"type": "object"}
    return {}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of values that fit one of the schemas."""
    if {} in schemas:
        return {}
    names: list[str] = []
    others: list[dict[str, Any]] = []
    for schema in schemas:
        if schema.keys() == {"type"}:
            names += schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        else:
            others += schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]
    if names:
        others.append({"type": names[0] if len(names) == 1 else list(dict.fromkeys(names))})
    return others[0] if len(others) == 1 else {"anyOf": others}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf"))


def summary(target: Any) -> str:
    """Return the first sentence of a docstring, on one line, without markup; empty if there is none."""
    text = inspect.cleandoc(getattr(target, "__doc__", None) or "")
    return _plain_text(first_sentence(" ".join(text.split("\n\n")[0].split())))


def first_sentence(text: str) -> str:
    """Return the text up to the first period that ends a sentence, or colon that introduces an example."""
    end = re.search(r"(?<!e\.g)(?<!i\.e)\.(?=\s|$)|::", text)
    return (text[: end.start()] + "." if end else text).strip()


def _plain_text(text: str) -> str:
    text = re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return text.replace("``", "")


def _described_arguments(target: Any) -> dict[str, str]:
    """Read the section ``Args:`` of a docstring."""
    found: dict[str, str] = {}
    for documented in (target, getattr(target, "__init__", None)):
        text = inspect.getdoc(documented) or ""
        section = re.search(r"^(?:Args|Arguments):\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
        for match in re.finditer(
            r"^    (\w+)(?: \([^)]*\))?: (.*(?:\n {6,}.*)*)", section[1] if section else "", re.MULTILINE
        ):
            found.setdefault(match[1], _plain_text(first_sentence(" ".join(match[2].split()))))
    return found
