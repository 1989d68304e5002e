"""The config tree."""

from __future__ import annotations

import copyreg
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from operator import getitem
from typing import IO, Any

from fvcore.common.config import CfgNode as _FvcoreCfgNode

from .errors import ConfigError, UnknownKeyError, misspelt, suggest
from .other_names import hint_of_epochs, key_for
from .registry import args_key
from .values import MISSING, Typed, clean, literal, same
from .yaml_files import dump_text, load_layers, load_text, pairs_of

logger = logging.getLogger(__name__)

# Sections that may be set to the name of their component, as detectron2's projects do.
_NAMED_SECTIONS = ("SOLVER.OPTIMIZER", "TEST.EVALUATOR")


class CfgNode(_FvcoreCfgNode):
    """A tree of settings: yacs's node with strict checks.

    - An unknown key is an error that suggests the nearest key. A value of the wrong type is an error that names the
      expected type. A merge that fails changes nothing.
    - Files are safe YAML with ``_BASE_``. Loading a file executes nothing. Running it does: it names modules to import
      and functions to call.
    - Keys of a frozen tree cannot be set. As in yacs, the content of a list is not protected.
    - Setting another ``NAME`` of a component by a merge clears its ``ARGS``.
    - Code may add keys anywhere to a config of ``get_cfg()``, as in detectron2: ``cfg.SOLVER.MY_KEY = 3``. A new key
      whose name is almost that of a default key beside it is a typing error. Sections that a project makes itself are
      not checked. Setting a default section sets the keys that the new section has.

    A merge converts a value to the type of its key, which is that of the present value (also an int to a float, a list
    to a tuple). :class:`Typed` declares other types. A key whose value is None takes any value, and so do all keys of a
    node made with ``new_allowed``.

    Args:
        init_dict: nested keys and values.
        key_list: the parts of the node's full key; empty for the whole config.
        new_allowed: whether merges may add keys to the node.
    """

    # Internal state, beside yacs's own.
    _declared: dict[str, Typed]  # the declared types of keys of this node
    _section: str | None  # the full key of a section of the default config; "" for the whole config
    _renamed: dict[str, tuple[CfgNode, str]]  # old names of keys: the node with the key, and its name there

    def __init__(
        self,
        init_dict: Mapping[str, object] | None = None,
        key_list: Sequence[str] | None = None,
        new_allowed: bool = False,
    ) -> None:
        self.__dict__.update(_declared={}, _section=None, _renamed={})
        super().__init__(init_dict, list(key_list or ()), new_allowed)

    @classmethod
    def _create_config_tree_from_dict(cls, dic: Mapping[str, object], key_list: list[str]) -> dict[str, object]:
        values: Mapping[str, Any] = dic if key_list else clean(dic)  # those of a section are clean already
        return {key: cls(value, [key]) if _is_section(value) else value for key, value in values.items()}

    # ------------------------------------------------------------------ reading keys

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        # Copying, pickling and displaying look up many private names: no suggestions for these.
        hint = "" if name.startswith("_") else suggest(name, dict(self.walk()))
        raise AttributeError(f"the config has no key '{name}' here{hint}")

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in self.__dict__.get("_renamed", ())

    def __missing__(self, key: str) -> Any:
        if key not in self._renamed:
            raise KeyError(key)
        node, name = self._renamed[key]
        return node[name]

    def get(self, key: str, default: object = None) -> Any:
        """As ``dict.get``. Finds renamed keys too."""
        return Mapping.get(self, key, default)

    def walk(self, above: str = "") -> Iterator[tuple[str, Any]]:
        """Yield full key and value of everything below this node; a section comes before its keys.

        Args:
            above: the beginning of all full keys, such as ``"SOLVER."``.
        """
        for key, value in self.items():
            yield f"{above}{key}", value
            if isinstance(value, CfgNode):
                yield from value.walk(f"{above}{key}.")

    def flatten(self) -> dict[str, Any]:
        """Return all values by their full keys, in order: ``{"SOLVER.BASE_LR": 0.1, ...}``."""
        return {key: value for key, value in self.walk() if not isinstance(value, CfgNode)}

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

    def dump(self, **kwargs: object) -> str:
        """Return the tree as YAML. Merged into the defaults, it gives an equal tree.

        Tuples are written as lists. Keys whose default is a tuple convert them back.

        Args:
            kwargs: options of ``yaml.dump``.

        Raises:
            ConfigError: a list holds something that a config file cannot.
        """
        return dump_text(clean(self), **kwargs)

    # ------------------------------------------------------------------ setting keys

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise ConfigError(f"'{name}' is internal state of the config, not a key")
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._renamed:
            node, name = self._renamed[key]
            logger.warning("%s is now %s: please use the new name", self._full(key), node._full(name))
            node[name] = value
            return
        if self.is_frozen():
            raise AttributeError(f"{key} cannot be changed: the config is frozen (defrost() it, or clone it first)")
        if isinstance(value, Typed):
            self._declared[key], value = value, value.default
        old, full_key = dict.get(self, key), self._full(key)
        if _is_section(value):
            if isinstance(old, CfgNode) and old._section is not None:
                return old.update(value)
            value = value if isinstance(value, CfgNode) else type(self)(value)
            if value.is_new_allowed() or (isinstance(old, CfgNode) and old.is_new_allowed()):
                value.set_new_allowed(True)
        else:
            if isinstance(old, CfgNode) and self._section is not None and not self._takes_name(key, value):
                keys = ", ".join(f"{full_key}.{name}" for name in old)
                raise ConfigError(f"{full_key} is a section, and cannot be {value!r}; set {keys or 'keys in it'}")
            if old is None and key not in self and self._section is not None and not self.is_new_allowed():
                self._check_new_key(key, full_key)
            try:
                value = clean(value)
                value = self._declared[key].check(value) if key in self._declared else value
            except ConfigError as error:
                raise ConfigError(f"{full_key}: {error}") from None
        dict.__setitem__(self, key, value)

    # dict's own methods would bypass __setitem__.
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def _full(self, key: str) -> str:
        return f"{self._section}.{key}" if self._section else key

    def _takes_name(self, key: str, value: object) -> bool:
        """Whether a section may be set to ``value``, the name of its component."""
        return isinstance(value, str) and self._full(key) in _NAMED_SECTIONS

    def _check_new_key(self, key: str, full_key: str) -> None:
        """Raise an error if a key that code adds is almost a default key of this section."""
        if near := misspelt(key, _default(self._section)):
            node = f"cfg.{self._section}" if self._section else "cfg"
            raise UnknownKeyError(
                f"unknown key '{full_key}'; did you mean '{self._full(near)}'? If it is a key of your own, call "
                f"{node}.set_new_allowed(True) before you set it"
            )
        others = [known for known, _ in _default("").walk() if known.endswith(f".{key}")]
        if len(others) == 1:  # many sections have a NAME
            logger.warning("%s is a new key, which only your own code can read. Did you mean %s?", full_key, *others)

    # ------------------------------------------------------------------ copies

    def thawed(self) -> CfgNode:
        """Return a copy that can be changed, also of a frozen config."""
        copied: CfgNode = self.clone()
        copied.defrost()
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:  # for copy, deepcopy and pickle
        return copyreg.__newobj__, (type(self),), (dict(self), self.__dict__)  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        dict.update(self, state[0])
        self.__dict__.update(state[1])

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
        content: dict[str, Any] = clean(root)
        return content

    def merge_from_file(self, cfg_filename: str | os.PathLike[str], allow_unsafe: bool = False) -> None:
        """Merge a YAML file, after the files in its ``_BASE_``.

        Args:
            cfg_filename: a path or URI.
            allow_unsafe: ignored; YAML is always loaded safely.

        Raises:
            UnknownKeyError: a key does not exist.
            ConfigError: a file is missing, not YAML, or bases form a circle; a value does not fit its key. The message
                names the file. The config is then unchanged.
            AttributeError: the config is frozen.
        """
        self._merge_all((name, values, False) for name, values in load_layers(cfg_filename, self._open_cfg))

    def merge_from_other_cfg(self, cfg_other: Mapping[str, object]) -> None:
        """Merge another config.

        Args:
            cfg_other: a config node, or nested dicts.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        self._merge_all([("", cfg_other, False)])

    def merge_from_list(self, cfg_list: Sequence[object]) -> None:
        """Merge overrides, such as those of a command line.

        Args:
            cfg_list: ``["SOLVER.BASE_LR", "0.1", "SEED=3"]``: keys and values in turn, or ``KEY=VALUE``. Strings are
                decoded (``"1e-3"``, ``"(1, 2)"``, ``"true"``) unless their key takes a string.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        self.merge_from_pairs(pairs_of(cfg_list), "command line", decode=True)

    def merge_from_pairs(self, pairs: Iterable[tuple[str, object]], source: str = "", decode: bool = False) -> None:
        """Merge pairs of full key and value, names of components first.

        Args:
            pairs: such as ``("SOLVER.BASE_LR", 0.1)``.
            source: where they come from, the beginning of error messages.
            decode: whether strings are decoded, as those of a command line.

        Raises:
            UnknownKeyError, ConfigError, AttributeError: as :meth:`merge_from_file`.
        """
        layers = []
        for key, value in sorted(pairs, key=lambda pair: _names_first(pair[0].rpartition(".")[2])):
            nested: Any = reduce(lambda inner, name: {name: inner}, key.split(".")[::-1], value)
            layers.append((source, nested, decode and isinstance(value, str)))
        self._merge_all(layers)

    def _merge_all(self, layers: Iterable[tuple[str, Mapping[Any, Any], bool]]) -> None:
        """Merge mappings in order, each with its source and whether to decode it. An error changes nothing."""
        if self.is_frozen():
            raise AttributeError("nothing can be merged: the config is frozen (defrost() it, or clone it first)")
        before = self.clone()
        for source, values, decode in layers:
            try:
                self._merge(values, self, "", decode)
            except ConfigError as error:
                dict.clear(self)
                self.__setstate__((before, before.__dict__))
                raise type(error)(f"{source}: {error}" if source else str(error)) from error.__cause__

    def _merge(self, values: Mapping[Any, Any], root: CfgNode, above: str, decode: bool) -> None:
        """Merge nested keys and values; ``above`` is the beginning of their full keys below ``root``.

        A new name of a component clears its arguments. Names are therefore merged first.
        """
        for key in sorted(values, key=_names_first):
            value, full_key, old = values[key], f"{above}{key}", dict.get(self, key)
            if not isinstance(key, str):
                raise ConfigError(f"the key {full_key} is not a string; quote it")
            if not dict.__contains__(self, key):
                if root.key_is_deprecated(full_key):
                    continue
                if root.key_is_renamed(full_key):
                    new = vars(root)[root.RENAMED_KEYS][full_key]
                    name, hint = (new, "") if isinstance(new, str) else (new[0], f": {new[1]}")
                    if not value and dict(root.walk()).get(name) == value:  # off, in the config.yaml of an earlier run
                        continue
                    raise UnknownKeyError(f"{full_key} was renamed to {name}{hint}")
                if not self.is_new_allowed():
                    raise _unknown_key(root, full_key, "." in key, value)
            typed = self.typed(key)
            if isinstance(old, CfgNode) and self._takes_name(key, value):
                typed = Typed("", str)
            if decode and isinstance(value, str) and typed.type is not str:
                value, decode = literal(value), False
                if typed.type is not object and isinstance(value, str) and value.startswith(("[", "{")):
                    raise ConfigError(
                        f"{full_key}: {value} cannot be read: put each name in it in quotes, and all of it in quotes "
                        """for the shell, such as '["a"]' or '{"NAME": "a"}'"""
                    )
            if _is_section(value) and typed.type in (CfgNode, object):
                if not isinstance(old, CfgNode):
                    old = type(self)(new_allowed=True)
                    dict.__setitem__(self, key, old)
                elif not value and old._takes_any_key():
                    old.clear()
                old._merge(value, root, f"{full_key}.", decode)
                continue
            if typed.type is CfgNode:
                if value is None:
                    logger.warning("the section %s is empty, so it changes nothing", full_key)
                    continue
                hint = next((f"; set {full_key}.{name}" for name in ("NAME", "ENABLED") if name in self[key]), "")
                kind = type(value).__name__
                raise ConfigError(f"{full_key}: expected a mapping of keys, got {value!r} ({kind}){hint}")
            try:
                value = typed.parse(value)
            except ConfigError as error:
                raise ConfigError(f"{full_key}: {error}") from error
            arguments = dict.get(self, args_key(key))
            if old not in (None, value) and isinstance(arguments, CfgNode) and arguments._takes_any_key():
                arguments.clear()
            dict.__setitem__(self, key, value)

    def _takes_any_key(self) -> bool:
        return self.is_new_allowed() and self._section is None

    def typed(self, key: str) -> Typed:
        """Return what a key of this node takes: its declaration, or the type of its value."""
        value = dict.get(self, key)
        if key in self._declared:
            return self._declared[key]
        if value is None or self._takes_any_key():
            return Typed(None, object)
        return Typed(value, next((kind for kind in (str, CfgNode) if isinstance(value, kind)), type(value)))

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


def _is_section(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _names_first(key: object) -> bool:
    return not (isinstance(key, str) and args_key(key))


def _unknown_key(root: CfgNode, full_key: str, is_dotted: bool, value: Any) -> UnknownKeyError:
    """Return the error of a key that ``root`` does not have, with what it probably means."""
    if is_dotted:
        return UnknownKeyError(f"unknown key '{full_key}'; write it nested, one section in the other")
    while isinstance(value, Mapping) and len(value) == 1:  # name the whole key
        ((name, value),) = value.items()
        full_key = f"{full_key}.{name}"
    known, other = dict(root.walk()), key_for(full_key)
    hint = f"; did you mean '{other}'{hint_of_epochs(full_key)}?" if other in known else suggest(full_key, known)
    return UnknownKeyError(f"unknown key '{full_key}'{hint}")


# ---------------------------------------------------------------------- the default config

_defaults = CfgNode()


def declare_defaults(root: CfgNode) -> None:
    """Declare a tree as the default config: keys that are set on it or on its copies are checked.

    Args:
        root: the tree, with all keys, and its renamed keys registered.
    """
    global _defaults
    _defaults = root.clone()
    for section, node in [("", root), *root.walk()]:
        if isinstance(node, CfgNode) and not node.is_new_allowed():
            node.__dict__["_section"] = section
    for old, new in root.__dict__[root.RENAMED_KEYS].items():
        *old_section, old_name = old.split(".")
        *new_section, new_name = (new if isinstance(new, str) else new[0]).split(".")
        reduce(getitem, old_section, root)._renamed[old_name] = reduce(getitem, new_section, root), new_name


def _default(section: str | None) -> CfgNode:
    return reduce(getitem, section.split("."), _defaults) if section else _defaults


#: A config for code that does not receive one, as in detectron2. :func:`set_global_cfg` fills it.
global_cfg = CfgNode()


def set_global_cfg(cfg: CfgNode) -> None:
    """Replace the content of :data:`global_cfg` by the values of ``cfg``.

    Args:
        cfg: a config.
    """
    global_cfg.clear()
    global_cfg.update(cfg)
