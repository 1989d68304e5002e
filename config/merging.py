"""Merging into a config tree. All problems are reported together; the tree is then unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .components import args_key
from .errors import ConfigError, UnknownKeyError, suggest
from .values import MISSING, Plain, coerce, literal
from .yaml_files import BASE_KEY

logger = logging.getLogger(__name__)

_ASSIGNMENT = re.compile(r"[A-Za-z_][^\s=]*=")


class Merge:
    """Merges values into a tree, and collects the problems. See :func:`merging`.

    A new name of a component (see :mod:`~hookline.config.components`) clears its arguments. Names are therefore merged
    first within one mapping or list.

    Args:
        root: a :class:`~hookline.config.CfgNode`; full keys are relative to it.
        source: where the values come from, the prefix of messages. May change during the merge.
    """

    def __init__(self, root: Any, source: str = "") -> None:
        self.source = source
        self.problems: list[ConfigError] = []
        self.keeps_sections = False  # whether an empty section changes nothing also where a key takes any value
        self._root = root

    def mapping(self, node: Any, values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> None:
        """Merge nested keys and values into a node of the tree; ``path`` are the parts of its full key."""
        for key in sorted(values, key=_names_first):
            self._item(node, key, values[key], path)

    def overrides(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Merge pairs of full key and value, in order, names of components first."""
        for full_key, value in sorted(pairs, key=lambda pair: _names_first(pair[0].rpartition(".")[2])):
            first, *rest = full_key.split(".")
            if "" in (first, *rest):
                self._fail(f"'{full_key}' is not a key")
                continue
            for name in reversed(rest):
                value = {name: value}
            self._item(self._root, first, value, ())

    def _item(self, node: Any, key: Any, value: Any, path: tuple[str, ...]) -> None:
        full_key = ".".join((*path, str(key)))
        if not isinstance(key, str):
            return self._fail(f"the key {full_key} is not a string; quote it")
        if key == BASE_KEY:
            return self._fail(f"{full_key} can only stand at the top of a file", UnknownKeyError)
        if not node.has(key):
            if self._is_outdated(full_key):
                return None
            if not node.is_new_allowed():
                return self._unknown(full_key, value)
        section, is_free = _as_section(value), node.takes_anything(key)
        if section is not None and node.is_section(key):
            return self.mapping(node[key], section, (*path, key))
        if node.is_frozen():
            raise AttributeError(f"{full_key} cannot be merged: the config is frozen (defrost() it, or clone it first)")
        if section is not None and is_free:
            node.put(key, type(node)(new_allowed=True))
            return self.mapping(node[key], section, (*path, key))
        is_name = isinstance(value, str) and node.takes_name(key)
        if node.is_section(key) and not is_name and not (is_free and not self.keeps_sections):
            if value is None:
                where = f"{self.source}: " if self.source else ""
                return logger.warning("%sthe section %s is empty, so it changes nothing", where, full_key)
            hint = f"; set {full_key}.NAME" if node[key].has("NAME") else ""
            kind = "str" if isinstance(value, str) else type(value).__name__
            return self._fail(f"{full_key}: expected a mapping of keys, got {value!r} ({kind}){hint}")
        expected = object if is_free else str if is_name else type(node.get(key))
        try:
            value = coerce(value, node.declared(key), expected)
        except ConfigError as error:
            return self._fail(f"{full_key}: {error}")
        arguments = args_key(key)
        is_other = arguments and key in node and value != node[key]
        if is_other and node.is_section(arguments) and node[arguments].is_new_allowed():
            node[arguments].clear()
        node.put(key, value)

    def _unknown(self, full_key: str, value: Any) -> None:
        if isinstance(value, Mapping) and len(value) == 1:  # name the whole key of an override
            ((name, below),) = value.items()
            if not self._is_outdated(f"{full_key}.{name}"):
                self._unknown(f"{full_key}.{name}", below)
            return
        known = self._root.full_keys()
        section, _, last = full_key.rpartition(".")
        ends = [key for key in known if section and key.startswith(f"{section}.") and key.endswith(f"_{last}")]
        hint = f"; did you mean '{ends[0]}'?" if len(ends) == 1 else suggest(full_key, known)  # LR means BASE_LR
        if full_key in known:
            hint = "; write it nested, one section in the other"
        self._fail(f"unknown key '{full_key}'{hint}", UnknownKeyError)

    def _is_outdated(self, full_key: str) -> bool:
        """Whether a key is renamed (an error) or deprecated (a warning)."""
        state = vars(self._root)
        if new := state[self._root.RENAMED_KEYS].get(full_key):
            name, note = new if isinstance(new, tuple) else (new, "")
            self._fail(f"{full_key} was renamed to {name}" + (f": {note}" if note else ""), UnknownKeyError)
        elif full_key in state[self._root.DEPRECATED_KEYS]:
            logger.warning("The config key %s is deprecated: it is ignored.", full_key)
        else:
            return False
        return True

    def _fail(self, problem: str, kind: type[ConfigError] = ConfigError) -> None:
        self.problems.append(kind(f"{self.source}: {problem}" if self.source else problem))


@contextmanager
def merging(root: Any, source: str = "") -> Iterator[Merge]:
    """Merge into a tree, all or nothing.

    At the end of the block, all problems are raised together. After any error, the tree is as it was.
    """
    before = [(node, dict(node), node.declarations.copy()) for node in root.walk()]
    merge = Merge(root, source)
    try:
        yield merge
        if len(merge.problems) == 1:
            raise merge.problems[0]
        if merge.problems:
            all_unknown = all(isinstance(problem, UnknownKeyError) for problem in merge.problems)
            raise (UnknownKeyError if all_unknown else ConfigError)("\n".join(map(str, merge.problems)))
    except BaseException:
        for node, items, declarations in before:
            dict.clear(node)
            dict.update(node, items)
            node.declarations.clear()
            node.declarations.update(declarations)
        raise


def pairs_of(overrides: Sequence[Any]) -> list[tuple[str, Any]]:
    """Split a list of overrides into pairs.

    Args:
        overrides: ``KEY, VALUE, ...`` or ``"KEY=VALUE"``, mixed.

    Returns:
        Pairs of full key and value.

    Raises:
        ConfigError: a key is not a string, or the last one has no value.
    """
    pairs: list[tuple[str, Any]] = []
    tokens = iter(overrides)
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(f"command line: expected a key, got {token!r}; give pairs KEY VALUE, or KEY=VALUE")
        key, value = token.split("=", 1) if _ASSIGNMENT.match(token) else (token, next(tokens, MISSING))
        if value is MISSING:
            raise ConfigError(f"command line: '{key}' at the end has no value; give pairs KEY VALUE, or KEY=VALUE")
        pairs.append((key, Plain(value) if isinstance(value, str) else value))
    return pairs


def _names_first(key: Any) -> bool:
    return not (isinstance(key, str) and args_key(key))


def _as_section(value: Any) -> Mapping[str, Any] | None:
    """The value as a mapping with string keys, or None. Text such as ``{a: 1}`` is parsed."""
    if type(value) is Plain and value.startswith("{"):
        value = literal(value)
    is_section = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return value if is_section else None
