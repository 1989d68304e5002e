"""Two configs side by side."""

import os
import textwrap
from typing import Any

from .defaults import get_cfg
from .node import CfgNode
from .values import MISSING, spell

__all__ = ["differences", "resolved"]


def resolved(path: str) -> CfgNode:
    """Return the defaults with a config file, or with the ``config.yaml`` of a run's folder, merged into them.

    A run's own keys are kept, also those that its project adds to the config.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    cfg = get_cfg()
    if os.path.isdir(path):
        path = os.path.join(path, "config.yaml")
        for node in cfg.walk():
            node.set_new_allowed(True)
    cfg.merge_from_file(path)
    return cfg


def differences(old: CfgNode, new: CfgNode, width: int = 80) -> str:
    """Return a line for each key that differs, as ``KEY: old → new``; empty if none does."""
    lines = []
    changed = new.diff(old)
    known = get_cfg().full_keys()
    for key in sorted(changed, key=lambda key: _place(key, known)):
        before, after = changed[key]
        line = f"{key}: {_text(before)} → {_text(after)}"
        if len(line) > width:
            lines.append(f"{key}:")
            lines += [*_wrapped(_text(before), width), *_wrapped(f"→ {_text(after)}", width)]
        else:
            lines.append(line)
    return "\n".join(lines)


def _place(key: str, known: list[str]) -> int:
    """Return the position of a key, or of its section, among the default keys."""
    while key and key not in known:
        key = key.rpartition(".")[0]
    return known.index(key) if key else len(known)


def _text(value: Any) -> str:
    if value is MISSING:
        return "(not set)"
    return repr(value) if isinstance(value, list) else spell(value) if not isinstance(value, str) else f'"{value}"'


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
