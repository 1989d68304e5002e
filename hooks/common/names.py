"""Names of metrics."""

from collections.abc import Mapping
from typing import Any

__all__ = ["flatten_names"]


def flatten_names(results: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested results: ``{"digits_test": {"accuracy": 0.99}}`` becomes ``{"digits_test/accuracy": 0.99}``."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat.update(flatten_names(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
