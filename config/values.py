"""Values of config keys: the types that keys take, text that is parsed, objects in place of names."""

import inspect
import math
import os
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .errors import ConfigError, suggest

# YAML words, for the command line.
_WORDS = {"true": True, "false": False, "null": None}


class _Missing:
    """The value of a key that does not exist."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


# ---------------------------------------------------------------------- whether more of a metric is better

_LESS = re.compile(
    r"(^|_)(\w*(loss|losses|error|errors|perplexity|distance|divergence|cross_?entropy)|neg(ative)?_log_likelihood|nll"
    r"|err|ce|bce|kl|ppl|bits|bpc|bpb|n?r?mse|r?msle|mae|s?mape|wer|cer|ter|eer|ece|fid|kid|lpips|crps|brier|hausdorff"
    r"|fpr|fnr|false_(positive|negative)_rate|regret|latency|time|miss|edit|deviance|hinge|chamfer|ade|fde|epe"
    r"|disparity)(_|$)"
)


def mode_of(metric: str, mode: str = "auto") -> Literal["max", "min"]:
    """Return whether more ("max") or less ("min") of a metric is better.

    Args:
        metric: its full name, such as "digits_test/loss", or "module:function".
        mode: "max" or "min"; or "auto": "min" if the name says that it is a loss, an error, a distance, a perplexity or
            a time, otherwise "max".
    """
    if mode != "auto":
        return "min" if mode == "min" else "max"
    name = metric.partition("/")[2] or metric.rpartition(":")[2]
    words = "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()
    negated = words.startswith("neg_") and "likelihood" not in words  # scikit-learn's neg_mean_squared_error
    return "min" if _LESS.search(words) and not negated else "max"


# ---------------------------------------------------------------------- types of keys


@dataclass(frozen=True)
class Typed:
    """Declares what a key takes if its default does not show it: ``cfg.SCALE = Typed(None, float)``.

    Attributes:
        default: the default value.
        kind: a type, or a validator: a function that raises ``ValueError`` for a bad value. Its return value is
            ignored. The config can be pickled if the validator is defined at module level.
        optional: whether the key also takes None; always true if the default is None.
        min: the smallest allowed number. With ``min`` or ``max``, NaN and infinity are errors.
        max: the largest allowed number.
    """

    default: Any
    kind: type | Callable[[Any], object]
    optional: bool = False
    min: float | None = None
    max: float | None = None

    def __deepcopy__(self, memo: object) -> "Typed":
        return self  # it is frozen, and a config has a hundred

    @property
    def type(self) -> type:
        """The type that strings are parsed as, and that lists and tuples are converted to."""
        if isinstance(self.kind, type):
            return self.kind
        if isinstance(self.kind, OneOf) and len(set(map(type, self.kind.choices))) > 1:
            return object
        return object if self.default is None else type(self.default)

    def check(self, value: object) -> Any:
        """Check a value of plain types.

        Args:
            value: the value.

        Returns:
            The value, converted: an int to float, lists and tuples to the declared type.

        Raises:
            ConfigError: the key does not take it; the message does not name the key.
        """
        if value is None and (self.optional or self.default is None):
            return None
        if value is None and self.type in (list, tuple):  # YAML: a key without a value
            return self.type()
        if not isinstance(self.kind, type):
            try:
                self.kind(value)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            return self.type(value) if isinstance(value, list | tuple) and self.type in (list, tuple) else value
        number: Any = convert(value, self.kind)
        limited = self.min is not None or self.max is not None
        if limited and isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"must be a finite number, not {number}")
        if self.min is not None and number < self.min:
            raise ConfigError(f"must be at least {self.min}, not {number}")
        if self.max is not None and number > self.max:
            raise ConfigError(f"must be at most {self.max}, not {number}")
        return number

    def parse(self, value: object) -> Any:
        """As :meth:`check`, for a value of any source. Text is parsed if the key takes no text, as in yacs."""
        value = clean(value)
        try:
            return self.check(value)
        except ConfigError:
            parsed = literal(value) if type(value) is str else value
            if parsed == value:
                raise
            return self.check(parsed)


@dataclass(frozen=True)
class OneOf:
    """See :func:`one_of`."""

    choices: tuple[object, ...]

    def __call__(self, value: object) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in self.choices):
            hint = suggest(value, (c for c in self.choices if isinstance(c, str))) if isinstance(value, str) else ""
            raise ConfigError(f"{value!r} is not one of {', '.join(map(repr, self.choices))}{hint}")


def one_of(*choices: object) -> OneOf:
    """A validator for :class:`Typed` that allows only the given values.

    Args:
        choices: the values.

    Returns:
        The validator. Its error lists the choices and suggests the nearest.
    """
    return OneOf(choices)


def convert(value: object, expected: type) -> Any:
    """Convert a value to a type: an int to float, a list to tuple or a tuple to list. Others must match.

    Args:
        value: a value of plain types.
        expected: the type; ``object`` means any.

    Returns:
        The value, converted.

    Raises:
        ConfigError: it cannot be converted.
    """
    if type(value) is expected or expected is object or (expected is str and isinstance(value, ObjectName)):
        return value
    if (expected is float and type(value) is int) or (expected in (list, tuple) and isinstance(value, list | tuple)):
        new: Any = expected
        with suppress(OverflowError):  # an int that no float can hold
            return new(value)
    raise ConfigError(f"expected {expected.__name__}, got {value!r} ({type(value).__name__})")


# ---------------------------------------------------------------------- text and plain data


def literal(text: str) -> Any:
    """Parse ``text`` as a Python literal, or as ``true``, ``false``, ``null``.

    Args:
        text: such as ``"1e-3"``, ``"(1, 2)"``, ``"None"``, ``"resnet"``.

    Returns:
        The value, or ``text`` if it is not a literal that a config can hold.
    """
    try:
        return _WORDS[text] if text in _WORDS else clean(literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def clean(value: Any) -> Any:
    """Deep-copy ``value`` into plain types. In text that begins with ``~/``, the home folder is put for ``~``.

    Args:
        value: None, bool, int, float, str, or a list, tuple or mapping of these.

    Returns:
        The copy; mappings (config nodes included) become dicts.

    Raises:
        ConfigError: it holds another type.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) is str:
        return os.path.expanduser(value) if value.startswith("~/") else value
    if type(value) in (type(None), bool, int, float) or isinstance(value, ObjectName):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(clean, value))
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        return value.item()
    raise ConfigError(
        f"a config cannot hold a {type(value).__name__}: it holds None, bool, int, float, str, list, tuple, CfgNode. "
        'Name a class or function as "module:Name", or pass objects to Trainer(...) and trainer.register_hooks([...])'
    )


def same(a: object, b: object) -> bool:
    """Whether two values of plain types are equal. Lists and tuples of the same values are: files hold lists only."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


# ---------------------------------------------------------------------- objects


OBJECT = "<object "
"""The beginning of the text of an :class:`ObjectName`."""


class ObjectName(str):
    """What Python code puts into a config in place of a name, and a file cannot hold: an object.

    Its text, in files and logs, is ``<object module.Name>``. Copies of the config hold the same object.

    Args:
        value: a class or function, which is called like one that a config names; or the component itself.
        is_component: whether ``value`` is the component itself. Default: unless it is a class, function or partial.
    """

    value: Any
    is_component: bool

    def __new__(cls, value: Any, is_component: bool | None = None) -> "ObjectName":
        is_partial = isinstance(value, partial)
        named = value.func if is_partial else value
        is_named = inspect.isclass(named) or inspect.isroutine(named)
        named = named if is_named else type(named)
        module, name = getattr(named, "__module__", "?"), getattr(named, "__qualname__", type(named).__qualname__)
        self = super().__new__(cls, f"{OBJECT}{module}.{name}>")
        self.value = value
        self.is_component = not (is_named or is_partial) if is_component is None else is_component
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[object, bool]]:
        return ObjectName, (self.value, self.is_component)

    def __deepcopy__(self, memo: object) -> "ObjectName":
        return self

    def component(self, *_: object) -> Any:
        """Return the component itself. Takes what its constructor would be given by position."""
        return self.value


def kind_of(target: object) -> Any:
    """Return the class of a component that a config holds itself; any other target of a registry as it is."""
    name = getattr(target, "__self__", None)
    return type(name.value) if isinstance(name, ObjectName) else target
