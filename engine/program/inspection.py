"""Describes the content of a checkpoint for people and as JSON."""

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
from ...config.values import MISSING
from ..checkpoint.find_checkpoint import find_checkpoint
from ..checkpoint.weights import find_averaged, read_checkpoint


def inspect_checkpoint(path: str) -> dict[str, Any]:
    """Describe the content of a checkpoint.

    Args:
        path: see :func:`~hookline.engine.checkpoint.find_checkpoint.find_checkpoint`.

    Returns:
        A dict for JSON: ``file``; ``megabytes`` on disk; ``iteration`` and ``epoch`` (None if unknown); ``weights``
        and ``averaged`` (see below; None if there are none); ``optimizer`` (state tensors, megabytes; or None);
        ``hooks`` (those with a state); ``config`` (default and value of each changed key). Weights are described by
        count, elements, megabytes, dtypes and sha256.

    Raises:
        ConfigError: there is no such file, it is corrupt, or it is not a checkpoint.
    """
    path = find_checkpoint(path)
    checkpoint = read_checkpoint(path, mmap=os.path.isfile(path))
    size = os.path.getsize(path) if os.path.isfile(path) else sum(e.stat().st_size for e in os.scandir(path))
    iteration, epoch = part_of(checkpoint, "trainer", "iteration"), part_of(checkpoint, "trainer", "data", "epoch")
    if iteration is None:
        iteration = checkpoint.get("iteration")
    averaged, hooks = find_averaged(checkpoint), part_of(checkpoint, "trainer", "hooks")
    optimizer = _tensors(part_of(checkpoint, "trainer", "optimizer") or checkpoint.get("optimizer"))
    text, config = part_of(checkpoint, "trainer", "run", "config"), {}
    if isinstance(text, str):
        try:
            config = CfgNode.load_cfg(text).diff(get_cfg())
        except ConfigError as error:
            raise ConfigError(f"{path}: its config cannot be read: {error}") from error
    found = {
        "file": path,
        "megabytes": size / 1e6,
        "iteration": iteration if type(iteration) is int else None,
        "epoch": epoch if type(epoch) is int else None,
        "weights": _describe_weights(checkpoint["model"]),
        "averaged": _describe_weights(averaged[1]) if averaged else None,
        "optimizer": {"tensors": len(optimizer), "megabytes": _megabytes(optimizer)} if optimizer else None,
        "hooks": list(map(str, hooks)) if isinstance(hooks, Mapping) else [],
        "config": {key: pair for key, pair in config.items() if pair[1] is not MISSING},
    }
    as_json: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return as_json


def part_of(value: object, *keys: str) -> Any:
    """Return a value inside nested mappings; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _tensors(state: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(state) if isinstance(value, torch.Tensor)]


def _describe_weights(weights: Mapping[str, object]) -> dict[str, Any]:
    tensors = _tensors(weights)
    return {
        "count": len(tensors),
        "elements": sum(value.numel() for value in tensors),
        "megabytes": _megabytes(tensors),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in tensors}),
        "sha256": hash_weights(weights),
    }


def hash_weights(weights: Mapping[str, object]) -> str:
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
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _megabytes(tensors: list[torch.Tensor]) -> float:
    return sum(value.nbytes for value in tensors) / 1e6


def report(checkpoint: str, as_json: bool) -> tuple[bool, str]:
    """Verify and describe a checkpoint.

    Args:
        checkpoint: a file or folder.
        as_json: return JSON.

    Returns:
        Whether it is intact, and the text: a line with the result, and YAML.

    Raises:
        ConfigError: the path does not exist.
    """
    find_checkpoint(checkpoint)  # a missing path is bad input; one that cannot be read is corrupt
    try:
        found = inspect_checkpoint(checkpoint)
    except ConfigError as error:
        if as_json:
            return False, json.dumps({"whole": False, "problem": str(error)})
        return False, "\n".join(map(printable, str(error).splitlines()))
    if as_json:
        return True, json.dumps(found, indent=1)
    shown = {key: value for key, value in found.items() if value not in (None, [], {})}
    text = yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=10_000)
    return True, f"{printable(found['file'])}: intact\n{text.rstrip()}"
