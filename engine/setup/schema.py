"""All keys that name components, and the JSON schema of config files with them."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...config import CfgNode, Duration, Typed, get_cfg
from ...config.components import args_key, named_components, test_sets
from ...config.duration import _SPELLINGS
from ...config.explain import described_arguments, key_comments, settable, summary
from ...config.slots import Slot
from ...config.values import OneOf
from ...config.yaml_files import BASE_KEY
from ..data.batches import COLLATE_REGISTRY
from ..data.build import SAMPLER_SLOT
from ..data.datasets import TEST_SLOT, TRAIN_SLOT
from ..evaluation.build import EVALUATOR_SLOT, METRICS_SLOT, TRAIN_METRICS_SLOT
from ..modeling.build import LOSS_SLOT, MODEL_SLOT
from ..parallel.base import STRATEGY_SLOT
from ..solver import param_groups, several
from ..solver.build import OPTIMIZER_SLOT
from ..solver.schedules import SCHEDULE_SLOT
from .check import HOOK_SLOT, WRITER_SLOT

__all__ = ["SLOTS", "schema_of_configs"]

SLOTS = (
    *(MODEL_SLOT, LOSS_SLOT, TRAIN_SLOT, TEST_SLOT, SAMPLER_SLOT, OPTIMIZER_SLOT, SCHEDULE_SLOT, EVALUATOR_SLOT),
    *(METRICS_SLOT, TRAIN_METRICS_SLOT, HOOK_SLOT, WRITER_SLOT, STRATEGY_SLOT),
    Slot(COLLATE_REGISTRY, "DATALOADER.COLLATE_FN.NAME"),
)
_TEXT_LIST = {"type": "string", "pattern": r"^\s*[(\[].*[)\]]\s*$"}  # (1, 2) is a tuple in our YAML, text in others
_COUNT = {"type": "integer", "minimum": 0}
_TYPES: dict[type, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}
_TYPES |= {kind: {"anyOf": [{"type": "array"}, _TEXT_LIST]} for kind in (list, tuple)}


def _any(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def _quantity(*units: str) -> dict[str, Any]:
    """Return the schema of a number with one of the units, as text."""
    spellings = "|".join(text for text, (unit, _) in _SPELLINGS.items() if unit in units)
    number = r"([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    return {"type": "string", "pattern": rf"^\s*({number}\s*({spellings})|0|)\s*$"}


_LENGTH = _any(_COUNT, _quantity("it", "ep"))
_DURATIONS = {
    Duration.parse: _any(_COUNT, _quantity("it", "ep", "s")),
    Duration.parse_length: _LENGTH,
    Duration.parse_lengths: _any({"type": "array", "items": _LENGTH}, _TEXT_LIST),
    Duration.parse_part: _any(_LENGTH, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    Duration.parse_time: _any({"const": 0}, _quantity("s")),
}


def schema_of_configs(cfg: CfgNode | None = None) -> dict[str, Any]:
    """Return the JSON schema (draft 7) of config files, with the names that are registered now.

    Args:
        cfg: the defaults, with keys of a project's own. Default: those of ``get_cfg()``.
    """
    base = {"type": ["string", "array"], "description": "A config file, or several, merged before this one."}
    schema = _section(get_cfg() if cfg is None else cfg, "", key_comments())
    schema["properties"][BASE_KEY] = base
    solver = schema["properties"]["SOLVER"]["properties"]
    solver["PARAM_GROUPS"]["items"] = _closed({key: {} for key in param_groups.KEYS})
    shared = {key: {"$ref": f"#/properties/SOLVER/properties/{key}"} for key in solver if key not in several.COMMON}
    solver["OPTIMIZERS"]["additionalProperties"] = _closed({**{key: {} for key in several.OWN}, **shared})
    for section, name in ((solver, "OPTIMIZER"), (schema["properties"]["TEST"]["properties"], "EVALUATOR")):
        section[name]["type"] = ["object", "string"]  # a name alone
    definitions: dict[str, Any] = {}
    for slot in SLOTS:
        named = [{"const": name, "description": summary(target)} for name, target in sorted(slot.registry)]
        imported = {"type": "string", "pattern": "[:.]", "description": "package.module:Name"}
        definitions[slot.registry._name] = _any(*named, imported)
        definitions.update({_label(slot, name): _arguments(slot, target) for name, target in slot.registry})
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of hookline"}
    return {**head, **schema, "definitions": definitions}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _label(slot: Slot, name: str) -> str:
    return f"{slot.registry._name}.{name}"


def _section(node: CfgNode, path: str, comments: Mapping[str, str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    if not node.is_new_allowed():
        schema["additionalProperties"] = False
    slots = {slot.key: slot for slot in SLOTS}
    for name, value in node.items():
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, CfgNode):
            one = _section(value, key, comments)
        else:
            one = {**_value(value, node.declared(name), slots.get(key)), "default": value}
            if key in slots and (args := args_key(name)):
                schema["allOf"] = [*schema.get("allOf", []), *_cases(slots[key], name, args)]
        schema["properties"][name] = {"description": comments.get(key, ""), **one}
    return schema


def _value(value: Any, declared: Typed | None, slot: Slot | None) -> dict[str, Any]:
    """Return the schema of a key's values."""
    declared = declared or Typed(value, type(value))
    kind = declared.kind
    if slot is not None:
        name = {"$ref": f"#/definitions/{slot.registry._name}"}
        return _any({"const": ""}, name) if isinstance(value, str) else _any(_entries(slot, name, kind), _TEXT_LIST)
    if isinstance(kind, OneOf):
        return {"enum": list(kind.choices)}
    limits = {"minimum": declared.least, "maximum": declared.most}
    schema = dict(_DURATIONS.get(kind) or _TYPES.get(declared.type, {}))
    schema.update({name: limit for name, limit in limits.items() if limit is not None})
    return _any(schema, {"enum": [None, "None"]}) if declared.optional or declared.default is None else schema


def _entries(slot: Slot, name: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the schema of a list of components."""
    entry = _closed({"NAME": name, "ARGS": {"type": ["object", "null"]}})
    if kind in (named_components, test_sets):
        entry["properties"]["AS"] = {"type": "string", "description": "A name of its own for its results."}
    if kind == test_sets:
        entry["properties"]["EVAL_PERIOD"] = {"description": "A period of its own.", **_DURATIONS[Duration.parse]}
    entry.update(required=["NAME"], allOf=_cases(slot, "NAME", "ARGS"))
    return {"type": "array", "items": _any(name, entry)}


def _cases(slot: Slot, name_key: str, arguments_key: str) -> list[dict[str, Any]]:
    """Return what a component's name says about its arguments."""
    return [
        {
            "if": {"properties": {name_key: {"const": name}}, "required": [name_key]},
            "then": {"properties": {arguments_key: {"$ref": f"#/definitions/{_label(slot, name)}"}}},
        }
        for name, _ in sorted(slot.registry)
    ]


def _arguments(slot: Slot, target: Any) -> dict[str, Any]:
    """Return the schema of a component's arguments: their names, defaults and descriptions."""
    taken, described = settable(slot, target), described_arguments(target)
    properties: dict[str, Any] = {}
    for name, parameter in taken.keywords.items():
        properties[name] = {"description": described[name]} if name in described else {}
        with suppress(TypeError, ValueError):  # not plain data
            json.dumps(parameter.default, allow_nan=False)
            properties[name]["default"] = parameter.default
    return {"type": "object", "properties": properties, "additionalProperties": taken.any_keyword}
