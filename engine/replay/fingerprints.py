"""Read and compare the files of the hook ``Fingerprints``."""

import json
import os
from collections.abc import Mapping
from typing import Any

from ...config import ConfigError
from ...hooks.writers.fingerprints import FINGERPRINTS_FILE

__all__ = ["compare_fingerprints", "fingerprints_of"]


def fingerprints_of(run: str) -> dict[int, dict[str, str]]:
    """Return the digests of a run by iteration and name; none if it has no file.

    Raises:
        ConfigError: the file is damaged.
    """
    path = os.path.join(run, FINGERPRINTS_FILE)
    rows: dict[int, dict[str, str]] = {}
    if not os.path.isfile(path):
        return rows
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # the run is writing it
                break
            try:
                row = json.loads(line)
                rows[int(row.pop("iteration"))] = row
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{path}: line {number} is damaged: {line[:60]!r}; remove the line") from None
    return rows


def compare_fingerprints(run: Mapping[int, Any], other: Mapping[int, Any]) -> dict[str, Any]:
    """Compare the digests of two runs.

    Returns:
        ``lines``: how many iterations both have; ``last_equal``: an iteration, -1 if there is none;
        ``first_difference``: None, or ``iteration`` and ``in``, the names.
    """
    found: dict[str, Any] = {"lines": len(run.keys() & other.keys()), "last_equal": -1, "first_difference": None}
    for iteration in sorted(run.keys() & other.keys()):
        names = [name for name, value in run[iteration].items() if other[iteration].get(name, value) != value]
        if names:
            found["first_difference"] = {"iteration": iteration, "in": names}
            break
        found["last_equal"] = iteration
    return found
