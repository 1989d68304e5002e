"""A config as hyperparameters, for TensorBoard and trackers."""

from collections.abc import Mapping
from typing import Any

from ...config.yaml_files import dump_text

__all__ = ["as_text", "flatten", "plain"]


def plain(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a deep copy of nested settings: dicts, lists, numbers, strings, bools and None. Others become strings."""
    return {str(key): _plain(value) for key, value in config.items()}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """Return the settings by full keys, such as ``{"SOLVER.BASE_LR": 0.1}``. Lists, bools and None become strings."""
    flat: dict[str, int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if type(value) in (int, float, str) else str(value)
    return flat


def as_text(config: Mapping[str, Any]) -> str:
    """Return the settings as YAML; empty if there are none."""
    return dump_text(config) if config else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)
