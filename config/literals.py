"""Values written as text: which strings stand for a number, a tuple or None, and how a tuple is written as one."""

import math
from ast import literal_eval
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

# What people write on a command line, where no YAML parser reads it.
_WORDS = {"true": True, "false": False, "null": None}
_SCALARS = (type(None), bool, int, float, str)


class Plain(str):
    """A string whose quotes, if any, did not say "I am text": an unquoted YAML scalar, or a command-line value.

    Unless its key is a string, it is read as the Python literal that it spells.
    """

    __slots__ = ()


def literal(text: str) -> Any:
    """The value that ``text`` spells as a Python literal (or as ``true``, ``false``, ``null``).

    Args:
        text: such as ``"1e-3"``, ``"(1, 2)"``, ``"None"``, ``"resnet"``.

    Returns:
        The value, or ``text`` as a plain ``str`` where it spells nothing that a config can hold.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return clean(literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return str(text)


def clean(value: Any) -> Any:
    """A deep copy of ``value`` out of plain types only; unquoted scalars in it are read as literals.

    Args:
        value: None, bool, int, float, str, or a list, tuple or mapping of these.

    Returns:
        The copy; mappings (config nodes included) become dicts.

    Raises:
        ConfigError: there is something else in it.
    """
    if type(value) is Plain:
        return literal(value)
    if type(value) in _SCALARS:
        return value
    if type(value) in (list, tuple):
        return type(value)(clean(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, str) else key: clean(item) for key, item in value.items()}
    raise ConfigError(
        f"a config cannot hold {value!r} ({type(value).__name__}): only numbers, strings, bools, None, "
        "and lists, tuples and mappings of them"
    )


def spell(value: Any) -> str:
    """Write a value as a Python literal which, unlike ``repr``, YAML takes as one unquoted scalar.

    Args:
        value: plain data (see :func:`clean`).

    Returns:
        Text without ``": "`` and ``" #"`` from which :func:`literal` makes the same value.
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
