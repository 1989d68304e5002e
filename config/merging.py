"""Merging into a config tree. All problems are reported together; the tree is then unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .components import args_key
from .errors import ConfigError, UnknownKeyError, misspelt, suggest
from .kinds import coerce
from .literals import Plain, literal
from .new_keys import takes_name
from .other_names import key_for
from .yaml_files import BASE_KEY

logger = logging.getLogger(__name__)

Node = Any
"""A :class:`~hookline.config.CfgNode`; that module imports this one."""

_ASSIGNMENT = re.compile(r"[A-Za-z_][^\s=]*=")


class Merge:
    """One merge into a tree, all or nothing.

    Use it as a context manager. On exit, it restores the tree and raises all problems together, if there are any.

    A new name of a component (see :mod:`~hookline.config.components`) clears its arguments. Names are therefore merged
    first within one mapping or list.

    Args:
        root: the tree; full keys are relative to it.
        source: where the values come from, the prefix of messages. May change during the merge.
    """

    def __init__(self, root: Node, source: str = "") -> None:
        self.source = source
        self._root = root
        self._errors: list[ConfigError] = []
        self._snapshot = [(node, node.content()) for node in root.walk()]

    def __enter__(self) -> Merge:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None and not self._errors:
            return
        for node, content in self._snapshot:
            node.restore(content)
        if exc_type is None:
            self._raise()

    def mapping(self, node: Node, values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> None:
        """Merge a mapping into a node.

        Args:
            node: a node of the tree.
            values: keys and values, nested.
            path: the parts of the node's full key.
        """
        for key in sorted(values, key=_names_first):
            self._item(node, key, values[key], path)

    def overrides(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Merge values with full keys, in order, names of components first.

        Args:
            pairs: full keys and values.
        """
        for full_key, value in sorted(pairs, key=lambda pair: _names_first(pair[0].rpartition(".")[2])):
            self._override(full_key, value)

    def _override(self, full_key: str, value: Any) -> None:
        parts = tuple(full_key.split("."))
        if "" in parts:
            return self._fail(f"'{full_key}' is not a key")
        node = self._root
        for depth, part in enumerate(parts[:-1]):
            child = node.get(part)
            if node.is_section(part):
                node = child
            elif node.takes_anything(part):
                for name in reversed(parts[depth + 1 :]):
                    value = {name: value}
                return self._item(node, part, value, parts[:depth])
            else:
                return None if self._is_outdated(full_key) else self._unknown(full_key)
        self._item(node, parts[-1], value, parts[:-1])

    def _item(self, node: Node, key: Any, value: Any, path: tuple[str, ...]) -> None:
        full_key = ".".join((*path, str(key)))
        if not isinstance(key, str):
            return self._fail(f"the key {full_key} is not a string; quote it")
        if key == BASE_KEY:
            return self._fail(f"{full_key} can only stand at the top of a file", UnknownKeyError)
        if not node.has(key):
            if self._is_outdated(full_key):
                return None
            if not node.is_new_allowed():
                return self._unknown(full_key)
        section = _as_section(value)
        if section is not None and node.is_section(key):
            return self.mapping(node[key], section, (*path, key))
        if node.is_frozen():
            raise AttributeError(f"{full_key} cannot be merged: the config is frozen (defrost() it, or clone it first)")
        if section is not None and node.takes_anything(key):
            node.put(key, node.new_section())
            return self.mapping(node[key], section, (*path, key))
        if value is None and node.is_section(key) and not node.takes_anything(key):
            where = f"{self.source}: " if self.source else ""
            return logger.warning("%sthe section %s is empty, so it changes nothing", where, full_key)
        is_name = isinstance(value, str) and takes_name(node, key)
        if node.is_section(key) and not node.takes_anything(key) and not is_name:
            hint = f"; set {full_key}.NAME" if node[key].has("NAME") else ""
            return self._fail(f"{full_key}: expected a mapping of keys, got {value!r} ({_type_name(value)}){hint}")
        expected = object if node.takes_anything(key) else str if is_name else type(node.get(key))
        try:
            value = coerce(value, node.declared(key), expected)
        except ConfigError as error:
            return self._fail(f"{full_key}: {error}")
        arguments = args_key(key)
        is_other = arguments and key in node and value != node[key]
        if arguments and is_other and node.is_section(arguments) and node[arguments].is_new_allowed():
            node[arguments].clear()
        node.put(key, value)

    def _unknown(self, full_key: str) -> None:
        known = self._root.full_keys()
        section, _, last = full_key.rpartition(".")
        beside = [key for key in known if key.startswith(f"{section}.") and key.endswith(f"_{last}")]
        if full_key in known:
            hint = "; write it nested, one section in the other"
        elif misspelt(full_key, known):
            hint = suggest(full_key, known)
        elif other := key_for(full_key) or (beside[0] if section and len(beside) == 1 else ""):
            hint = f"; did you mean '{other}'?"
        else:
            hint = suggest(full_key, known)
        self._fail(f"unknown key '{full_key}'{hint}", UnknownKeyError)

    def _is_outdated(self, full_key: str) -> bool:
        """Whether a key is renamed (an error) or deprecated (a warning)."""
        if self._root.key_is_renamed(full_key):
            try:
                self._root.raise_key_rename_error(full_key)
            except UnknownKeyError as error:
                self._fail(str(error), UnknownKeyError)
            return True
        return self._root.key_is_deprecated(full_key)

    def _fail(self, problem: str, kind: type[ConfigError] = ConfigError) -> None:
        self._errors.append(kind(f"{self.source}: {problem}" if self.source else problem))

    def _raise(self) -> None:
        if len(self._errors) == 1:
            raise self._errors[0]
        all_unknown = all(isinstance(error, UnknownKeyError) for error in self._errors)
        raise (UnknownKeyError if all_unknown else ConfigError)("\n".join(map(str, self._errors)))


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
        if _ASSIGNMENT.match(token):
            key, _, value = token.partition("=")
        else:
            key = token
            try:
                value = next(tokens)
            except StopIteration:
                problem = f"'{token}' at the end has no value; give pairs KEY VALUE, or KEY=VALUE"
                raise ConfigError(f"command line: {problem}") from None
        pairs.append((key, Plain(value) if isinstance(value, str) else value))
    return pairs


def merge_mappings(layers: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Merge plain mappings, later over earlier, by the rules of a merge into a tree.

    Args:
        layers: nested mappings.

    Returns:
        A new nested dict; unquoted scalars stay text.
    """
    merged: dict[Any, Any] = {}
    for layer in layers:
        for key in sorted(layer, key=_names_first):
            value = layer[key]
            arguments = args_key(key) if isinstance(key, str) else None
            if arguments and merged.get(key, value) != value and isinstance(merged.get(arguments), dict):
                merged[arguments] = {}
            if isinstance(value, Mapping):
                below = merged.get(key)
                merged[key] = merge_mappings([below, value] if isinstance(below, dict) else [value])
            elif value is not None or not isinstance(merged.get(key), dict):  # an empty section changes nothing
                merged[key] = _text(value)
    return merged


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_text(item) for item in value]
    return str(value) if isinstance(value, Plain) else value


def _names_first(key: Any) -> bool:
    return not (isinstance(key, str) and args_key(key))


def _as_section(value: Any) -> Mapping[str, Any] | None:
    """The value as a mapping with string keys, or None. Text such as ``{a: 1}`` is parsed."""
    if type(value) is Plain and value.startswith("{"):
        value = literal(value)
    is_section = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return value if is_section else None


def _type_name(value: Any) -> str:
    return "str" if isinstance(value, str) else type(value).__name__
