"""The text of ``hookline config explain``: what keys mean, and what registered components take."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from hookline.config import CfgNode, Duration, Typed, UnknownKeyError, defaults, get_cfg, suggest
from hookline.config.components import ComponentKey
from hookline.config.duration import FORMS, LENGTH_FORMS, TIME_FORMS
from hookline.config.signatures import parameters_of
from hookline.config.values import OneOf
from hookline.engine.setup.check import COMPONENT_KEYS

_KEYS = [component_key for _, component_key in COMPONENT_KEYS]
_KEY = re.compile(r"_C\.([A-Z][A-Z0-9_.]*) = ")
_DURATIONS: dict[object, str] = {
    Duration.parse: FORMS,
    Duration.parse_length: LENGTH_FORMS,
    Duration.parse_lengths: f"a list, each {LENGTH_FORMS}",
    Duration.parse_part: f"{LENGTH_FORMS}, or a fraction of the run",
    Duration.parse_time: TIME_FORMS,
}


def explain(name: str) -> str:
    """Return what a key of the config means, or what a registered component takes.

    Args:
        name: a full key such as ``"SOLVER.BASE_LR"``, a section, or a component such as ``"EMA"``. Empty: all keys.

    Raises:
        UnknownKeyError: there is neither a key nor a component of that name; the message suggests the nearest.
    """
    cfg, wanted = get_cfg(), name.strip(".")
    keys = ["", *dict(cfg.walk())]
    for key in keys:
        if key.upper() == wanted.upper():
            return "\n".join(filter(str.strip, _about_key(cfg, key)))
    of_registries = {id(named_by.registry): named_by for named_by in _KEYS}.values()  # one of each registry
    components = [(named_by, one, target) for named_by in of_registries for one, target in named_by.registry]
    if texts := [_about_component(*component) for component in components if component[1] == wanted]:
        return "\n\n".join(texts)
    hint = suggest(name, [*keys, *(one for _, one, _ in components)])
    raise UnknownKeyError(f"there is no config key '{name}'{hint or '.'} All keys: hookline config explain")


def key_comments() -> dict[str, str]:
    """Return the comment of each key: the one above it, or above the first of the lines of keys that it is in."""
    comments: dict[str, str] = {}
    block: list[str] = []
    comment = ""
    for line in inspect.getsource(defaults).splitlines():
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


def _about_key(cfg: CfgNode, key: str) -> Iterator[str]:
    comments = key_comments()
    comment = comments.get(key, "")
    node: Any = cfg
    section, name = cfg, key
    for name in filter(None, key.split(".")):
        section, node = node, node[name]
    if isinstance(node, CfgNode) and node:
        if comment:
            yield f"{key}: {comment}"
        for child, value in node.items():
            full = f"{key}.{child}".lstrip(".")
            yield f"{full} {'...' if isinstance(value, CfgNode) else _text(value)}"
            if comments.get(full, "") not in ("", comment):
                yield f"  {_first_sentence(comments[full])}"
        return
    yield from (key, f"  {comment}")
    if not isinstance(node, CfgNode):
        yield f"  default: {_text(node)}"
        yield f"  type: {_type_text(section.typed(name))}"
    for named_by in _KEYS:
        if named_by.key == key:
            yield "  names (arguments: hookline config explain NAME), or package.module:Name of your own:"
            for component, target in sorted(named_by.registry):
                yield f"    {component}: {_first_sentence(target.__doc__ or '')}"


def _type_text(declared: Typed) -> str:
    """Return in words what a key takes."""
    if isinstance(declared.kind, OneOf):
        return ", ".join(map(_text, declared.kind.choices))
    text = _DURATIONS.get(declared.kind, declared.type.__name__)
    for words, limit in (("at least", declared.min), ("at most", declared.max)):
        if limit is not None and limit < 10**9:
            text += f", {words} {limit}"
    return f"{text} or None" if declared.optional or declared.default is None else text


def _about_component(named_by: ComponentKey, name: str, target: Callable[..., object]) -> str:
    """Return the arguments of a component that a config may set, and its docstring."""
    taken = parameters_of(target, with_cfg="cfg" in named_by.offers)
    positions = [one for one in taken.positions if one != "cfg"] if taken else []
    given = {"cfg", *positions[: named_by.positional]}
    arguments = [str(one) for one in taken.keywords.values() if one.name not in given] if taken else []
    lines = [f"{name}: {named_by.registry._name.lower().replace('_', ' ')}", *(f"  {one}" for one in arguments)]
    text = textwrap.indent(inspect.getdoc(target) or "", "  ")
    return "\n".join([*lines, "", text]).rstrip()


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or comment, on one line, without markup."""
    text = inspect.cleandoc(text).split("\n\n")[0]
    text = " ".join(re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("``", "").split())
    return re.split(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)\s|::", text, maxsplit=1)[0]


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
