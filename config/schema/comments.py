"""Comments of the keys, read from the source of ``config/defaults.py``, the only place where keys are explained."""

import re

__all__ = ["key_comments"]

_KEY = re.compile(r"_C\.([A-Z][A-Z0-9_.]*) = (CN\()?")


def key_comments(source: str) -> dict[str, str]:
    """Return the comment of each key.

    A comment belongs to the key below it. It is also that of the next keys without a blank line or a comment between:
    those in the key's section, if the key is a section; else those beside it.

    Args:
        source: the text of ``config/defaults.py``.

    Returns:
        ``{"SOLVER.BASE_LR": "Learning rate ...", ...}``; keys without a comment are left out.
    """
    comments: dict[str, str] = {}
    block: list[str] = []
    comment, scope = "", ""
    for line in source.splitlines():
        if line.startswith("# ---"):
            block = []
        elif line.startswith("#"):
            block.append(line.lstrip("# ").rstrip())
        elif match := _KEY.match(line):
            key, is_section = match[1], bool(match[2])
            if block:
                comment = " ".join(block)
                scope = key if is_section and "ARGS" not in key else key.rpartition(".")[0]
            if comment and (block or not scope or key.startswith(f"{scope}.")):
                comments[key] = comment
            block = []
        elif line[:1] not in (" ", ")"):  # the end of a key's value may be on a line of its own
            block, comment = [], ""
    return comments
