"""Describes the content of a checkpoint, and the differences between two, for people and as JSON."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import yaml
from torch.utils._pytree import tree_leaves

from ...config import CfgNode, ConfigError, get_cfg
from ...config.errors import printable
from ..checkpoint.weights import averaged_weights, choose_weights, find_checkpoint, read_checkpoint

__all__ = ["compare_checkpoints", "hash_weights", "inspect_checkpoint", "report"]

_SHOWN = 20  # lines of each list


def hash_weights(weights: Mapping[str, Any]) -> str:
    """Return the sha256 of weights' names, dtypes, shapes and bytes.

    Two models have the same one exactly if their weights are equal bit for bit, on any device.

    Args:
        weights: for example ``model.state_dict()``; only its tensors count.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            digest.update(_bits(value).numpy().data)
    return digest.hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a uint8 tensor of shape (bytes,) on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def inspect_checkpoint(path: str) -> dict[str, Any]:
    """Describe the content of a checkpoint.

    Args:
        path: see :func:`~hookline.engine.checkpoint.weights.find_checkpoint`.

    Returns:
        A dict for JSON: ``file``; ``megabytes`` on disk; ``iteration`` and ``epoch`` (None if unknown); ``weights``
        and ``averaged`` (see below; None if there are none); ``optimizer`` (kind, state tensors, megabytes; or None);
        ``hooks`` (the keys of each hook's state); ``config`` (default and value of each changed key). Weights are
        described by count, elements, megabytes, dtypes and sha256.

    Raises:
        ConfigError: there is no such file, it is damaged, or it is not a checkpoint.
    """
    path = find_checkpoint(path)
    checkpoint = read_checkpoint(path, mmap=os.path.isfile(path))
    averaged, cfg = averaged_weights(checkpoint), _config(checkpoint, path)
    size = os.path.getsize(path) if os.path.isfile(path) else sum(e.stat().st_size for e in os.scandir(path))
    iteration, epoch = part_of(checkpoint, "trainer", "iteration"), part_of(checkpoint, "trainer", "data", "epoch")
    if iteration is None:
        iteration = checkpoint.get("iteration")
    hooks = part_of(checkpoint, "trainer", "hooks")
    optimizer: Any = part_of(checkpoint, "trainer", "optimizer") or checkpoint.get("optimizer")
    if isinstance(optimizer, Mapping):
        states = [one.get("state", {}) for one in optimizer.get("optimizers", [optimizer])]
        tensors = [value for value in tree_leaves(states) if isinstance(value, torch.Tensor)]
        kind = part_of(cfg, "SOLVER", "OPTIMIZER", "NAME") or part_of(cfg, "SOLVER", "OPTIMIZER")
        if "names" in optimizer:  # an OptimizerList
            kind = " and ".join(optimizer["names"])
        optimizer = {"kind": kind, "tensors": len(tensors), "megabytes": _megabytes(tensors)}
    else:
        optimizer = None
    return {
        "file": path,
        "megabytes": size / 1e6,
        "iteration": iteration if type(iteration) is int else None,
        "epoch": epoch if type(epoch) is int else None,
        "weights": _describe_weights(_tensors(path, checkpoint["model"])),
        "averaged": _describe_weights(_tensors(path, averaged)) if averaged else None,
        "optimizer": optimizer,
        "hooks": {
            str(key): sorted(map(str, state)) if isinstance(state, Mapping) else []
            for key, state in (hooks.items() if isinstance(hooks, Mapping) else ())
        },
        "config": {} if cfg is None else _pairs(cfg.diff(get_cfg())),
    }


def part_of(value: Any, *keys: str) -> Any:
    """Return a value inside nested mappings; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _tensors(path: str, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among weights.

    Raises:
        ConfigError: a tensor is far larger than what the file holds of it.
    """
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        held = value.untyped_storage().nbytes()
        if value.nbytes > max(held, 1 << 30):
            raise ConfigError(
                f"{path}: the weight {name} of shape {tuple(value.shape)} takes {value.nbytes:,} bytes in memory, and "
                f"the file holds {held:,} of them: it was saved as an expanded view. Save value.clone(), if it is yours"
            )
    return tensors


def _describe_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "count": len(tensors),
        "elements": sum(value.numel() for value in tensors.values()),
        "megabytes": _megabytes(tensors.values()),
        "dtypes": sorted({_dtype(value) for value in tensors.values()}),
        "sha256": hash_weights(tensors),
    }


def _megabytes(tensors: Any) -> float:
    return sum(value.nbytes for value in tensors) / 1e6


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _config(checkpoint: Mapping[str, Any], path: str) -> CfgNode | None:
    """Return the config in a run's checkpoint; keys that it does not have get their defaults."""
    text = part_of(checkpoint, "trainer", "run", "config")
    if not isinstance(text, str):
        return None
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    try:
        cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: its config cannot be read: {error}") from error
    return cfg


def _pairs(differences: Mapping[str, Any]) -> dict[str, list[Any]]:
    plain = (str, int, float, bool, type(None))
    return {
        key: [value if isinstance(value, plain) else str(value) for value in values]
        for key, values in differences.items()
    }


# ---------------------------------------------------------------------------- comparison


def compare_checkpoints(path: str, other: str, *, weights_from: str = "model") -> dict[str, Any]:
    """Compare two checkpoints.

    Args:
        path, other: see :func:`~hookline.engine.checkpoint.weights.find_checkpoint`.
        weights_from: which weights of each: see :func:`~hookline.engine.checkpoint.weights.choose_weights`.

    Returns:
        A dict for JSON: ``equal``: whether the weights are equal bit for bit; ``added`` and ``missing``: names of
        weights that only the second or only the first has; ``shapes`` and ``dtypes``: both, where they differ;
        ``changed``: (name, largest and mean absolute difference), largest first; ``same``: how many are equal;
        ``config``: both values of each key that differs.

    Raises:
        ConfigError: one of them cannot be read.
    """
    first, second = (_read(one, weights_from) for one in (path, other))
    old, new = first.pop("model"), second.pop("model")
    found: dict[str, Any] = {
        "files": [path, other],
        "added": sorted(new.keys() - old.keys()),
        "missing": sorted(old.keys() - new.keys()),
        "shapes": {},
        "dtypes": {},
        "same": 0,
    }
    changed = []
    for name in (name for name in old if name in new):
        a, b = old[name], new[name]
        if a.shape != b.shape:
            found["shapes"][name] = [list(a.shape), list(b.shape)]
        elif a.dtype != b.dtype:
            found["dtypes"][name] = [_dtype(a), _dtype(b)]
        elif torch.equal(_bits(a), _bits(b)):
            found["same"] += 1
        else:
            wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
            difference = (a.to(wide) - b.to(wide)).abs()
            changed.append([name, float(difference.max()), float(difference.mean())])
    # NaN counts as the largest difference.
    found["changed"] = sorted(changed, key=lambda one: -one[1] if one[1] == one[1] else float("-inf"))
    found["equal"] = not any(found[key] for key in ("added", "missing", "shapes", "dtypes", "changed"))
    cfg, other_cfg = _config(first, path), _config(second, other)
    found["config"] = _pairs(other_cfg.diff(cfg)) if cfg is not None and other_cfg is not None else {}
    return found


def _read(path: str, weights_from: str) -> dict[str, Any]:
    path = find_checkpoint(path)
    checkpoint = read_checkpoint(path, mmap=os.path.isfile(path))
    try:
        weights, _ = choose_weights(checkpoint, weights_from)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return {**checkpoint, "model": _tensors(path, weights)}


# ---------------------------------------------------------------------------- text


def report(checkpoint: str, other: str | None, weights_from: str, as_json: bool) -> tuple[bool, str]:
    """Verify and describe a checkpoint, or compare two.

    Args:
        checkpoint: a file or folder.
        other: a second one, or None.
        weights_from: "model" or "averaged", the weights to compare.
        as_json: return JSON.

    Returns:
        Whether all is well (undamaged, or equal weights), and the text: a line with the result, and YAML.

    Raises:
        ConfigError: a path does not exist.
    """
    for path in filter(None, (checkpoint, other)):
        find_checkpoint(path)  # a missing path is bad input; one that cannot be read is damaged
    try:
        if other:
            found = compare_checkpoints(checkpoint, other, weights_from=weights_from)
            result = "equal, bit for bit" if found["equal"] else "different"
            title = f"weights of {checkpoint} and {other}: {result}"
        else:
            found = inspect_checkpoint(checkpoint)
            title = f"{found['file']}: undamaged"
    except ConfigError as error:
        if as_json:
            return False, json.dumps({"whole": False, "problem": str(error)})
        return False, "\n".join(map(printable, str(error).splitlines()))
    if as_json:
        return found.get("equal", True), json.dumps(found, indent=1)
    shown = {key: _shortened(value) for key, value in found.items() if value not in (None, [], {})}
    text = yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=10_000)
    return found.get("equal", True), f"{printable(title)}\n{text.rstrip()}"


def _shortened(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _SHOWN:
        return [*value[:_SHOWN], f"... and {len(value) - _SHOWN} more"]
    return value
