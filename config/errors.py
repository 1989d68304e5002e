"""Errors of user input, and suggestions for them."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

# The least similarity (0 to 1) of a suggestion.
_SIMILAR = 0.6
# See misspelt().
_LONG = 8


class ConfigError(ValueError):
    """Bad user input: a key, value, file, name or argument. Tools print the message and exit with ``exit_code``."""

    exit_code = 2
    """1 if steps were trained before the error: then a run can be resumed."""


class UnknownKeyError(ConfigError, KeyError):
    """An unknown config key or name of a registry."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, quotes and escapes included.
        return str(self.args[0]) if self.args else ""


class MismatchError(ConfigError, TypeError):
    """What the data, the model or the loss give does not fit the others, or the config."""


class NoStorageError(RuntimeError, AssertionError):
    """``get_event_storage()`` was called outside of a run. detectron2 raises an AssertionError."""


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
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


def error_text(error: BaseException) -> str:
    """Return what a command prints for an error: its message and notes, without control characters from files."""
    # That of a loader's worker has the worker's traceback before the message.
    text = str(error).rpartition("MismatchError: ")[2].rstrip()
    lines = "\n".join([f"error: {text}", *getattr(error, "__notes__", ())]).split("\n")
    return "".join(f"{printable(line)}\n" for line in lines)


def raised_in(error: BaseException) -> str:
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
    candidates = list(map(str, candidates))

    def likeness(candidate: str) -> tuple[float, float]:
        whole = _similarity(name, candidate)
        last = _similarity(name.rpartition(".")[2], candidate.rpartition(".")[2]) if "." in candidate else 0.0
        return max(whole, last), whole

    best = max(candidates, key=likeness, default="")
    if likeness(best)[0] < _SIMILAR:
        longer = [one for one in candidates if len(name) > 1 and one.lower().startswith(name.lower())]
        best = min(longer, key=len, default="")
    return f"; did you mean '{best}'?" if best else ""


def misspelt(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that ``name`` probably means; empty if it is another name. Case is ignored.

    One letter may be missing, added, wrong or swapped with the next one; two in a candidate of eight letters or more,
    since shorter names are often similar by chance.

    Args:
        name: what the user wrote.
        candidates: the valid names.
    """

    def unmatched(candidate: str) -> int:  # letters; a wrong letter is one in each name
        return round((1 - _similarity(name, candidate)) * (len(name) + len(candidate)))

    near = min(candidates, key=unmatched, default="")
    most = 2 if len(near) >= _LONG else 1
    return near if unmatched(near) <= 2 * most and abs(len(name) - len(near)) <= most else ""


def suggest_file(path: str) -> str:
    """Suggest an existing file or folder for a missing path, as :func:`suggest`."""
    if os.path.exists(path):
        return ""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):  # the folder may be misspelt
        path, folder = folder, os.path.dirname(folder)
    near = suggest(os.path.basename(path), os.listdir(folder or "."))
    return near.replace("'", f"'{os.path.join(folder, '')}", 1)


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()
