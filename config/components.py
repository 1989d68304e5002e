"""Components: a name and its arguments.

A component is a pair of keys such as ``NAME``/``ARGS`` or ``LR_SCHEDULER_NAME``/``LR_SCHEDULER_ARGS``. In a list it is
the name alone, or ``{NAME: ..., ARGS: {...}}``. Test sets and metrics also take ``AS``, the name of their results;
test sets also ``EVAL_PERIOD``, a period of their own.
"""

import re
from collections.abc import Mapping
from typing import Any

from .duration import Duration
from .errors import ConfigError, suggest

_OBJECTS = "; a config holds no objects: pass them to Trainer(...), or hooks to trainer.register_hooks([...])"
# Pairs with other names than (X_)NAME, (X_)ARGS.
_IRREGULAR = {"SAMPLER_TRAIN": "SAMPLER_ARGS"}


def args_key(key: str) -> str | None:
    """The key of the arguments of the component that ``key`` names.

    Args:
        key: the last part of a config key, such as ``"NAME"`` or ``"LR_SCHEDULER_NAME"``.

    Returns:
        The key, such as ``"ARGS"`` or ``"LR_SCHEDULER_ARGS"``; None if ``key`` does not name a component.
    """
    if key == "NAME" or key.endswith("_NAME"):
        return key.removesuffix("NAME") + "ARGS"
    return _IRREGULAR.get(key)


def name_key(key: str) -> str:
    """The inverse of :func:`args_key`, for a full key.

    Args:
        key: the full key of a component's arguments, such as ``"MODEL.ARGS"``.

    Returns:
        The full key of its name, such as ``"MODEL.NAME"``; ``key`` itself if it is not such a key.
    """
    section, dot, last = key.rpartition(".")
    for name, args in _IRREGULAR.items():
        if last == args:
            return section + dot + name
    if last == "ARGS" or last.endswith("_ARGS"):
        return key.removesuffix("ARGS") + "NAME"
    return key


def component(entry: Any) -> tuple[str, dict[str, Any]]:
    """Split an entry of a list of components into name and arguments.

    Args:
        entry: a name, or a mapping ``{NAME: name, ARGS: mapping}`` whose ``ARGS`` may be missing or None. ``AS`` and
            ``EVAL_PERIOD`` are left out.

    Returns:
        The name and the arguments (a new dict).

    Raises:
        ConfigError: ``entry`` has another form.
    """
    if isinstance(entry, str):
        name, args = entry, None
    elif isinstance(entry, Mapping):
        for key in entry:
            if key not in ("NAME", "ARGS", "AS", "EVAL_PERIOD"):
                hint = suggest(str(key), ("NAME", "ARGS"))
                raise ConfigError(f"a component has the keys NAME and ARGS, not '{key}'{hint}")
        if "NAME" not in entry:
            raise ConfigError(f"the component {dict(entry)!r} has no NAME")
        name, args = entry["NAME"], entry.get("ARGS")
    else:
        hint = "" if entry is None or isinstance(entry, bool | int | float | list | tuple) else _OBJECTS
        raise ConfigError(f"a component is a name, or {{NAME: ..., ARGS: {{...}}}}, not {entry!r}{hint}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a component's NAME is a string that is not empty, not {name!r}")
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError(f"the ARGS of '{name}' are a mapping of arguments, not {args!r}")
    return name, dict(args or {})


def name_of(entry: Any) -> str:
    """The name of the results of a test set or metric: its ``AS``, or else its ``NAME``."""
    return (entry.get("AS") if isinstance(entry, Mapping) else None) or component(entry)[0]


def period_of(entry: Any) -> Any:
    """The ``EVAL_PERIOD`` of a test set; None if it has none."""
    return entry.get("EVAL_PERIOD") if isinstance(entry, Mapping) else None


def components(value: Any) -> None:
    """Validate a list of components, for :class:`~hookline.config.Typed` keys such as ``HOOKS``.

    Args:
        value: the list or tuple.

    Raises:
        ConfigError: it is not a list or tuple, or an entry is not a component; the message gives its index.
    """
    _check(value, named=False, timed=False)


def named_components(value: Any) -> None:
    """As :func:`components`, for components that may have a name of their own: ``AS``.

    Raises:
        ConfigError: as for :func:`components`; or an ``AS`` cannot be part of the names of metrics and folders.
    """
    _check(value, named=True, timed=False)


def test_sets(value: Any) -> None:
    """As :func:`named_components`, for test sets, which may also have a period of their own: ``EVAL_PERIOD``.

    Raises:
        ConfigError: as for :func:`named_components`; or an ``EVAL_PERIOD`` is not a duration.
    """
    _check(value, named=True, timed=True)


def _check(value: Any, named: bool, timed: bool) -> None:
    if not isinstance(value, list | tuple):
        hint = f"; write [{value}]" if isinstance(value, str) else ""
        if isinstance(value, Mapping):
            hint = f"; write [{{NAME: {value.get('NAME', next(iter(value), 'Name'))}, ARGS: {{...}}}}]"
        elif isinstance(value, str) and value.lstrip().startswith(("[", "(")):
            hint = "; this text is not a list: check its brackets, and quote each name in it"
        raise ConfigError(f"expected a list of components, got {value!r}{hint}")
    for index, entry in enumerate(value):
        try:
            component(entry)
            if isinstance(entry, Mapping):
                _check_own_keys(entry, named, timed)
        except ConfigError as error:
            raise ConfigError(f"entry {index}: {error}") from None


def _check_own_keys(entry: Mapping[str, Any], named: bool, timed: bool) -> None:
    name = entry.get("AS", "_")
    if "AS" in entry and not named:
        raise ConfigError("AS names test sets and metrics only")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"AS is a name of letters, digits, '_', '-' and '.', not {name!r}")
    if period_of(entry) is None:
        return
    if not timed:
        raise ConfigError("EVAL_PERIOD is for test sets only")
    try:
        Duration.parse(period_of(entry))
    except ConfigError as error:
        raise ConfigError(f"EVAL_PERIOD: {error}") from None
