"""Errors that a user's input causes, and the suggestions that go with them."""

import os
from collections.abc import Iterable
from difflib import SequenceMatcher

# Below this similarity (0 to 1) a suggestion confuses more than it helps.
_CUTOFF = 0.6


class ConfigError(ValueError):
    """Bad input of a user: a key, a value, a file, a name, an argument. Tools print its message and exit with 2."""


class UnknownKeyError(ConfigError, KeyError):
    """A config key or a registry's name that does not exist."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, quotes and escapes included.
        return str(self.args[0]) if self.args else ""


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Propose the candidate that was most likely meant.

    Case does not count. A dotted candidate is also compared by its last component, so that a key under the
    wrong section is found.

    Args:
        name: what the user wrote.
        candidates: the valid names.

    Returns:
        ``"; did you mean 'X'?"``, to be put at the end of a clause, or ``""`` when nothing is near.
    """
    wanted = str(name).lower()
    wanted_last = wanted.rpartition(".")[2]
    best, best_score = "", (_CUTOFF, 0.0)
    for candidate in candidates:
        lower = str(candidate).lower()
        whole = _similarity(wanted, lower)
        last = _similarity(wanted_last, lower.rpartition(".")[2]) if "." in lower else 0.0
        score = (max(whole, last), whole)
        if score > best_score:
            best, best_score = str(candidate), score
    return f"; did you mean '{best}'?" if best else ""


def suggest_file(path: str) -> str:
    """Propose the file or folder that was most likely meant by a path that is not there: as :func:`suggest`."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):  # the folder may be what is misspelt
        path, folder = folder, os.path.dirname(folder)
    near = suggest(os.path.basename(path), os.listdir(folder or "."))
    return near.replace("'", f"'{os.path.join(folder, '')}", 1)


def _similarity(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    # The upper bounds are cheap, and nearly every pair stops at them.
    if matcher.real_quick_ratio() < _CUTOFF or matcher.quick_ratio() < _CUTOFF:
        return 0.0
    return matcher.ratio()
