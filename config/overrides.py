"""Values of command lines such as ``train.device=cpu`` and ``model.channels=[8,16]``, in Hydra's syntax."""

import re
from typing import Any

from .errors import ConfigError

__all__ = ["parse_override"]

_OVERRIDE = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>[\w./@$-]+|[\w.]+(?:\[\d+\])+[\w.\[\]]*)(?:=(?P<value>.*))?", re.DOTALL
)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(
    r"[+-]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][+-]?[0-9]+)?|[0-9][0-9_]*[eE][+-]?[0-9]+|inf|nan)", re.I
)
_WORDS = {"true": True, "false": False, "null": None}


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split ``key=value``.

    Values are numbers, ``true``, ``false``, ``null``, lists ``[1,2]``, dicts ``{a:1}``, quoted strings, and everything
    else as a string.

    Returns:
        What stands before the key (``+``: add it, or nothing), the key, and the value.

    Raises:
        ConfigError: it is written otherwise.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(f"{text}: write overrides as key=value, such as train.max_iter=100")
    if match["sign"] == "~":
        raise ConfigError(f"{text}: keys cannot be removed on the command line; change the config file")
    parser = _Parser(text, match.start("value"))
    return match["sign"][:1], match["key"], parser.whole()


class _Parser:
    """Reads one value.

    Args:
        text: the whole override, for messages.
        at: where its value begins.
    """

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self._at = at

    def whole(self) -> Any:
        """Read the value up to the end of the text."""
        if not self._text[self._at :].strip():
            return ""
        value = self._value("")
        if self._at < len(self._text):
            more = self._text[self._at :]
            hint = "; write a list as [a,b]" if more.startswith(",") else "; quote a string that contains it"
            raise ConfigError(f"{self._text}: '{more}' is not expected{hint}")
        return value

    def _value(self, inside: str) -> Any:
        """Read one value; ``inside`` is the bracket that closes the list or dict around it."""
        self._skip_spaces()
        rest = self._text[self._at :]
        if rest[:1] == "[":
            return self._list()
        if rest[:1] == "{":
            return self._dict()
        quoted = _QUOTED.match(rest)
        if quoted:
            self._at += quoted.end()
            self._skip_spaces()
            return re.sub(r"\\(['\"\\])", r"\1", quoted[1] if quoted[1] is not None else quoted[2])
        return self._word(inside)

    def _word(self, inside: str) -> Any:
        """Read a value without quotes. Interpolations ``${…}`` are part of it."""
        ends = {",", inside} if inside else {","}
        start, depth = self._at, 0
        while self._at < len(self._text) and (depth or self._text[self._at] not in ends):
            depth += self._text.startswith("${", self._at) - (depth > 0 and self._text[self._at] == "}")
            self._at += 1
        word = self._text[start : self._at].strip()
        if not word and inside:
            raise ConfigError(f"{self._text}: a value is missing before '{self._text[self._at :][:1] or inside}'")
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if _INTEGER.fullmatch(word):
            return int(word)
        return float(word) if _FLOAT.fullmatch(word) else word

    def _list(self) -> list[Any]:
        values = []
        for _ in self._items("]"):
            values.append(self._value("]"))
        return values

    def _dict(self) -> dict[Any, Any]:
        values = {}
        for _ in self._items("}"):
            colon = self._text.find(":", self._at)
            if colon < 0:
                raise ConfigError(f"{self._text}: write a dict as {{key:value}}")
            key, self._at = self._text[self._at : colon].strip().strip("'\""), colon + 1
            values[key] = self._value("}")
        return values

    def _items(self, end: str) -> Any:
        """Yield before each item of a list or dict, and read the commas and brackets around it."""
        self._at += 1
        self._skip_spaces()
        first = True
        while self._text[self._at : self._at + 1] != end:
            if not first and self._text[self._at : self._at + 1] != ",":
                raise ConfigError(f"{self._text}: '{end}' is missing")
            self._at += not first
            self._skip_spaces()
            yield
            first = False
        self._at += 1
        self._skip_spaces()

    def _skip_spaces(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
