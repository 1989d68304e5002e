"""The JSON schema of a config file."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..components import args_key, named_components, test_sets
from ..components import components as component_list
from ..duration import _SPELLINGS, Duration
from ..kinds import Typed, _OneOf
from ..node import CfgNode
from ..slots import Slot
from ..yaml_files import BASE_KEY
from .arguments import argument_schema, summary

__all__ = ["config_schema"]

_TEXTS = {"type": "string", "pattern": r"^\s*[(\[].*[)\]]\s*$"}  # (1, 2) is a tuple in our YAML, and text in others
_NULLS = {"enum": [None, "None"]}
_IMPORTED = {"type": "string", "pattern": r"[:.]", "description": "package.module:Name"}


def config_schema(
    cfg: CfgNode, slots: Iterable[Slot], comments: Mapping[str, str], extra: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the JSON schema (draft 7) of the files that ``cfg.merge_from_file`` takes.

    Args:
        cfg: the defaults.
        slots: the keys that name components, with their registries.
        comments: the meaning of each key.
        extra: by key, what to add to its schema.
    """
    by_key = {slot.key: slot for slot in slots}
    definitions: dict[str, Any] = {}
    for slot in by_key.values():
        definitions.update(_definitions(slot))
    base = {"type": ["string", "array"], "description": "A config file, or several, merged before this one."}
    root = _section(cfg, "", by_key, comments, extra)
    root["properties"] = {BASE_KEY: base, **root["properties"]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of hookline"}
    return {**head, **root, "definitions": definitions}


def _section(
    node: CfgNode,
    path: str,
    slots: Mapping[str, Slot],
    comments: Mapping[str, str],
    extra: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if path in comments:
        schema["description"] = comments[path]
    properties, cases = {}, []
    for name, value in node.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, CfgNode):
            properties[name] = _section(value, key, slots, comments, extra)
            continue
        described = {"description": comments[key]} if key in comments else {}
        one = _value(value, node.declared(name))
        if key in slots and (args := args_key(name)):
            one = {"anyOf": [{"const": ""}, {"$ref": _ref(slots[key])}]}
            cases += _cases(slots[key], name, args)
        elif key in slots:
            one = _list(slots[key], node.declared(name))
        default = list(value) if isinstance(value, tuple) else value
        properties[name] = {**described, **one, "default": default, **extra.get(key, {})}
    if properties:
        schema["properties"] = properties
    if not node.is_new_allowed():
        schema["additionalProperties"] = False
    if cases:
        schema["allOf"] = cases
    return {**schema, **extra.get(path, {})}


def _value(value: Any, declared: Typed | None) -> dict[str, Any]:
    """Return the schema of a key's values."""
    if declared is None:
        return _of_type(type(value))
    if declared.kind == Duration.parse_lengths:
        return {"anyOf": [{"type": "array", "items": _duration(Duration.parse_length)}, _TEXTS]}
    if declared.kind in (Duration.parse, Duration.parse_length, Duration.parse_part, Duration.parse_time):
        return _duration(declared.kind)
    if isinstance(declared.kind, _OneOf):
        return {"enum": list(declared.kind.choices)}
    if not isinstance(declared.kind, type):
        return _of_type(declared.type)
    schema = _of_type(declared.kind)
    if declared.least is not None:
        schema["minimum"] = declared.least
    if declared.most is not None:
        schema["maximum"] = declared.most
    return {"anyOf": [schema, _NULLS]} if declared.optional or declared.default is None else schema


def _of_type(kind: type) -> dict[str, Any]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if kind in (list, tuple):
        return {"anyOf": [{"type": "array"}, _TEXTS]}
    return {"type": names[kind]} if kind in names else {}


def _duration(kind: Any) -> dict[str, Any]:
    if kind == Duration.parse_part:
        part = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [*_duration(Duration.parse_length)["anyOf"], part]}
    units = {Duration.parse_length: ("it", "ep"), Duration.parse_time: ("s",)}.get(kind, ("it", "ep", "s"))
    spellings = "|".join(sorted(text for text, (unit, _) in _SPELLINGS.items() if unit in units and text))
    number = r"([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    text = {
        "type": "string",
        "pattern": rf"^\s*({number}\s*({spellings}){'' if kind == Duration.parse_time else '?'}|0|)\s*$",
    }
    return {"anyOf": [{"const": 0} if kind == Duration.parse_time else {"type": "integer", "minimum": 0}, text]}


def _label(slot: Slot) -> str:
    return slot.registry._name


def _ref(slot: Slot) -> str:
    return f"#/definitions/{_label(slot)}"


def _definitions(slot: Slot) -> dict[str, Any]:
    """Return the schemas of the names in a slot's registry, and of the arguments of each."""
    label = _label(slot)
    names: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    for name, target in sorted(slot.registry):
        names.append({"const": name, "description": summary(target)})
        positional = 1 if label == "COLLATE" and not isinstance(target, type) else slot.positional
        arguments[f"{label}.{name}"] = argument_schema(target, positional=positional, offered=slot.offers)
    return {label: {"anyOf": [*names, _IMPORTED]}, **arguments}


def _cases(slot: Slot, name_key: str, arguments_key: str) -> list[dict[str, Any]]:
    """Return what a component's name says about its arguments."""
    return [
        {
            "if": {"properties": {name_key: {"const": name}}, "required": [name_key]},
            "then": {"properties": {arguments_key: {"$ref": f"{_ref(slot)}.{name}"}}},
        }
        for name, _ in sorted(slot.registry)
    ]


def _list(slot: Slot, declared: Typed | None) -> dict[str, Any]:
    kind = declared.kind if declared else component_list
    properties: dict[str, Any] = {"NAME": {"$ref": _ref(slot)}, "ARGS": {"type": ["object", "null"]}}
    if kind in (named_components, test_sets):
        properties["AS"] = {"type": "string", "description": "A name of its own for its results."}
    if kind == test_sets:
        properties["EVAL_PERIOD"] = {**_duration(Duration.parse), "description": "A period of its own."}
    entry = {
        "type": "object",
        "properties": properties,
        "required": ["NAME"],
        "additionalProperties": False,
        "allOf": _cases(slot, "NAME", "ARGS"),
    }
    return {"anyOf": [{"type": "array", "items": {"anyOf": [{"$ref": _ref(slot)}, entry]}}, _TEXTS]}
