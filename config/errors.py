"""Errors of user input, and suggestions for them."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

# The least similarity (0 to 1) of a suggestion.
_CUTOFF = 0.6
# See misspelt().
_LONG = 8


class ConfigError(ValueError):
    """Bad user input: a key, value, file, name or argument. Tools print the message and exit with 2."""


class UnknownKeyError(ConfigError, KeyError):
    """An unknown config key or name of a registry."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, quotes and escapes included.
        return str(self.args[0]) if self.args else ""


class MismatchError(ConfigError, TypeError):
    """What the data, the model or the loss give does not fit the others, or the config."""


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn any error of a ``load_state_dict`` into a :class:`ConfigError`: a wrong state raises all kinds of errors."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded ({type(error).__name__}: {first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return printable(lines[0][:200]) if lines else type(error).__name__


def printable(text: str) -> str:
    """Escape control characters in text from a file, so that it can be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def place_of(error: BaseException) -> str:
    """Return where an error was raised, such as ``" (nets.py:12)"``; empty if that is not in a file of the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    module, path = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code.co_filename
    is_library = "site-packages" in path or path.startswith((sys.base_prefix, "<"))
    if is_library or (module.startswith("hookline.") and not module.startswith("hookline.configs.")):
        return ""
    return f" ({os.path.basename(path)}:{trace.tb_lineno})"


class UnknownNameError(UnknownKeyError, ImportError):
    """The name of a module, or of an object in a module, that does not exist."""


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Suggest the most similar candidate.

    Case is ignored. Dotted candidates are also compared by their last part, which finds a key in another section.

    Args:
        name: what the user wrote.
        candidates: the valid names.

    Returns:
        ``"; did you mean 'X'?"``, or ``""`` if nothing is similar.
    """
    candidates = list(candidates)
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
    if not best:
        longer = [str(one) for one in candidates if len(wanted) > 1 and str(one).lower().startswith(wanted)]
        best = min(longer, key=len, default="")
    return f"; did you mean '{best}'?" if best else ""


def misspelt(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that ``name`` probably means; empty if it is another name.

    Case is ignored. One letter may be missing, added, wrong or swapped with the next one; two in a candidate of eight
    letters or more, since shorter names are often similar by chance.

    Args:
        name: what the user wrote.
        candidates: the valid names.
    """
    edits, near = min(((_edits(name.lower(), one.lower()), one) for one in candidates), default=(3, ""))
    return near if edits <= (2 if len(near) >= _LONG else 1) else ""


def suggest_file(path: str) -> str:
    """Suggest an existing file or folder for a missing path, as :func:`suggest`."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):  # the folder may be misspelt
        path, folder = folder, os.path.dirname(folder)
    near = suggest(os.path.basename(path), os.listdir(folder or "."))
    return near.replace("'", f"'{os.path.join(folder, '')}", 1)


def _similarity(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    # The upper bounds are cheap and rule out most pairs.
    if matcher.real_quick_ratio() < _CUTOFF or matcher.quick_ratio() < _CUTOFF:
        return 0.0
    return matcher.ratio()


def _edits(a: str, b: str) -> int:
    """The number of letters to insert, delete, replace or swap with the next one, to turn ``a`` into ``b``."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a):
        before, last, row = row, before, [i + 1]
        for j, other in enumerate(b):
            row.append(min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1))
            if i and j and letter == b[j - 1] and a[i - 1] == other:
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]
