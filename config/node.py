"""The config tree."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import IO, Any

from yacs.config import CfgNode as _YacsCfgNode

from .components import components
from .errors import ConfigError, UnknownKeyError, suggest
from .frozen import FrozenList, frozen, thawed
from .kinds import Typed, one_of
from .literals import clean, expanded
from .merging import Merge, merge_mappings, pairs_of
from .new_keys import check_new_key, complete_section, hint_of_own_section, link_renamed, renamed_key
from .objects import ObjectName
from .tree import MISSING, ConfigTree
from .yaml_files import load_layers, load_text, refuse_python

__all__ = ["MISSING", "CfgNode", "Typed", "components", "global_cfg", "one_of", "set_global_cfg"]

logger = logging.getLogger(__name__)

_LEAF_TYPES = (type(None), bool, int, float, str, list, tuple, FrozenList)
_HOW = 'Name a class or function as "module:Name"; Trainer(...) of hookline.engine takes objects'
# The attribute with the declared type of each key, beside yacs's own attributes.
_DECLARED = "__declared__"
# Declared for keys that merges may set to any value.
_FREE = Typed(None, object)


class CfgNode(ConfigTree):
    """A tree of settings: yacs's node with strict checks.

    - An unknown key is an error that suggests the nearest key. A value of the wrong type is an error that names the
      expected type. A merge reports all errors together, and then changes nothing.
    - Files are safe YAML with ``_BASE_``. Loading a file executes nothing. Running it does: it names modules to import
      and functions to call.
    - A frozen tree cannot be changed in any way, its lists included.
    - Setting another ``NAME`` of a component clears its ``ARGS``.
    - Code may add keys to a config of ``get_cfg()``, unless a name looks like a typing error (``new_keys.py``).

    A key takes values of the type of its default (also an int for a float, a list for a tuple). :class:`Typed`
    declares other types. A key whose default is None takes any value, and so do keys that merges add to a node made
    with ``new_allowed``.

    Args:
        init_dict: nested keys and values.
        key_list: the parts of the node's full key, for error messages.
        new_allowed: whether merges may add keys to the node.
    """

    def __init__(
        self,
        init_dict: Mapping[str, Any] | None = None,
        key_list: Sequence[str] | None = None,
        new_allowed: bool = False,
    ) -> None:
        super().__init__(init_dict, list(key_list or ()), new_allowed)
        self.__dict__[_DECLARED] = {}

    @classmethod
    def _create_config_tree_from_dict(cls, dic: Mapping[str, Any], key_list: list[str]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, value in dic.items():
            path = [*key_list, str(key)]
            if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
                tree[key] = cls(value, key_list=path)
                continue
            try:
                tree[key] = clean(value)
            except ConfigError as error:
                raise ConfigError(f"{'.'.join(path)}: {error}") from None
        return tree

    # ------------------------------------------------------------------ reading and writing keys

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        # Copying, pickling and displaying look up many private names: no suggestions for these.
        hint = "" if name.startswith("_") else suggest(name, self.full_keys())
        if own := hint_of_own_section(self, name):
            hint = f"{hint or '.'} {own}"
        raise AttributeError(f"the config has no key '{name}' here{hint}" if hint else f"no config key '{name}' here")

    def __contains__(self, key: Any) -> bool:
        return self.has(key) or renamed_key(self, key) is not None

    def has(self, key: Any) -> bool:
        """Whether the node has a key under this very name. ``key in node`` finds renamed keys too."""
        return dict.__contains__(self, key)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise ConfigError(f"'{name}' is internal state of the config, not a key")
        if not name.startswith("COMPUTED_"):
            self._check_mutable(name)
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if type(value) not in _LEAF_TYPES and not isinstance(value, (_YacsCfgNode, Typed, ObjectName)):
                raise ConfigError(
                    f"{name}: a config cannot hold a {type(value).__name__}; it holds None, bool, int, float, str, "
                    "list, tuple and CfgNode. " + _HOW
                )
        self[name] = value

    def __missing__(self, key: Any) -> Any:
        place = renamed_key(self, key)
        if place is None:
            raise KeyError(key)
        node, name = place
        return node[name]

    def __delattr__(self, name: str) -> None:
        if not self.has(name):
            raise AttributeError(f"no config key '{name}' here")
        del self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(key, str) and key.startswith("COMPUTED_"):
            self._set_computed(key, value)
            return
        place = renamed_key(self, key, note=True)
        if place is not None:
            node, key = place
            node[key] = value
            return
        self._check_mutable(key)
        if not self.has(key):
            check_new_key(self, key, value)
        declared, value = self.declared(key), expanded(thawed(value))
        if isinstance(value, Typed):
            declared, value = value, copy.deepcopy(value.default)
        if declared is not None:
            try:
                value = declared.check(value)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
            self._declarations[key] = declared
        if isinstance(value, _YacsCfgNode) and not isinstance(value, CfgNode):
            value = type(self)(value, new_allowed=value.is_new_allowed())
        replaces = self.has(key)
        if replaces and type(value) is dict and self.is_section(key):
            value = type(self)(value)
        if replaces:
            complete_section(self, key, value)
        super().__setitem__(key, value)
        if replaces and isinstance(value, CfgNode):
            link_renamed(self)

    def _set_computed(self, key: str, value: Any) -> None:
        """Set a ``COMPUTED_`` key: as in fvcore, allowed once, also in a frozen config."""
        if key not in self:
            super().__setitem__(key, value)
        elif self[key] != value:
            raise KeyError(f"{key} is already computed as {self[key]!r}; it cannot be set to {value!r}")

    def __delitem__(self, key: str) -> None:
        self._check_mutable(key)
        super().__delitem__(key)
        self._declarations.pop(key, None)

    # dict's own methods would bypass __setitem__ and __delitem__.
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    clear = MutableMapping.clear

    def get(self, key: Any, default: Any = None) -> Any:
        """As ``dict.get``. Finds renamed keys too."""
        return self[key] if self.has(key) or renamed_key(self, key) else default

    def popitem(self) -> tuple[str, Any]:
        """As ``dict.popitem``."""
        if not self:
            raise KeyError("the config node is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def pop(self, key: str, *default: Any) -> Any:
        """As ``dict.pop``."""
        if not self.has(key) and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def __ior__(self, other: Any) -> CfgNode:
        self.update(other)
        return self

    def _check_mutable(self, key: Any) -> None:
        if self.is_frozen():
            raise AttributeError(f"{key} cannot be changed: the config is frozen (defrost() it, or clone it first)")

    # ------------------------------------------------------------------ copies

    def is_frozen(self) -> bool:
        """Whether the node refuses changes."""
        # Items are set before the state while a node is unpickled.
        return bool(self.__dict__.get(self.IMMUTABLE, False))

    def _immutable(self, is_immutable: bool) -> None:
        super()._immutable(is_immutable)
        self._freeze_lists()

    def _freeze_lists(self) -> None:
        for key, value in self.items():
            new = frozen(value, key) if self.is_frozen() else thawed(value)
            if new is not value:
                dict.__setitem__(self, key, new)

    def __copy__(self) -> CfgNode:
        return self._copied(dict(self), copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> CfgNode:
        def copied(value: Any) -> Any:
            return copy.deepcopy(value, memo)

        return self._copied({key: copied(value) for key, value in self.items()}, copied)

    def _copied(self, items: dict[str, Any], copy_state: Any) -> CfgNode:
        node = type(self).__new__(type(self))
        dict.update(node, items)
        node.__dict__.update({name: copy_state(state) for name, state in self.__dict__.items()})
        node._freeze_lists()
        return node

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._freeze_lists()

    # ------------------------------------------------------------------ merging

    @classmethod
    def load_yaml_with_base(cls, filename: str | os.PathLike[str], allow_unsafe: bool = False) -> dict[str, Any]:
        """Read a YAML file, merged over the files in its ``_BASE_``.

        Args:
            filename: a path or URI.
            allow_unsafe: ignored; YAML is always loaded safely.

        Returns:
            Nested dicts.

        Raises:
            ConfigError: a file is missing or bad; see :meth:`merge_from_file`.
        """
        return merge_mappings(mapping for _, mapping in load_layers(filename, cls._open_cfg))

    def merge_from_file(self, cfg_filename: str | os.PathLike[str], allow_unsafe: bool = False) -> None:
        """Merge a YAML file, after the files in its ``_BASE_``.

        Args:
            cfg_filename: a path or URI.
            allow_unsafe: ignored; YAML is always loaded safely.

        Raises:
            UnknownKeyError: keys do not exist.
            ConfigError: a file is missing, not YAML, or bases form a circle; values do not fit their keys. The message
                has one line per problem, with the file. The config is then unchanged.
            AttributeError: the config is frozen.
        """
        layers = load_layers(cfg_filename, self._open_cfg)
        with Merge(self) as merge:
            for name, mapping in layers:
                merge.source = name
                merge.mapping(self, mapping)

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config.

        Args:
            cfg_other: a config node, or nested dicts.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        if not isinstance(cfg_other, Mapping):
            raise ConfigError(f"only a config or a mapping can be merged, not a {type(cfg_other).__name__}")
        with Merge(self) as merge:
            merge.mapping(self, cfg_other)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge overrides, such as those of a command line.

        Args:
            cfg_list: ``["SOLVER.BASE_LR", "0.1", "SEED=3"]``: keys and values in turn, or ``KEY=VALUE``. Strings are
                decoded (``"1e-3"``, ``"(1, 2)"``, ``"true"``) unless their key takes a string.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        pairs = pairs_of(cfg_list)
        with Merge(self, "command line") as merge:
            merge.overrides(pairs)

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: str | IO[str]) -> CfgNode:
        """Create a config from YAML.

        Args:
            cfg_file_obj_or_str: YAML text, or an open file with it.

        Returns:
            The config.

        Raises:
            ConfigError: it is not YAML with a mapping of plain data, or the file is a Python file.
        """
        if isinstance(cfg_file_obj_or_str, str):
            text, source = cfg_file_obj_or_str, "YAML text"
        elif hasattr(cfg_file_obj_or_str, "read"):
            source = str(getattr(cfg_file_obj_or_str, "name", "YAML file"))
            refuse_python(source)
            text = cfg_file_obj_or_str.read()
        else:
            raise ConfigError(f"expected YAML text or an open file, got a {type(cfg_file_obj_or_str).__name__}")
        return cls(load_text(text, source))

    def key_is_deprecated(self, full_key: str) -> bool:
        """Whether a key is registered as deprecated. Logs a warning if it is.

        Args:
            full_key: the key.
        """
        deprecated = full_key in self.__dict__[self.DEPRECATED_KEYS]
        if deprecated:
            logger.warning("The config key %s is deprecated: it is ignored.", full_key)
        return deprecated

    def raise_key_rename_error(self, full_key: str) -> None:
        """Raise the error for a renamed key.

        Args:
            full_key: the old name.

        Raises:
            UnknownKeyError: always.
        """
        renamed = self.__dict__[self.RENAMED_KEYS][full_key]
        new_name, note = renamed if isinstance(renamed, tuple) else (renamed, "")
        raise UnknownKeyError(f"{full_key} was renamed to {new_name}" + (f": {note}" if note else ""))

    # ------------------------------------------------------------------ used by Merge

    @property
    def _declarations(self) -> dict[str, Typed]:
        return self.__dict__.setdefault(_DECLARED, {})

    def declared(self, key: str) -> Typed | None:
        """The declared type of a key of this node, or None."""
        return self._declarations.get(key)

    def is_section(self, key: str) -> bool:
        """Whether a key of this node holds a node."""
        return isinstance(self.get(key), CfgNode)

    def takes_anything(self, key: str) -> bool:
        """Whether merges may set a key of this node to a value of any type."""
        if key in self._declarations:
            return self._declarations[key] == _FREE
        return self[key] is None if key in self else self.is_new_allowed()

    def new_section(self) -> CfgNode:
        """An empty node that takes any key."""
        return type(self)(new_allowed=True)

    def put(self, key: str, value: Any) -> None:
        """Set a key as a merge does: a key that takes any value continues to do so."""
        if self.takes_anything(key):
            self._declarations[key] = _FREE
        self[key] = value

    def content(self) -> tuple[dict[str, Any], dict[str, Typed]]:
        """All that a merge may change of this node itself, for :meth:`restore`."""
        return dict(self), dict(self._declarations)

    def restore(self, content: tuple[dict[str, Any], dict[str, Typed]]) -> None:
        """Undo all changes since :meth:`content`."""
        items, declarations = content
        dict.clear(self)
        dict.update(self, items)
        self.__dict__[_DECLARED] = declarations


#: A config for code that does not receive one, as in detectron2. :func:`set_global_cfg` fills it.
global_cfg = CfgNode()


def set_global_cfg(cfg: CfgNode) -> None:
    """Replace the content of :data:`global_cfg` by the values of ``cfg``.

    Args:
        cfg: a config.
    """
    global_cfg.clear()
    global_cfg.update(cfg)
