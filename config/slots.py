"""Slots: the places of a config that name components, and what the components are offered."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from .components import args_key, component
from .errors import ConfigError, place_of
from .node import CfgNode
from .registry import Registry

__all__ = ["Slot", "errors_at"]


@dataclass(frozen=True)
class Slot:
    """A config key that names a component, or a list of components.

    Attributes:
        registry: where names are looked up.
        key: the key of a name whose arguments stand beside it, such as ``"MODEL.NAME"``, or of a list of components,
            such as ``"HOOKS"``.
        offers: names of arguments that a component receives if its signature names them and the config does not set
            them. ``cfg`` is the config itself; the caller of :meth:`build` gives the others.
        positional: number of arguments that the caller of :meth:`build` gives by position.
    """

    registry: Registry
    key: str
    offers: tuple[str, ...] = ("cfg",)
    positional: int = 0

    def entries(self, cfg: CfgNode) -> list[tuple[str, Any, str]]:
        """Return name, arguments and the arguments' full key of each component."""
        *section, last = self.key.split(".")
        node, args = reduce(getitem, section, cfg), args_key(last)
        if isinstance(node, str):  # code written for detectron2 sets a section to a name
            return [(self.registry.in_any_case(node), {}, self.key)]
        if args is None:
            return [(*component(entry), f"{self.key}[{i}].ARGS") for i, entry in enumerate(node[last])]
        return [(node[last], node[args], ".".join([*section, args]))]

    def name(self, cfg: CfgNode) -> str:
        """Return the name of the component, or of the first one in a list."""
        return self.entries(cfg)[0][0]

    def is_named(self, cfg: CfgNode) -> bool:
        """Whether the key has a name, or at least one component."""
        return any(name for name, _, _ in self.entries(cfg))

    def check(self, cfg: CfgNode) -> list[Any]:
        """Check names and arguments without building anything. Empty names are skipped.

        Returns:
            The class or function of each component.

        Raises:
            ConfigError: see :meth:`Registry.check`.
        """
        return [
            self.registry.check(name, args, positional=self.positional, offered=self.offers, key=key)
            for name, args, key in self.entries(cfg)
            if name
        ]

    def build(self, cfg: CfgNode, *positional: Any, **offered: Any) -> Any:
        """Build the component, or the list of components.

        Raises:
            ConfigError: see :meth:`Registry.build`; or a constructor in a list of components raised an error. That of a
                single component is raised as it is.
        """
        if "cfg" in self.offers:
            offered["cfg"] = cfg
        one = args_key(self.key.rpartition(".")[2])
        built = []
        for name, args, key in self.entries(cfg):
            with nullcontext() if one else errors_at(f"{key.removesuffix('.ARGS')} ({name})"):
                built.append(self.registry.build(name, args, positional=positional, offered=offered, key=key))
        return built[0] if one else built

    def try_build(self, cfg: CfgNode, *positional: Any, **offered: Any) -> Any:
        """Build the component of a name. Errors of its constructor become :class:`ConfigError` with the key."""
        ((name, _, key),) = self.entries(cfg)
        with errors_at(f"{key} of {name}"):
            return self.build(cfg, *positional, **offered)


@contextmanager
def errors_at(key: str) -> Iterator[None]:
    """Turn any exception into a :class:`ConfigError` that begins with ``key``."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(key.split()[0].removesuffix("ARGS")):  # the error names the key already
            raise
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {type(error).__name__}: {error}{place_of(error)}") from error
