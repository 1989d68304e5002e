"""What config files may hold: all keys that name components, their JSON schema, and the texts of ``hookline config``.

The texts are read from the schema, so that an editor and ``hookline config explain`` say the same.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ...config import CfgNode, Duration, Typed, UnknownKeyError, defaults, get_cfg, suggest
from ...config.components import Slot, args_key, named_components, test_sets
from ...config.duration import FORMS, LENGTH_FORMS, SPELLINGS, TIME_FORMS
from ...config.signatures import Taken, what_it_takes
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

__all__ = ["SLOTS", "explain", "key_comments", "list_components", "list_registries", "schema_of_configs"]

SLOTS = (
    *(MODEL_SLOT, LOSS_SLOT, TRAIN_SLOT, TEST_SLOT, SAMPLER_SLOT, OPTIMIZER_SLOT, SCHEDULE_SLOT, EVALUATOR_SLOT),
    *(METRICS_SLOT, TRAIN_METRICS_SLOT, HOOK_SLOT, WRITER_SLOT, STRATEGY_SLOT),
    Slot(COLLATE_REGISTRY, "DATALOADER.COLLATE_FN.NAME"),
)
_KEY = re.compile(r"_C\.([A-Z][A-Z0-9_.]*) = ")
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
    spellings = "|".join(text for text, (unit, _) in SPELLINGS.items() if unit in units)
    number = r"([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    return {"type": "string", "pattern": rf"^\s*({number}\s*({spellings})|0|)\s*$"}


_LENGTH = _any(_COUNT, _quantity("it", "ep"))
_FRACTION = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
# Titles say in words what a key takes.
_DURATIONS: dict[Any, dict[str, Any]] = {
    Duration.parse: {"title": FORMS, **_any(_COUNT, _quantity("it", "ep", "s"))},
    Duration.parse_length: {"title": LENGTH_FORMS, **_LENGTH},
    Duration.parse_lengths: {
        "title": f"a list, each {LENGTH_FORMS}",
        **_any({"type": "array", "items": _LENGTH}, _TEXT_LIST),
    },
    Duration.parse_part: {"title": f"{LENGTH_FORMS}, or a fraction of the run", **_any(_LENGTH, _FRACTION)},
    Duration.parse_time: {"title": TIME_FORMS, **_any({"const": 0}, _quantity("s"))},
}


# ---------------------------------------------------------------------- schema


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
        named = [{"const": name, "description": _summary(target)} for name, target in sorted(slot.registry)]
        imported = {"type": "string", "pattern": "[:.]", "description": "package.module:Name"}
        definitions[slot.registry._name] = _any(*named, imported)
        definitions.update({_label(slot, name): _arguments(slot, target) for name, target in slot.registry})
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of hookline"}
    return {**head, **schema, "definitions": definitions}


def key_comments(source: str | None = None) -> dict[str, str]:
    """Return the comment of each key: the one above it, or above the first of the lines of keys that it is in.

    Args:
        source: the text of a file such as ``config/defaults.py``, which is the default.
    """
    comments: dict[str, str] = {}
    block: list[str] = []
    comment = ""
    for line in (source or inspect.getsource(defaults)).splitlines():
        if line.startswith("# ") and not line.startswith("# ---"):
            block.append(line[2:].strip())
        elif match := _KEY.match(line):
            comment = " ".join(block) or comment
            if comment:
                comments[match[1]] = comment
            block = []
        elif line[:1] not in (" ", ")"):  # the end of a key's value may be on a line of its own
            block, comment = [], ""
    return comments


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
        one = _any({"const": ""}, name) if isinstance(value, str) else _any(_entries(slot, name, kind), _TEXT_LIST)
        return {"title": declared.type.__name__, **one}
    if isinstance(kind, OneOf):
        return {"title": ", ".join(map(_text, kind.choices)), "enum": list(kind.choices)}
    schema = {"title": declared.type.__name__, **(_DURATIONS.get(kind) or _TYPES.get(declared.type, {}))}
    for bound, words, limit in (("minimum", "at least", declared.least), ("maximum", "at most", declared.most)):
        if limit is not None:
            schema[bound] = limit
            schema["title"] += f", {words} {limit}" if limit < 10**9 else ""
    if declared.optional or declared.default is None:
        return {"title": f"{schema['title']} or None", **_any(schema, {"enum": [None, "None"]})}
    return schema


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
    """Return the schema of a component's arguments: as the signature has them, and their defaults.

    Those that the component is offered have the default ``...``.
    """
    taken = what_it_takes(target, with_cfg="cfg" in slot.offers) or Taken(any_keyword=True)
    cfg_first = taken.positions[:1] == ["cfg"] and "cfg" in taken.required
    given = {"cfg", *taken.positions[cfg_first:][: slot.positional]}
    properties: dict[str, Any] = {}
    for name, one in taken.keywords.items():
        if name in given:
            continue
        shown = one.replace(default=...) if name in slot.offers and one.default is one.empty else one
        properties[name] = {"title": str(shown).replace("Ellipsis", "...")}
        with suppress(TypeError, ValueError):  # not plain data
            json.dumps(one.default, allow_nan=False)
            properties[name]["default"] = one.default
    return {"type": "object", "properties": properties, "additionalProperties": taken.any_keyword}


def _summary(target: Any) -> str:
    """Return the first sentence of a docstring, on one line, without markup; empty if there is none."""
    return _first_sentence(inspect.cleandoc(getattr(target, "__doc__", None) or "").split("\n\n")[0])


def _first_sentence(text: str) -> str:
    text = " ".join(re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("``", "").split())
    return re.split(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)\s|::", text, maxsplit=1)[0]


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


# ---------------------------------------------------------------------- texts


def explain(name: str, width: int = 80) -> str:
    """Return what a key of the config means, or what a registered component takes.

    Args:
        name: a full key such as ``"SOLVER.BASE_LR"``, a section, or a component such as ``"EMA"``. Empty: all keys.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is neither a key nor a component of that name; the message suggests the nearest.
    """
    schema, wanted = schema_of_configs(), name.strip().strip(".")
    keys = {"": schema, **dict(_keys(schema))}
    key = next((key for key in keys if key.upper() == wanted.upper()), None)
    if key is not None:
        return _wrapped(_about_key(key, keys[key]), width)
    components = [(slot, one, target) for slot in _slots().values() for one, target in slot.registry]
    owners = [owner for owner in components if owner[1] == wanted]
    if owners:
        return "\n\n".join(_about_component(*owner, width) for owner in owners)
    hint = suggest(name, [*keys, *(one for _, one, _ in components)])
    raise UnknownKeyError(f"there is no config key '{name}'{hint or '.'} All keys: hookline config explain")


def list_registries(width: int = 80) -> str:
    """Return a line for each registry: how many components it has, and the keys that name them."""
    lines = []
    for label, one in _slots().items():
        named_by = ", ".join(slot.key for slot in SLOTS if slot.registry is one.registry)
        lines.append(f"{label:<14}{len(list(one.registry)):>3}  {named_by}")
    return _wrapped(lines, width)


def list_components(registry: str, width: int = 80) -> str:
    """Return the components of a registry, each with the first sentence of its docstring.

    Args:
        registry: such as ``"MODEL"``, ``"model"``, ``"models"`` or ``"MODEL_REGISTRY"``.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is no such registry; the message lists all.
    """
    known = _slots()
    wanted = registry.upper().replace("-", "_").removesuffix("_REGISTRY")
    label = next((one for one in (wanted, wanted[:-1], wanted[:-2]) if one in known), None)
    if label is None:
        hint = suggest(wanted, known) or "."
        raise UnknownKeyError(f"there is no registry '{registry}'{hint} Known: {', '.join(known)}")
    lines = [f"{name}: {_summary(target)}" for name, target in sorted(known[label].registry)]
    return _wrapped([*lines, "Arguments: hookline config explain NAME"], width)


def _slots() -> dict[str, Slot]:
    """Return a slot of each registry, by the registry's name."""
    return {slot.registry._name: slot for slot in SLOTS}


def _keys(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys below a section with their schemas."""
    for name, one in schema["properties"].items():
        if name != BASE_KEY and ("default" in one or "properties" in one):
            yield f"{path}{name}", one
            yield from _keys(one, f"{path}{name}.") if "default" not in one else ()


def _about_key(key: str, schema: Mapping[str, Any]) -> Iterator[str]:
    comment = schema.get("description", "")
    if schema.get("properties"):
        if comment:
            yield f"{key}: {comment}"
        for name, one in schema["properties"].items():
            if name != BASE_KEY:
                yield f"{key}.{name} ".lstrip(".") + (_text(one["default"]) if "default" in one else "...")
                if one["description"] not in ("", comment):
                    yield f"  {_first_sentence(one['description'])}"
        return
    yield from (key, f"  {comment}")
    if "default" in schema:
        yield from (f"  default: {_text(schema['default'])}", f"  type: {schema['title']}")
    for slot in SLOTS:
        if slot.key == key:
            yield f"  names: {', '.join(sorted(name for name, _ in slot.registry))}; or package.module:Name"
            yield f"  details: hookline config list {slot.registry._name.lower()}"
    if key.endswith("ARGS"):
        yield "  details: hookline config explain NAME, such as AdamW"


def _about_component(slot: Slot, name: str, target: Any, width: int) -> str:
    """Return the arguments of a component, and its docstring."""
    arguments = _arguments(slot, target)["properties"].values()
    lines = [f"{name}: {slot.registry._name.lower().replace('_', ' ')}", *(f"  {one['title']}" for one in arguments)]
    text = textwrap.indent(inspect.getdoc(target) or "", "  ")
    return f"{_wrapped(lines, width)}\n\n{text}".rstrip()


def _wrapped(lines: Iterable[str], width: int) -> str:
    """Return the lines, each wrapped, without those that are empty."""
    wrapped: list[str] = []
    for line in filter(str.strip, lines):
        indent = " " * (len(line) - len(line.lstrip()) or 4)
        wrapped += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped)
