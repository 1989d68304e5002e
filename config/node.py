"""The config tree. :func:`~hookline.config.yaml_files.merging` merges into it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from operator import getitem
from typing import IO, Any

from fvcore.common.config import CfgNode as _FvcoreCfgNode
from yacs.config import CfgNode as _YacsCfgNode

from .errors import ConfigError, UnknownKeyError, misspelt, suggest
from .values import MISSING, ObjectName, Typed, clean, expanded, same
from .yaml_files import dump_text, load_layers, load_text, merging, pairs_of

__all__ = ["CfgNode", "declare_defaults", "global_cfg", "set_global_cfg"]

logger = logging.getLogger(__name__)

_LEAF_TYPES = (type(None), bool, int, float, str, list, tuple)
# Attributes of nodes, beside yacs's own: the declared type of each key; the full key of a section of the default
# config; and old names of keys there, {old name: (the node with the key, or None for the same node; its name there)}.
_DECLARED, _SECTION, _RENAMED = "__declared__", "__section__", "__renamed__"
# Declared for keys that merges may set to any value.
_FREE = Typed(None, object)
# Keys that mean something only within their section.
_GENERAL = frozenset(
    ("NAME", "ARGS", "ENABLED", "METRIC", "MODE", "PERIOD", "KEEP", "TARGET", "TRAIN", "TEST", "INPUTS")
)
# Sections that may be set to the name of their component, as detectron2's projects do.
_NAMED_SECTIONS = ("SOLVER.OPTIMIZER", "TEST.EVALUATOR")

_defaults: Any = None
_noted: set[str] = set()


class CfgNode(_FvcoreCfgNode):
    """A tree of settings: yacs's node with strict checks.

    - An unknown key is an error that suggests the nearest key. A value of the wrong type is an error that names the
      expected type. A merge reports all errors together, and then changes nothing.
    - Files are safe YAML with ``_BASE_``. Loading a file executes nothing. Running it does: it names modules to import
      and functions to call.
    - A frozen tree refuses all changes of its keys. As in yacs, the content of a list is not protected.
    - Setting another ``NAME`` of a component clears its ``ARGS``.
    - Code may add keys anywhere to a config of ``get_cfg()``, as in detectron2: ``cfg.SOLVER.MY_KEY = 3``. A new key
      whose name is almost that of a default key beside it is a typing error. Sections that a project makes itself are
      not checked. Setting a default section sets the keys that the new section has.

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

    # ------------------------------------------------------------------ reading keys

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        # Copying, pickling and displaying look up many private names: no suggestions for these.
        hint = "" if name.startswith("_") else suggest(name, self.full_keys())
        raise AttributeError(f"the config has no key '{name}' here{hint}" if hint else f"no config key '{name}' here")

    def __contains__(self, key: Any) -> bool:
        return self.has(key) or key in self.__dict__.get(_RENAMED, ())

    def has(self, key: Any) -> bool:
        """Whether the node has a key under this very name. ``key in node`` finds renamed keys too."""
        return dict.__contains__(self, key)

    def __missing__(self, key: Any) -> Any:
        node, name = self._renamed(key)
        if node is None:
            raise KeyError(key)
        return node[name]

    def walk(self) -> Iterator[CfgNode]:
        """This node and all nodes below it."""
        yield self
        for value in self.values():
            if isinstance(value, CfgNode):
                yield from value.walk()

    def full_keys(self) -> list[str]:
        """The full keys of everything below this node, sections included."""
        keys = []
        for key, value in self.items():
            keys.append(str(key))
            if isinstance(value, CfgNode):
                keys += [f"{key}.{below}" for below in value.full_keys()]
        return keys

    def flatten(self) -> dict[str, Any]:
        """All values by their full keys, in order.

        Returns:
            ``{"SOLVER.BASE_LR": 0.1, ...}``; empty sections are left out.
        """
        flat: dict[str, Any] = {}
        for key, value in self.items():
            if isinstance(value, CfgNode):
                flat.update({f"{key}.{below}": leaf for below, leaf in value.flatten().items()})
            else:
                flat[str(key)] = value
        return flat

    def diff(self, other: CfgNode) -> dict[str, tuple[Any, Any]]:
        """Compare with another config, such as the defaults.

        Args:
            other: the config to compare with.

        Returns:
            ``{full key: (value in other, value here)}`` of keys that differ, in order; :data:`MISSING` if a side does
            not have the key.
        """
        old, new = other.flatten(), self.flatten()
        pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in [*new, *old]}
        return {key: pair for key, pair in pairs.items() if not same(*pair)}

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as nested dicts, a deep copy.

        Raises:
            ConfigError: a key holds something that a config file cannot; the message names it.
        """
        return self._exported(for_yaml=False)

    def dump(self, **kwargs: Any) -> str:
        """Return the tree as YAML. Merged into the defaults, it gives an equal tree. ``COMPUTED_`` keys are left out.

        Tuples are written as lists. Keys whose default is a tuple convert them back.

        Args:
            kwargs: options of ``yaml.dump``.

        Returns:
            The text.

        Raises:
            ConfigError: a key holds something that a config file cannot; the message names it.
        """
        return dump_text(self._exported(for_yaml=True), **kwargs)

    def _exported(self, for_yaml: bool, path: str = "") -> dict[str, Any]:
        exported: dict[str, Any] = {}
        for key, value in self.items():
            if for_yaml and str(key).startswith("COMPUTED_"):
                continue
            if isinstance(value, CfgNode):
                exported[key] = value._exported(for_yaml, f"{path}{key}.")
                continue
            try:
                exported[key] = clean(value)
            except ConfigError as error:
                raise ConfigError(f"{path}{key}: {error}") from None
        return exported

    # ------------------------------------------------------------------ setting keys

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise ConfigError(f"'{name}' is internal state of the config, not a key")
        if name.startswith("COMPUTED_"):
            return super().__setattr__(name, value)  # set once, also in a frozen config
        self._check_mutable(name)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = value.item() if getattr(value, "shape", None) == () else value  # a number of numpy
        if type(value) not in _LEAF_TYPES and not isinstance(value, (_YacsCfgNode, Typed, ObjectName)):
            raise ConfigError(
                f"{name}: a config cannot hold a {type(value).__name__}; it holds None, bool, int, float, str, list, "
                'tuple and CfgNode. Name a class or function as "module:Name"; Trainer(...) of hookline.engine takes '
                "objects"
            )
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if str(key).startswith("COMPUTED_"):
            return dict.__setitem__(self, key, value)
        node, name = self._renamed(key)
        if node is not None:
            if key not in _noted:
                _noted.add(key)
                old, new = self._full(key), node._full(name)
                logger.warning("The config key %s is %s here: that key is set. Please use the new name.", old, new)
            node[name] = value
            return
        self._check_mutable(key)
        replaces, declared, value = self.has(key), self.declared(key), expanded(value)
        if isinstance(value, Typed):
            declared, value = value, copy.deepcopy(value.default)
        if declared is not None:
            try:
                value = declared.check(value)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
            self.declarations[key] = declared
        if isinstance(value, _YacsCfgNode) and not isinstance(value, CfgNode):
            value = type(self)(value, new_allowed=value.is_new_allowed())
        if type(value) is dict and self.is_section(key):
            value = type(self)(value)
        is_name = isinstance(value, str) and self.takes_name(key)
        if self.is_section(key) and not is_name and isinstance(_default(self._full(key)), CfgNode) and self._is_default:
            value = self._new_section(key, value)
        elif self._is_default and not replaces and not self.is_new_allowed() and not isinstance(value, dict):
            self._check_new_key(str(key))
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        self._check_mutable(key)
        super().__delitem__(key)
        self.declarations.pop(key, None)

    def __delattr__(self, name: str) -> None:
        if not self.has(name):
            raise AttributeError(f"no config key '{name}' here")
        del self[name]

    # dict's own methods would bypass __setitem__, __delitem__ and renamed keys.
    popitem = MutableMapping.popitem
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    clear = MutableMapping.clear

    def get(self, key: Any, default: Any = None) -> Any:
        """As ``dict.get``. Finds renamed keys too."""
        return Mapping.get(self, key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As ``dict.pop``."""
        if default and not self.has(key):
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

    # ------------------------------------------------------------------ keys of the default config

    @property
    def _is_default(self) -> bool:
        """Whether the node is a section of a config of ``get_cfg()``."""
        return _SECTION in self.__dict__

    def _full(self, key: str) -> str:
        return f"{self.__dict__.get(_SECTION, '')}.{key}".lstrip(".")

    def _renamed(self, key: Any) -> tuple[Any, str]:
        """Where a renamed key is now: a node and the key's name in it; None if ``key`` is not an old name."""
        node, name = self.__dict__.get(_RENAMED, {}).get(key, (None, ""))
        return (self if name and node is None else node), name

    def takes_name(self, key: str) -> bool:
        """Whether a section may be set to the name of its component."""
        return self._full(key) in _NAMED_SECTIONS

    def _check_new_key(self, key: str) -> None:
        """Raise an error if a key that code adds is almost a default key of this section."""
        section = self.__dict__[_SECTION]
        if near := misspelt(key, _default(section)):
            where = f"cfg.{section}" if section else "cfg"
            raise UnknownKeyError(
                f"unknown key '{self._full(key)}'; did you mean '{self._full(near)}'? If it is a key of your own, call "
                f"{where}.set_new_allowed(True) before you set it"
            )
        others = [known for known in _defaults.full_keys() if known.endswith(f".{key}") and key not in _GENERAL]
        if others:
            logger.warning(
                "%s is a new key, which only your own code can read. Did you mean %s?", self._full(key), others[0]
            )

    def _new_section(self, key: str, value: Any) -> Any:
        """Return what a section becomes that code sets: a default section keeps the keys that ``value`` has not."""
        section, full_key = self[key], self._full(key)
        if not isinstance(value, CfgNode):
            keys = ", ".join(f"{full_key}.{name}" for name in section)
            raise ConfigError(f"{full_key} is a section, and cannot be {value!r}; set {keys or 'keys in it'}")
        if section._is_default:
            section.update(value)
            return section
        value.set_new_allowed(value.is_new_allowed() or section.is_new_allowed())
        return value

    def _sections(self, section: str = "") -> Iterator[tuple[str, CfgNode]]:
        """This node and the nodes below it that do not take any key, each with its full key."""
        yield section, self
        for key, value in self.items():
            if isinstance(value, CfgNode) and not value.is_new_allowed():
                yield from value._sections(f"{section}.{key}".lstrip("."))

    # ------------------------------------------------------------------ copies

    def thawed(self) -> Any:
        """Return a copy that can be changed, also of a frozen config."""
        copied = self.clone()
        copied.defrost()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:  # for copy, deepcopy and pickle
        return _rebuilt, (type(self), dict(self), {name: copy.copy(state) for name, state in self.__dict__.items()})

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
        root = cls(new_allowed=True)
        root.merge_from_file(filename)
        return root.to_dict()

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
        with merging(self) as merge:
            for merge.source, mapping in layers:
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
        with merging(self) as merge:
            merge.mapping(self, cfg_other)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge overrides, such as those of a command line.

        Args:
            cfg_list: ``["SOLVER.BASE_LR", "0.1", "SEED=3"]``: keys and values in turn, or ``KEY=VALUE``. Strings are
                decoded (``"1e-3"``, ``"(1, 2)"``, ``"true"``) unless their key takes a string.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        with merging(self, "command line") as merge:
            merge.overrides(pairs_of(cfg_list))

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: str | IO[str]) -> CfgNode:
        """Create a config from YAML.

        Args:
            cfg_file_obj_or_str: YAML text, or an open file with it.

        Returns:
            The config.

        Raises:
            ConfigError: it is not YAML with a mapping of plain data.
        """
        text = cfg_file_obj_or_str if isinstance(cfg_file_obj_or_str, str) else cfg_file_obj_or_str.read()
        return cls(load_text(text, str(getattr(cfg_file_obj_or_str, "name", "YAML text"))))

    # ------------------------------------------------------------------ used by merges

    @property
    def declarations(self) -> dict[str, Typed]:
        """The declared types of keys of this node."""
        return self.__dict__.setdefault(_DECLARED, {})

    def declared(self, key: str) -> Typed | None:
        """The declared type of a key of this node, or None."""
        return self.declarations.get(key)

    def is_section(self, key: str) -> bool:
        """Whether a key of this node holds a node."""
        return isinstance(self.get(key), CfgNode)

    def takes_anything(self, key: str) -> bool:
        """Whether merges may set a key of this node to a value of any type."""
        if key in self.declarations:
            return self.declarations[key] == _FREE
        return self[key] is None if key in self else self.is_new_allowed()

    def put(self, key: str, value: Any) -> None:
        """Set a key as a merge does: a key that takes any value continues to do so."""
        if self.takes_anything(key):
            self.declarations[key] = _FREE
        self[key] = value


def _rebuilt(cls: type[CfgNode], items: dict[str, Any], state: dict[str, Any]) -> CfgNode:
    node = cls.__new__(cls)
    dict.update(node, items)
    node.__dict__.update(state)
    return node


def declare_defaults(root: CfgNode) -> None:
    """Declare a tree as the default config: keys that are set on it or on its copies are checked.

    Args:
        root: the tree, with all keys, and its renamed keys registered.
    """
    global _defaults
    _defaults = root.clone()
    for section, node in root._sections():
        node.__dict__[_SECTION] = section
    for old, new in root.__dict__[root.RENAMED_KEYS].items():
        *old_section, old_name = old.split(".")
        *new_section, new_name = (new[0] if isinstance(new, tuple) else new).split(".")
        other = None if old_section == new_section else reduce(getitem, new_section, root)
        reduce(getitem, old_section, root).__dict__.setdefault(_RENAMED, {})[old_name] = (other, new_name)


def _default(full_key: str) -> Any:
    """The default value of a key, or the default section; None if there is none."""
    try:
        return reduce(getitem, full_key.split("."), _defaults) if full_key else _defaults
    except (KeyError, TypeError):
        return None


#: A config for code that does not receive one, as in detectron2. :func:`set_global_cfg` fills it.
global_cfg = CfgNode()


def set_global_cfg(cfg: CfgNode) -> None:
    """Replace the content of :data:`global_cfg` by the values of ``cfg``.

    Args:
        cfg: a config.
    """
    global_cfg.clear()
    global_cfg.update(cfg)
