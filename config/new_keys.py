"""Keys that code sets on a config of ``get_cfg()``: new ones, misspelt ones, and detectron2's names of other keys.

A project may add keys anywhere, as in detectron2: ``cfg.MY = CfgNode()``, ``cfg.SOLVER.MY_KEY = 3``. A new key whose
name is almost that of a default key beside it is a typing error. Sections that a project makes itself are not checked.
"""

from __future__ import annotations

import logging
from functools import reduce
from operator import getitem
from typing import Any

from .errors import ConfigError, UnknownKeyError, misspelt

__all__ = [
    "check_new_key",
    "complete_section",
    "declare_defaults",
    "hint_of_own_section",
    "link_renamed",
    "renamed_key",
    "takes_name",
]

Node = Any
"""A :class:`~hookline.config.CfgNode`; that module imports this one."""

logger = logging.getLogger(__name__)

# Attributes of nodes, beside yacs's own. The first one: the full key of a section of the default config.
_SECTION = "__section__"
# Old names of keys: {old name: (the node with the key, or None for the same node; its name there)}.
_RENAMED = "__renamed__"

# Keys that mean something only within their section.
_GENERAL = frozenset(
    ("NAME", "ARGS", "ENABLED", "METRIC", "MODE", "PERIOD", "KEEP", "TARGET", "TRAIN", "TEST", "INPUTS")
)

_NAMED_SECTIONS = frozenset(("SOLVER.OPTIMIZER", "TEST.EVALUATOR"))

_defaults: Node = None
_noted: set[str] = set()


def declare_defaults(root: Node) -> None:
    """Declare a tree as the default config: keys that are set on it or on its copies are checked.

    Args:
        root: the tree, with all keys, and its renamed keys registered.
    """
    global _defaults
    _defaults = root.clone()
    for section, node in _sections(root):
        node.__dict__[_SECTION] = section
    link_renamed(root)


def link_renamed(root: Node) -> None:
    """Make renamed keys of a default config readable and settable under their old names, in the sections they had.

    Does nothing for other nodes.
    """
    if root.__dict__.get(_SECTION) != "":
        return
    for old, new in root.__dict__[root.RENAMED_KEYS].items():
        *old_section, old_name = old.split(".")
        *new_section, new_name = (new[0] if isinstance(new, tuple) else new).split(".")
        node = reduce(getitem, old_section, root)
        other = None if old_section == new_section else reduce(getitem, new_section, root)
        node.__dict__.setdefault(_RENAMED, {})[old_name] = (other, new_name)


def renamed_key(node: Node, key: Any, note: bool = False) -> tuple[Node, str] | None:
    """Return where a key is now: a node and the key's name in it; None if ``key`` is not an old name.

    Args:
        node: the node that had the key.
        key: the name.
        note: log once that the key has another name.
    """
    places = node.__dict__.get(_RENAMED)
    if not places or key not in places:
        return None
    other, name = places[key]
    other = node if other is None else other
    if note and key not in _noted:
        _noted.add(key)
        old, new = _full(node, key), _full(other, name)
        logger.warning("The config key %s is %s here: that key is set. Please use the new name.", old, new)
    return other, name


def check_new_key(node: Node, key: Any, value: Any) -> None:
    """Check a key that a node does not have and that is set in it.

    Args:
        node: any node.
        key: the new key.
        value: its value. A new section is not checked.

    Raises:
        UnknownKeyError: the key is almost a default key of the node's section.
    """
    section = node.__dict__.get(_SECTION)
    if section is None or node.is_new_allowed() or _is_node(value) or not isinstance(key, str):
        return
    beside = reduce(getitem, section.split("."), _defaults) if section else _defaults
    if near := misspelt(key, beside):
        where = f"cfg.{section}" if section else "cfg"
        raise UnknownKeyError(
            f"unknown key '{_full(node, key)}'; did you mean '{_full(node, near)}'? If it is a key of your own, call "
            f"{where}.set_new_allowed(True) before you set it"
        )
    others = [known for known in _defaults.full_keys() if known.rpartition(".")[2] == key and key not in _GENERAL]
    if others:
        logger.warning(
            "%s is a new key, which only your own code can read. Did you mean %s?", _full(node, key), others[0]
        )


def hint_of_own_section(node: Node, name: str) -> str:
    """Return how to add a section, if a missing key of the default config may be one, such as detectron2's INPUT."""
    section = node.__dict__.get(_SECTION)
    if section is None or not name.isupper() or misspelt(name, node):
        return ""
    return f"If it is a section of your own, add it first: cfg.{_full(node, name)} = CfgNode(new_allowed=True)"


def takes_name(node: Node, key: str) -> bool:
    """Whether a section may be set to the name of its component, as detectron2's projects do."""
    return f"{node.__dict__.get(_SECTION)}.{key}" in _NAMED_SECTIONS


def complete_section(node: Node, key: Any, value: Any) -> None:
    """Add the default keys to a section that replaces a default section.

    Args:
        node: any node.
        key: a key that it has.
        value: the new value; a node is changed.

    Raises:
        ConfigError: the key is a section, and the value is not one.
    """
    section = node.__dict__.get(_SECTION)
    if section is None:
        return
    full_key = _full(node, key)
    default: Node = reduce(getitem, full_key.split("."), _defaults) if full_key in _defaults.full_keys() else None
    if not _is_node(default):
        return
    if not _is_node(value):
        if takes_name(node, key) and isinstance(value, str):
            return
        keys = ", ".join(f"{full_key}.{name}" for name in default)
        raise ConfigError(f"{full_key} is a section, and cannot be {value!r}; set {keys or 'keys in it'}")
    if default.is_new_allowed():
        value.set_new_allowed(True)
        return
    for name, item in default.clone().items():
        declared = default.declared(name)
        if declared is not None:
            value._declarations[name] = declared
        value[name] = value.get(name, item)
    for below, part in _sections(value, full_key):
        if below in _defaults.full_keys():
            part.__dict__[_SECTION] = below


def _sections(node: Node, section: str = "") -> list[tuple[str, Node]]:
    """A node and the nodes below it that do not take any key, each with its full key."""
    found = [(section, node)]
    for key, value in node.items():
        if _is_node(value) and not value.is_new_allowed():
            found += _sections(value, f"{section}.{key}" if section else key)
    return found


def _is_node(value: Any) -> bool:
    return isinstance(value, dict)


def _full(node: Node, key: str) -> str:
    section = node.__dict__.get(_SECTION)
    return f"{section}.{key}" if section else key
