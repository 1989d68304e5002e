"""Components: a name and its arguments.

A component is a pair of keys such as ``NAME``/``ARGS`` or ``LR_SCHEDULER_NAME``/``LR_SCHEDULER_ARGS``. In a list it is
the name alone, or ``{NAME: ..., ARGS: {...}}``. Test sets and metrics also take ``AS``, the name of their results;
training sets ``RATIO``, their share of the samples.
A :class:`ComponentKey` is a key of the config that names components.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from typing import Any, Literal

from .errors import ConfigError, raised_in, suggest
from .registry import Registry, args_key, locate
from .values import ObjectName, mode_of


def component(entry: object, more: Collection[str] = ("AS", "RATIO")) -> tuple[str, dict[str, Any]]:
    """Split an entry of a list of components into name and arguments.

    Args:
        entry: a name, or a mapping ``{NAME: name, ARGS: mapping}`` whose ``ARGS`` may be missing or None.
        more: keys that the mapping may have, too. They are left out.

    Returns:
        The name and the arguments (a new dict).

    Raises:
        ConfigError: ``entry`` has another form.
    """
    if isinstance(entry, str):
        name, args = entry, None
    elif isinstance(entry, Mapping):
        keys = ("NAME", "ARGS", *more)
        for key in entry:
            if key not in keys:
                raise ConfigError(f"a component here has the keys {', '.join(keys)}, not '{key}'{suggest(key, keys)}")
        if "NAME" not in entry:
            raise ConfigError(f"the component {dict(entry)!r} has no NAME")
        name, args = entry["NAME"], entry.get("ARGS")
    else:
        raise ConfigError(f"a component is a name, or {{NAME: ..., ARGS: {{...}}}}, not {entry!r}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a component's NAME is a string that is not empty, not {name!r}")
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError(f"the ARGS of '{name}' are a mapping of arguments, not {args!r}")
    return name, dict(args or {})


def name_of(entry: object) -> str:
    """The name of the results of a test set or metric: its ``AS``, or else its ``NAME``."""
    return (entry.get("AS") if isinstance(entry, Mapping) else None) or component(entry)[0]


def components(value: object, more: Collection[str] = ()) -> None:
    """Validate a list of components, for :class:`~hookline.config.Typed` keys such as ``HOOKS``.

    Args:
        value: the list or tuple.
        more: keys beside ``NAME`` and ``ARGS`` that the components may have: "AS", a name of their own; "RATIO".

    Raises:
        ConfigError: it is not a list or tuple, or an entry is not a component; the message gives its index.
    """
    if not isinstance(value, list | tuple):
        hint = f'["{value}"]' if isinstance(value, str) else "[{NAME: ..., ARGS: {...}}]"
        raise ConfigError(f"expected a list of components, got {value!r}; write {hint}")
    for index, entry in enumerate(value):
        try:
            component(entry, more)
            if isinstance(entry, Mapping):
                _check_more(entry.get("AS", "_"), entry.get("RATIO", 1))
        except ConfigError as error:
            raise ConfigError(f"entry {index}: {error}") from None


named_components = partial(components, more=("AS",))
"""As :func:`components`, for components that may have a name of their own."""

mixed_components = partial(components, more=("RATIO",))
"""As :func:`components`, for data sets that may be mixed by ``RATIO``."""


def _check_more(name: object, ratio: object) -> None:
    if not isinstance(name, str) or not name.isprintable() or not re.fullmatch(r"\w([^/\\]*[^/\\ ])?", name):
        raise ConfigError(f"AS begins with a letter and names files, so it has no '/', not {name!r}")
    if isinstance(ratio, bool) or not isinstance(ratio, float | int) or not 0 < ratio < float("inf"):
        raise ConfigError(f"RATIO is a number above 0, not {ratio!r}")


# ---------------------------------------------------------------------- keys of the config


@dataclass(frozen=True)
class ComponentKey:
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

    def entries(self, cfg: Any) -> list[tuple[str, Any, str]]:
        """Return name, arguments and the name's full key of each component."""
        *section, last = self.key.split(".")
        node, args = reduce(getitem, section, cfg), args_key(last)
        if isinstance(node, str):  # code written for detectron2 sets a section to a name, in any case
            names = {name.lower(): name for name, _ in self.registry}
            return [(node if node in self.registry else names.get(node.lower(), node), {}, self.key)]
        if args is not None:
            return [(node[last], node[args], self.key)]
        return [(*component(entry), f"{self.key}[{i}].NAME") for i, entry in enumerate(node[last])]

    def name(self, cfg: Any) -> str:
        """Return the name of the component, or of the first one in a list."""
        return self.entries(cfg)[0][0]

    def check(self, cfg: Any) -> list[Any]:
        """Check names and arguments without building anything. Empty names are skipped.

        Returns:
            The class or function of each component.

        Raises:
            ConfigError: see :meth:`Registry.build`.
        """
        positional, offered = (None,) * self.positional, dict.fromkeys(self.offers)
        return [
            self.registry.bind(name, args, positional, offered, key)[0] for name, args, key in self.entries(cfg) if name
        ]

    def build(self, cfg: Any, *positional: object, **offered: object) -> Any:
        """Build the component, or the list of components.

        Raises:
            ConfigError: see :meth:`Registry.build`; or a constructor raised an error.
        """
        if "cfg" in self.offers:
            offered["cfg"] = cfg
        built = []
        for name, args, key in self.entries(cfg):
            with errors_at(f"{key.removesuffix('.NAME')} ({name})"):
                built.append(self.registry.build(name, args, positional=positional, offered=offered, key=key))
        return built[0] if args_key(self.key) else built


@contextmanager
def errors_at(key: str) -> Iterator[None]:
    """Turn any exception into a :class:`ConfigError` that begins with ``key``."""
    try:
        yield
    except ConfigError as error:
        section = key.split()[0]
        names_it = str(error).startswith(section.rpartition("_")[0] or section)
        if names_it or (" (" in key and re.match(r"[A-Z]+\.[A-Z_.]+: ", str(error))):  # or another key
            raise
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {type(error).__name__}: {error}{raised_in(error)}") from error


def default_name(metric: object) -> str:
    """Return the name of a metric, or of a class of metrics, to which the config gives none."""
    kind = metric if isinstance(metric, type) else type(metric)
    name = getattr(metric, "name", None)
    return name if isinstance(name, str) and name else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def mode_of_result(cfg: Any, result: str, mode: str = "auto") -> Literal["max", "min"]:
    """As :func:`~hookline.config.values.mode_of`; but "auto" is first what a metric of TEST.METRICS says itself.

    Those of torchmetrics have ``higher_is_better``.

    Args:
        cfg: the whole config, or another object.
        result: the full name of a result.
        mode: "max", "min" or "auto".
    """
    for entry in getattr(getattr(cfg, "TEST", None), "METRICS", ()) if mode == "auto" else ():
        name, _ = component(entry)
        if isinstance(name, ObjectName) or ":" in name or "." in name:
            metric: Any = name.value if isinstance(name, ObjectName) else locate(name)
            higher, own = getattr(metric, "higher_is_better", None), default_name(metric)
            if isinstance(entry, Mapping):
                own = entry.get("AS") or own
            # torchmetrics says False of WordInfoPreserved, the share of words that are right.
            if isinstance(higher, bool) and result.rpartition("/")[2] == own != "word_info_preserved":
                return "max" if higher else "min"
    return mode_of(result, mode)
