"""Texts of ``hookline config``: what a key means, and what registered components take."""

import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from functools import reduce
from operator import getitem
from typing import Any

from . import defaults
from .duration import _FORMS, _LENGTH_FORMS, _TIME_FORMS, Duration
from .errors import UnknownKeyError, suggest
from .node import CfgNode
from .signatures import Taken, what_it_takes
from .slots import Slot
from .values import OneOf, Typed

__all__ = [
    "described_arguments",
    "explain",
    "key_comments",
    "list_components",
    "list_registries",
    "settable",
    "summary",
]

_KEY = re.compile(r"_C\.([A-Z][A-Z0-9_.]*) = ")
_DURATIONS = {
    Duration.parse: _FORMS,
    Duration.parse_length: _LENGTH_FORMS,
    Duration.parse_lengths: f"a list, each {_LENGTH_FORMS}",
    Duration.parse_part: f"{_LENGTH_FORMS}, or a fraction of the run",
    Duration.parse_time: _TIME_FORMS,
}


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


def settable(slot: Slot, target: Any) -> Taken:
    """Return the arguments that a config may set for a component. Those that it is offered have a default: ``...``."""
    taken = what_it_takes(target, with_cfg="cfg" in slot.offers) or Taken(any_keyword=True)
    cfg_first = taken.positions[:1] == ["cfg"] and "cfg" in taken.required
    given = {"cfg", *taken.positions[cfg_first:][: slot.positional]}
    taken.keywords = {
        name: one.replace(default=...) if name in slot.offers and one.default is one.empty else one
        for name, one in taken.keywords.items()
        if name not in given
    }
    return taken


def summary(target: Any) -> str:
    """Return the first sentence of a docstring, on one line, without markup; empty if there is none."""
    return _first_sentence(inspect.cleandoc(getattr(target, "__doc__", None) or "").split("\n\n")[0])


def described_arguments(target: Any) -> dict[str, str]:
    """Return the first sentence about each argument in the section ``Args:`` of a docstring."""
    found: dict[str, str] = {}
    for documented in (target, getattr(target, "__init__", None)):
        section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.getdoc(documented) or "", re.MULTILINE)
        for name, text in re.findall(r"^    (\w+).*?: (.*(?:\n {6,}.*)*)", section[1] if section else "", re.MULTILINE):
            found.setdefault(name, _first_sentence(text))
    return found


def _first_sentence(text: str) -> str:
    text = " ".join(re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("``", "").split())
    return re.split(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)\s|::", text, maxsplit=1)[0]


def explain(name: str, slots: Collection[Slot], width: int = 80) -> str:
    """Return what a key of the config means, or what a registered component takes.

    Args:
        name: a full key such as ``"SOLVER.BASE_LR"``, a section, or a component such as ``"EMA"``. Empty: all keys.
        slots: the keys that name components.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is neither a key nor a component of that name; the message suggests the nearest.
    """
    cfg, wanted = defaults.get_cfg(), name.strip().strip(".")
    keys = {key.upper(): key for key in ["", *cfg.full_keys()]}
    if wanted.upper() in keys:
        return _wrapped(_key(cfg, keys[wanted.upper()], slots), width)
    owners = [slot for slot in _by_label(slots).values() if wanted in slot.registry]
    if owners:
        return "\n\n".join(_wrapped(_component(slot, wanted), width) for slot in owners)
    known = [*keys.values(), *(one for slot in slots for one, _ in slot.registry)]
    raise UnknownKeyError(
        f"there is no config key '{name}'{suggest(name, known) or '.'} All keys: hookline config explain"
    )


def list_registries(slots: Collection[Slot], width: int = 80) -> str:
    """Return a line for each registry: how many components it has, and the keys that name them."""
    lines = []
    for label, one in _by_label(slots).items():
        named_by = ", ".join(slot.key for slot in slots if slot.registry is one.registry)
        lines.append(f"{label:<14}{len(list(one.registry)):>3}  {named_by}")
    return _wrapped(lines, width)


def list_components(registry: str, slots: Collection[Slot], width: int = 80) -> str:
    """Return the components of a registry, each with its arguments and the first sentence of its docstring.

    Args:
        registry: such as ``"MODEL"``, ``"model"``, ``"models"`` or ``"MODEL_REGISTRY"``.
        slots: the keys that name components.
        width: columns of the text.

    Raises:
        UnknownKeyError: there is no such registry; the message lists all.
    """
    labels = _by_label(slots)
    wanted = registry.upper().replace("-", "_").removesuffix("_REGISTRY")
    slot = next((labels[one] for one in (wanted, wanted[:-1], wanted[:-2]) if one in labels), None)
    if slot is None:
        raise UnknownKeyError(
            f"there is no registry '{registry}'{suggest(wanted, labels) or '.'} Known: {', '.join(labels)}"
        )
    lines = []
    for name, target in sorted(slot.registry):
        taken = settable(slot, target)
        shown = [_shown(one.replace(annotation=one.empty)) for one in taken.keywords.values()]
        lines += [f"{name}({', '.join(shown + ['**kwargs'] * taken.any_keyword)})", f"  {summary(target)}"]
    return _wrapped(lines, width)


def _by_label(slots: Collection[Slot]) -> dict[str, Slot]:
    return {slot.registry._name: slot for slot in slots}


def _key(cfg: CfgNode, key: str, slots: Collection[Slot]) -> Iterator[str]:
    comments = key_comments()
    comment = comments.get(key, "")
    *parents, last = key.split(".")
    parent = reduce(getitem, parents, cfg)
    value = parent[last] if key else cfg
    if isinstance(value, CfgNode) and value:
        if comment:
            yield f"{key}: {comment}"
        for name, below in value.items():
            full = f"{key}.{name}".lstrip(".")
            yield f"{full} {'...' if isinstance(below, CfgNode) else _text(below)}"
            if comments.get(full, comment) != comment:
                yield f"  {_first_sentence(comments[full])}"
        return
    yield from (key, f"  {comment}")
    if not isinstance(value, CfgNode):
        yield from (f"  default: {_text(value)}", f"  type: {_kind(value, parent.declared(last))}")
    for slot in slots:
        if slot.key == key:
            yield f"  names: {', '.join(sorted(name for name, _ in slot.registry))}; or package.module:Name"
            yield f"  details: hookline config list {slot.registry._name.lower()}"
    if key.endswith("ARGS"):
        yield "  details: hookline config explain NAME, such as AdamW"


def _kind(value: Any, declared: Typed | None) -> str:
    """Return the values that a key takes, in words."""
    declared = declared or Typed(value, type(value))
    if isinstance(declared.kind, OneOf):
        return ", ".join(map(_text, declared.kind.choices))
    limits = [f"at least {declared.least}"] * (declared.least is not None)
    limits += [f"at most {declared.most}"] * (declared.most is not None and declared.most < 10**9)
    text = ", ".join([_DURATIONS.get(declared.kind) or declared.type.__name__, *limits])
    return f"{text} or None" if declared.optional or declared.default is None else text


def _component(slot: Slot, name: str) -> Iterator[str]:
    target = slot.registry.get(name)
    taken, described = settable(slot, target), described_arguments(target)
    yield from (f"{name}: {slot.registry._name.lower().replace('_', ' ')}", f"  {summary(target)}")
    for argument, parameter in taken.keywords.items():
        yield from (f"  {_shown(parameter)}", f"      {described.get(argument, '')}")


def _shown(parameter: inspect.Parameter) -> str:
    return str(parameter).replace("Ellipsis", "...")


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _wrapped(lines: Any, width: int) -> str:
    """Return the lines, each wrapped, without those that are empty."""
    wrapped: list[str] = []
    for line in filter(str.strip, lines):
        indent = " " * (len(line) - len(line.lstrip()) or 4)
        wrapped += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped)
