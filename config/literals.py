"""Values as text: parse numbers, tuples and None, and write tuples."""

import math
import os
from ast import literal_eval
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .frozen import thawed
from .objects import ObjectName

# YAML words, for the command line.
_WORDS = {"true": True, "false": False, "null": None}
_SCALARS = (type(None), bool, int, float, str)


class Plain(str):
    """An unquoted YAML scalar, or a command-line value.

    It is parsed as a Python literal, unless its key takes a string.
    """

    __slots__ = ()


def literal(text: str) -> Any:
    """Parse ``text`` as a Python literal, or as ``true``, ``false``, ``null``.

    Args:
        text: such as ``"1e-3"``, ``"(1, 2)"``, ``"None"``, ``"resnet"``.

    Returns:
        The value, or ``text`` as a plain ``str`` if it is not a literal that a config can hold.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return clean(literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return str(text)


def clean(value: Any) -> Any:
    """Deep-copy ``value`` into plain types. Unquoted scalars in it are parsed as literals, and ``~/`` is expanded.

    Args:
        value: None, bool, int, float, str, or a list, tuple or mapping of these.

    Returns:
        The copy; mappings (config nodes included) become dicts.

    Raises:
        ConfigError: it holds another type.
    """
    if type(value) is Plain:
        value = literal(value)
    if type(value) in _SCALARS or isinstance(value, ObjectName):
        return expanded(value)
    if isinstance(value, os.PathLike):
        return expanded(os.fspath(value))
    value = thawed(value)
    if type(value) in (list, tuple):
        return type(value)(clean(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, str) else key: clean(item) for key, item in value.items()}
    raise ConfigError(
        f"a config cannot hold {value!r} ({type(value).__name__}): only numbers, strings, bools, None, "
        "and lists, tuples and mappings of them"
    )


def expanded(value: Any) -> Any:
    """Return text that begins with ``~/`` with the path of the home folder, and any other value as it is."""
    return os.path.expanduser(value) if type(value) is str and value.startswith("~/") else value


def spell(value: Any) -> str:
    """Write a value as a Python literal that is one unquoted scalar in YAML, unlike ``repr``.

    Args:
        value: plain data (see :func:`clean`).

    Returns:
        Text without ``": "`` and ``" #"``; :func:`literal` gives the same value back.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(key)}:{spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(spell, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, str):
        return repr(value).replace(":", "\\x3a").replace("#", "\\x23")
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # "inf" is a name, not a literal
    return repr(value)
