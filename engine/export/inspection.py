"""Describes the content of a checkpoint, and the differences between two."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...config import CfgNode, ConfigError, get_cfg
from ..checkpoint.weights import averaged_weights, choose_weights, find_checkpoint, read_checkpoint

__all__ = ["compare_checkpoints", "hash_weights", "inspect_checkpoint"]

_MEGABYTE = 1e6


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
        ``hooks`` (the keys of each hook's state); ``config`` (default and value of each changed key); ``other``
        (names of other entries). Weights are described by count, elements, megabytes, dtypes, sha256, and count and
        megabytes of each top-level module.

    Raises:
        ConfigError: there is no such file, it is damaged, or it is not a checkpoint.
    """
    path = find_checkpoint(path)
    checkpoint = read_checkpoint(path, mmap=os.path.isfile(path))
    trainer = checkpoint.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    averaged = averaged_weights(checkpoint)
    data, hooks = trainer.get("data"), trainer.get("hooks")
    cfg = _config(checkpoint, path)
    return {
        "file": path,
        "megabytes": _size(path) / _MEGABYTE,
        "iteration": _number(trainer.get("iteration", checkpoint.get("iteration"))),
        "epoch": _number(data.get("epoch")) if isinstance(data, Mapping) else None,
        "weights": _describe_weights(checkpoint["model"]),
        "averaged": _describe_weights(averaged) if averaged else None,
        "optimizer": _describe_optimizer(trainer.get("optimizer", checkpoint.get("optimizer")), cfg),
        "hooks": {
            str(key): sorted(map(str, state)) if isinstance(state, Mapping) else []
            for key, state in (hooks.items() if isinstance(hooks, Mapping) else ())
        },
        "config": _config_changes(cfg),
        "other": sorted(str(key) for key in {**checkpoint, **trainer} if key not in _DESCRIBED),
    }


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


_DESCRIBED = {"model", "trainer", "iteration", "optimizer", "hooks"}


def _size(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def _describe_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    modules: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, value in tensors.items():
        modules[name.split(".")[0]].append(value)
    return {
        "count": len(tensors),
        "elements": sum(value.numel() for value in tensors.values()),
        "megabytes": _megabytes(tensors.values()),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()}),
        "sha256": hash_weights(tensors),
        "modules": {name: {"count": len(values), "megabytes": _megabytes(values)} for name, values in modules.items()},
    }


def _megabytes(tensors: Any) -> float:
    return sum(value.nbytes for value in tensors) / _MEGABYTE


def _describe_optimizer(state: Any, config: CfgNode | None) -> dict[str, Any] | None:
    if not isinstance(state, Mapping):
        return None
    states = [one.get("state", {}) for one in state.get("optimizers", [state])]
    tensors = [value for _, value in _leaves(states) if isinstance(value, torch.Tensor)]
    kind = None if config is None else config.SOLVER.OPTIMIZER
    kind = kind.NAME if isinstance(kind, CfgNode) else kind
    if "names" in state:  # an OptimizerList
        kind = " and ".join(state["names"])
    return {"kind": kind, "tensors": len(tensors), "megabytes": _megabytes(tensors)}


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def _config(checkpoint: Mapping[str, Any], path: str) -> CfgNode | None:
    """Return the config in a run's checkpoint; keys that it does not have get their defaults."""
    trainer = checkpoint.get("trainer")
    run = trainer.get("run") if isinstance(trainer, Mapping) else None
    text = run.get("config") if isinstance(run, Mapping) else None
    if not isinstance(text, str):
        return None
    cfg = get_cfg()
    cfg.set_new_allowed(True)
    try:
        cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: its config cannot be read: {error}") from error
    return cfg


def _config_changes(cfg: CfgNode | None) -> dict[str, list[Any]]:
    return {} if cfg is None else _pairs(cfg.diff(get_cfg()))


def _pairs(differences: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [_plain(before), _plain(after)] for key, (before, after) in differences.items()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


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
        ``config``: both values of each key that differs; ``state``: places that differ in the trainers' state.

    Raises:
        ConfigError: one of them cannot be read.
    """
    first, second = (_read(one, weights_from) for one in (path, other))
    old, new = first.pop("model"), second.pop("model")
    report: dict[str, Any] = {
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
            report["shapes"][name] = [list(a.shape), list(b.shape)]
            continue
        if a.dtype != b.dtype:
            report["dtypes"][name] = [str(value.dtype).removeprefix("torch.") for value in (a, b)]
        elif torch.equal(_bits(a), _bits(b)):
            report["same"] += 1
            continue
        changed.append([name, *_distance(a, b)])
    # NaN counts as the largest difference.
    report["changed"] = sorted(changed, key=lambda one: -one[1] if one[1] == one[1] else float("-inf"))
    report["equal"] = not any(report[key] for key in ("added", "missing", "shapes", "dtypes", "changed"))
    cfg, other_cfg = _config(first, path), _config(second, other)
    report["config"] = _pairs(other_cfg.diff(cfg)) if cfg is not None and other_cfg is not None else {}
    both_runs = "trainer" in first and "trainer" in second
    report["state"] = _differing_places(first["trainer"], second["trainer"]) if both_runs else []
    return report


def _read(path: str, weights_from: str) -> dict[str, Any]:
    path = find_checkpoint(path)
    checkpoint = read_checkpoint(path, mmap=os.path.isfile(path))
    try:
        weights, _ = choose_weights(checkpoint, weights_from)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return {**checkpoint, "model": {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}}


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return the largest and mean absolute difference of two tensors of the same shape."""
    if not a.numel():
        return 0.0, 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    return float(difference.max()), float(difference.mean())


def _differing_places(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    old, new = dict(_leaves(first)), dict(_leaves(second))
    places = [place for place in old if place not in new] + [place for place in new if place not in old]
    places += [place for place in old if place in new and not _same(old[place], new[place])]
    return sorted(places)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return type(a) is type(b) and (a == b or a != a)
