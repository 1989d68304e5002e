"""Reads a config as a whole: its keys, its differences from another config, its YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fvcore.common.config import CfgNode as _FvcoreCfgNode

from .errors import ConfigError
from .literals import clean
from .yaml_files import dump_text

__all__ = ["MISSING", "ConfigTree"]


class _Missing:
    """The value of a key that does not exist."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


class ConfigTree(_FvcoreCfgNode):
    """The methods of :class:`~hookline.config.CfgNode` that read a node and all nodes below it."""

    def takes_anything(self, key: str) -> bool:
        """Whether merges may set a key of this node to a value of any type."""
        raise NotImplementedError

    def walk(self) -> Iterator[ConfigTree]:
        """This node and all nodes below it."""
        yield self
        for value in self.values():
            if isinstance(value, ConfigTree):
                yield from value.walk()

    def full_keys(self) -> list[str]:
        """The full keys of everything below this node, sections included."""
        keys = []
        for key, value in self.items():
            keys.append(str(key))
            if isinstance(value, ConfigTree):
                keys += [f"{key}.{below}" for below in value.full_keys()]
        return keys

    def flatten(self) -> dict[str, Any]:
        """All values by their full keys, in order.

        Returns:
            ``{"SOLVER.BASE_LR": 0.1, ...}``; empty sections are left out.
        """
        flat: dict[str, Any] = {}
        for key, value in self.items():
            if isinstance(value, ConfigTree):
                flat.update({f"{key}.{below}": leaf for below, leaf in value.flatten().items()})
            else:
                flat[str(key)] = value
        return flat

    def diff(self, other: ConfigTree) -> dict[str, tuple[Any, Any]]:
        """Compare with another config, such as the defaults.

        Args:
            other: the config to compare with.

        Returns:
            ``{full key: (value in other, value here)}`` of keys that differ, in order; :data:`MISSING` if a side does
            not have the key.
        """
        old, new = other.flatten(), self.flatten()
        pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in [*new, *old]}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as nested dicts, a deep copy.

        Raises:
            ConfigError: a key holds something that a config file cannot; the message names it.
        """
        return self._exported(for_yaml=False)

    def dump(self, **kwargs: Any) -> str:
        """Return the tree as YAML. Merged into the defaults, it gives an equal tree. ``COMPUTED_`` keys are left out.

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
            if isinstance(value, ConfigTree):
                exported[key] = value._exported(for_yaml, f"{path}{key}.")
                continue
            try:
                exported[key] = clean(value)
            except ConfigError as error:
                raise ConfigError(f"{path}{key}: {error}") from None
            # A list is easier to read, and a key of type tuple converts it back.
            if for_yaml and type(value) is tuple and not self.takes_anything(key) and not self.is_new_allowed():
                exported[key] = list(exported[key])
        return exported
