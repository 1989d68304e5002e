"""Types of config keys: that of the default, or one declared with :class:`Typed`."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from .errors import ConfigError, suggest
from .literals import Plain, clean, literal
from .objects import ObjectName

# The type of a key that takes any value.
_ANY = object


@dataclass(frozen=True)
class Typed:
    """Declares what a key takes if its default does not show it: ``cfg.SCALE = Typed(None, float)``.

    Attributes:
        default: the default value.
        kind: a type, or a validator: a function that raises ``ValueError`` for a bad value. Its return value is
            ignored. The config can be pickled if the validator is defined at module level.
        optional: whether the key also takes None; always true if the default is None.
        least: the smallest allowed number. With ``least`` or ``most``, NaN and infinity are errors.
        most: the largest allowed number.
    """

    default: Any
    kind: type | Callable[[Any], Any]
    optional: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def type(self) -> type:
        """The type that strings are parsed as, and that lists and tuples are converted to."""
        if isinstance(self.kind, type):
            return self.kind
        if isinstance(self.kind, _OneOf) and len(set(map(type, self.kind.choices))) > 1:
            return _ANY
        return _ANY if self.default is None else type(self.default)

    def check(self, value: Any) -> Any:
        """Check a value of plain types.

        Args:
            value: the value.

        Returns:
            The value, converted: an int to float, lists and tuples to the declared type.

        Raises:
            ConfigError: the key does not take it; the message does not name the key.
        """
        if value is None:
            if self.optional or self.default is None:
                return None
            raise ConfigError(_mismatch(self._expected(), value))
        if isinstance(self.kind, type):
            value = convert(value, self.kind)
            self._check_range(value)
            return value
        try:
            self.kind(value)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if isinstance(value, (list, tuple)) and self.type in (list, tuple):
            return self.type(value)
        return value

    def _check_range(self, value: Any) -> None:
        if self.least is None and self.most is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"must be a finite number, not {value}")
        if self.least is not None and value < self.least:
            raise ConfigError(f"must be at least {self.least}, not {value}")
        if self.most is not None and value > self.most:
            raise ConfigError(f"must be at most {self.most}, not {value}")

    def _expected(self) -> str:
        return self.kind.__name__ if isinstance(self.kind, type) else f"a value such as {self.default!r}"


@dataclass(frozen=True)
class _OneOf:
    choices: tuple[Any, ...]

    def __call__(self, value: Any) -> None:
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return
        hint = suggest(value, (c for c in self.choices if isinstance(c, str))) if isinstance(value, str) else ""
        raise ConfigError(f"{value!r} is not one of {', '.join(map(repr, self.choices))}{hint}")


def one_of(*choices: Any) -> Callable[[Any], None]:
    """A validator for :class:`Typed` that allows only the given values.

    Args:
        choices: the values.

    Returns:
        The validator. Its error lists the choices and suggests the nearest.
    """
    return _OneOf(choices)


def convert(value: Any, expected: Any) -> Any:
    """Convert a value to a type: an int to float, a list to tuple or a tuple to list. Others must match.

    Args:
        value: a value of plain types.
        expected: the type; ``object`` and ``NoneType`` mean any.

    Returns:
        The value, converted.

    Raises:
        ConfigError: it cannot be converted.
    """
    if type(value) is expected or expected in (_ANY, type(None)) or (expected is str and isinstance(value, ObjectName)):
        return value
    if (expected is float and type(value) is int) or (expected in (list, tuple) and isinstance(value, (list, tuple))):
        with suppress(OverflowError):  # an int that no float can hold
            return expected(value)
    raise ConfigError(_mismatch(expected.__name__, value))


def coerce(value: Any, declared: Typed | None, expected: type) -> Any:
    """Parse, check and convert a merged value for its key.

    Args:
        value: from a file (unquoted scalars are :class:`Plain`), a command line (all strings are) or another config.
        declared: the key's declaration, or None.
        expected: without a declaration, the type of the key's present value (``object``: any).

    Returns:
        The value for the key.

    Raises:
        ConfigError: the key does not take it; the message does not name the key.
    """
    if expected is ObjectName:  # the key's present value
        expected = str
    if declared is not None:
        expected, check = declared.type, declared.check
    else:
        check = partial(convert, expected=expected)
    first, *others = _readings(value, expected)
    try:
        return check(clean(first))
    except ConfigError:
        for other in others:
            with suppress(ConfigError):
                return check(clean(other))
        raise


def _readings(value: Any, expected: type) -> list[Any]:
    """The possible values of a string, the most likely first."""
    if not isinstance(value, str) or isinstance(value, ObjectName):
        return [value]
    text = str(value)
    if expected is str:
        return [text]
    if type(value) is Plain:
        return [literal(text), text]
    return [text] if expected is _ANY else [text, literal(text)]


def _mismatch(expected: str, value: Any) -> str:
    return f"expected {expected}, got {value!r} ({type(value).__name__})"
