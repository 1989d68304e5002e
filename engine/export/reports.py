"""Reports about checkpoints, for people and as JSON."""

import json
from typing import Any

from ...config import ConfigError
from ...config.errors import printable
from ..checkpoint.weights import find_checkpoint
from .inspection import compare_checkpoints, inspect_checkpoint

__all__ = ["report"]

_SHOWN = 20


def report(checkpoint: str, other: str | None, weights_from: str, as_json: bool) -> tuple[bool, str]:
    """Verify and describe a checkpoint, or compare two.

    Args:
        checkpoint: a file or folder.
        other: a second one, or None.
        weights_from: "model" or "averaged", the weights to compare.
        as_json: return JSON.

    Returns:
        Whether all is well (undamaged, or equal weights), and the text.

    Raises:
        ConfigError: a path does not exist.
    """
    for path in filter(None, (checkpoint, other)):
        find_checkpoint(path)  # a missing path is bad input; one that cannot be read is damaged
    try:
        if other:
            found = compare_checkpoints(checkpoint, other, weights_from=weights_from)
        else:
            found = inspect_checkpoint(checkpoint)
    except ConfigError as error:
        if as_json:
            return False, json.dumps({"whole": False, "problem": str(error)})
        return False, "\n".join(map(printable, str(error).splitlines()))
    text = json.dumps(found, indent=1) if as_json else _describe_comparison(found) if other else _describe(found)
    return found.get("equal", True), text


def _describe(report: dict[str, Any]) -> str:
    """Format a report of inspect_checkpoint()."""
    lines = [f"{report['file']}: undamaged, {report['megabytes']:.3g} MB"]
    lines += [f"{name}: {report[name]}" for name in ("iteration", "epoch") if report[name] is not None]
    for name in ("weights", "averaged"):
        if report[name]:
            lines += _describe_weights("averaged weights" if name == "averaged" else name, report[name])
    if report["optimizer"]:
        optimizer = report["optimizer"]
        lines.append(
            f"optimizer: {optimizer['kind'] or 'unknown kind'}, "
            f"{optimizer['tensors']} tensors, {optimizer['megabytes']:.3g} MB"
        )
    if report["hooks"]:
        lines.append("states of hooks:")
        lines += [f"  {name}: {', '.join(entries) or 'empty'}" for name, entries in report["hooks"].items()]
    if report["other"]:
        lines.append(f"also: {', '.join(report['other'])}")
    if report["config"]:
        lines.append("config, where it differs from the defaults:")
        lines += [f"  {key} = {value!r}" for key, (_, value) in report["config"].items()]
    return "\n".join(map(printable, lines))


def _describe_weights(title: str, weights: dict[str, Any]) -> list[str]:
    return [
        f"{title}: {weights['count']} ({weights['elements']:,} numbers, {weights['megabytes']:.3g} MB, "
        f"{', '.join(weights['dtypes'])})",
        f"  sha256 {weights['sha256']}",
        *(f"  {name}: {part['count']}, {part['megabytes']:.3g} MB" for name, part in weights["modules"].items()),
    ]


def _describe_comparison(report: dict[str, Any]) -> str:
    """Format a report of compare_checkpoints()."""
    first, second = report["files"]
    lines = [f"weights of {first} and {second}: {'equal, bit for bit' if report['equal'] else 'different'}"]
    lines += _list(f"only in {second}", report["added"])
    lines += _list(f"only in {first}", report["missing"])
    lines += _list("other shape", [f"{name}: {tuple(a)}, {tuple(b)}" for name, (a, b) in report["shapes"].items()])
    lines += _list("other dtype", [f"{name}: {a}, {b}" for name, (a, b) in report["dtypes"].items()])
    differences = [f"{name}: {largest:.3g}, {mean:.3g}" for name, largest, mean in report["changed"]]
    lines += _list("other values, with the largest and mean absolute difference", differences)
    lines.append(f"equal: {report['same']}")
    lines += _list("config", [f"{key}: {a!r}, {b!r}" for key, (a, b) in report["config"].items()])
    lines += _list("other state of the runs that differs", report["state"])
    return "\n".join(map(printable, lines))


def _list(title: str, items: list[str]) -> list[str]:
    """Format a title with the number of items, and the first items."""
    if not items:
        return []
    rest = [f"  ... and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{title} ({len(items)}):", *(f"  {item}" for item in items[:_SHOWN]), *rest]
