"""Typed attributes of the config, as ``config/defaults.pyi``: editors complete keys, type checkers know their types."""

import textwrap
from collections.abc import Mapping

from ..duration import Duration
from ..kinds import Typed, _OneOf
from ..node import CfgNode

__all__ = ["stub_of"]

_HEAD = """\
# Made by docs/schema.py from config/defaults.py.
from collections.abc import Sequence
from typing import Any, Literal

from .node import CfgNode

_C: Config

def get_cfg() -> Config: ...
"""


def stub_of(cfg: CfgNode, comments: Mapping[str, str]) -> str:
    """Return the text of the stub.

    Keys that are not in it have the type ``Any``: projects add keys of their own.

    Args:
        cfg: the defaults.
        comments: the meaning of each key.
    """
    classes: list[str] = []
    _add_class(cfg, "", comments, classes)
    return _HEAD + "".join(f"\n{text}" for text in classes)


def _add_class(node: CfgNode, path: str, comments: Mapping[str, str], classes: list[str]) -> str:
    """Add the class of a section after those of its own sections; return its name."""
    lines = []
    for name, value in node.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, CfgNode):
            kind = "CfgNode" if value.is_new_allowed() else _add_class(value, key, comments, classes)
        else:
            kind = _kind(value, node.declared(name))
        lines.append(f"    {name}: {kind}")
        if key in comments:
            text = f'"""{comments[key]}{" " if comments[key].endswith(chr(34)) else ""}"""'
            lines += textwrap.wrap(text, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    own = "_" + path.replace(".", "_") if path else "Config"
    if not path:
        lines.append("    def clone(self) -> Config: ...")
    classes.append("\n".join([f"class {own}(CfgNode):", *lines, ""]))
    return own


def _kind(value: object, declared: Typed | None) -> str:
    kinds = {list: "list[Any]", tuple: "Sequence[Any]", type(None): "Any"}
    if declared is None:
        return kinds.get(type(value), type(value).__name__)
    if declared.kind == Duration.parse_lengths:
        return "Sequence[int | str]"
    if declared.kind in (Duration.parse, Duration.parse_length, Duration.parse_part, Duration.parse_time):
        return "float | str" if declared.kind == Duration.parse_part else "int | str"
    if isinstance(declared.kind, _OneOf):
        return f"Literal[{', '.join(map(_quoted, declared.kind.choices))}]"
    kind = kinds.get(declared.type, declared.type.__name__)
    return f"{kind} | None" if declared.optional or declared.default is None else kind


def _quoted(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)
