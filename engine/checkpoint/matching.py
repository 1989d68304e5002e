"""Loads weights into a model: matches their names, and reports what does not fit."""

import logging
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common.tensors import is_sharded, shard_like
from .state import plain_name

__all__ = ["LoadReport", "load_weights", "plain_name", "split_query"]

# Prefixes of names in other checkpoints: DistributedDataParallel, Lightning, DeepSpeed.
_PREFIX = re.compile(r"(module|model|_forward_module)\.")
_MAX_LINES = 40


def split_query(path: str) -> tuple[str, bool]:
    """Split ``weights.pth?matching_heuristics=True``, as detectron2's configs have it.

    Returns:
        The path without this query, and whether names of weights are matched by their ends.

    Raises:
        ConfigError: a local path has another query.
    """
    base, mark, query = path.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    by_suffix = options.pop("matching_heuristics", "")
    if not mark or os.path.exists(path) or (options and "://" in path):
        return path, False
    if options or by_suffix not in ("True", "False"):
        raise ConfigError(f"{path}: a path may end with ?matching_heuristics=True, but not with ?{query}")
    return base, by_suffix == "True"


@dataclass(frozen=True)
class LoadReport:
    """How the weights of a file matched a model.

    Attributes:
        total: number of the model's weights, parameters and buffers.
        loaded: how many of them were loaded.
        missing: weights of the model that the file does not hold.
        unexpected: weights of the file that the model does not have.
        mismatched: (name, in the file, in the model) where the shape differs, or complex meets real.
        converted: number of converted weights, by (dtype in the file, dtype in the model).
        prefix: prefix that was removed from the file's names.
    """

    total: int
    loaded: int
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, Any, Any]] = field(default_factory=list)
    converted: dict[tuple[str, str], int] = field(default_factory=dict)
    prefix: str = ""

    @property
    def exact(self) -> bool:
        """Whether file and model have the same weights with the same shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """Describe in one line what was loaded."""
        notes = [f"prefix {self.prefix!r} removed"] if self.prefix else []
        notes += [f"{count} converted from {old} to {new}" for (old, new), count in self.converted.items()]
        return f"{self.loaded} of the model's {self.total} weights" + (f" ({'; '.join(notes)})" if notes else "")

    def differences(self) -> list[str]:
        """Describe what does not fit: one text per kind of difference, names grouped by module."""
        texts = []
        if self.missing:
            texts.append(
                f"weights not in the file, left as the model was built ({len(self.missing)}):\n{group(self.missing)}"
            )
        if self.mismatched:
            lines = [f"  {name}: {there} in the file, {own} in the model" for name, there, own in self.mismatched]
            texts.append(f"weights of another shape, left as the model was built ({len(lines)}):\n{_cut(lines)}")
        if self.unexpected:
            texts.append(f"weights not in the model, ignored ({len(self.unexpected)}):\n{group(self.unexpected)}")
        return texts

    def log(self, logger: logging.Logger, path: str, which: str = "model") -> None:
        """Log what was loaded at INFO, and each kind of difference at WARNING.

        Args:
            logger: the logger.
            path: the file.
            which: which weights, as returned by :func:`~hookline.engine.checkpoint.weights.choose_weights`.
        """
        averaged = "" if which == "model" else f", {which}"
        logger.info("Loaded %s from %s%s", self.summary(), path, averaged)
        for text in self.differences():
            logger.warning("%s: %s", path, text)


def load_weights(
    model: nn.Module, weights: Mapping[str, Any], *, path: str = "the file", by_suffix: bool = False
) -> LoadReport:
    """Load weights into a model by name.

    Names that wrappers add (``_orig_mod.``) are ignored on both sides. Prefixes of the file's names (``module.``,
    ``model.``) are removed if more names match then. Numbers are converted to the model's dtype.

    Args:
        model: the model.
        weights: tensors by name, and extra state of modules.
        path: the file, for messages.
        by_suffix: match each name of the model with the longest name of the file that it ends with, as detectron2
            does for checkpoints with ``matching_heuristics``.

    Returns:
        What was loaded, and what does not fit.

    Raises:
        ConfigError: no weight was loaded, or the model refuses them.
    """
    own = model.state_dict(keep_vars=True)  # so that tied weights are one object
    full_names = {plain_name(name): name for name in own}
    prefix = ""
    if by_suffix:
        names = _match_suffixes(weights, full_names)
    else:
        names, prefix = _match_prefixes(weights, full_names)
    state: OrderedDict[str, Any] = OrderedDict()
    mismatched: list[tuple[str, Any, Any]] = []
    converted: Counter[tuple[str, str]] = Counter()
    for name, value in weights.items():
        target = full_names.get(names[name], names[name])
        there = own.get(target)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(there, torch.Tensor) and not is_lazy(there):
            if difference := _difference(value, there):
                mismatched.append((names[name], *difference))
                continue
            if value.dtype != there.dtype:
                converted[_dtype(value), _dtype(there)] += 1
            if is_sharded(there) and not is_sharded(value):
                value = shard_like(value, there)
        state[target] = value
    own_metadata = getattr(own, "_metadata", {})
    state._metadata = _metadata(getattr(weights, "_metadata", {}), own_metadata, prefix)  # type: ignore[attr-defined]
    try:
        incompatible = model.load_state_dict(state, strict=False)
    except Exception as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error

    file_names = {full_names.get(names[name], names[name]): name for name in weights}
    unset = set(incompatible.missing_keys)
    set_ones = {id(value) for name, value in own.items() if name not in unset}
    wrong = {name for name, _, _ in mismatched}
    missing = [
        plain_name(name)
        for name in incompatible.missing_keys
        if id(own.get(name)) not in set_ones and plain_name(name) not in wrong
    ]
    tensors = [name for name, value in own.items() if isinstance(value, torch.Tensor)]
    lost = wrong | set(missing)
    report = LoadReport(
        total=len(tensors),
        loaded=sum(plain_name(name) not in lost for name in tensors),
        missing=missing,
        unexpected=[file_names.get(name, name) for name in incompatible.unexpected_keys],
        mismatched=mismatched,
        converted=dict(converted),
        prefix=prefix,
    )
    if report.total and not report.loaded:
        raise ConfigError(
            f"{path} is a checkpoint of another model: none of its weights has a name and a shape of the model\n"
            + "\n".join(report.differences())
        )
    return report


def _difference(value: Any, own: torch.Tensor) -> tuple[Any, Any] | None:
    """Return the shapes or dtypes, in file and model, that prevent a copy; None if nothing does."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(own.shape)
    if value.shape != own.shape:
        return tuple(value.shape), tuple(own.shape)
    if value.is_complex() and not own.is_complex():
        return _dtype(value), _dtype(own)
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------- names


def _match_prefixes(names: Iterable[str], own: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Map the file's names to the model's. Returns the map and the removed prefix, with which most names match."""
    plain = {name: plain_name(name) for name in names}
    best, most, found, prefix = plain, sum(name in own for name in plain.values()), "", ""
    while True:
        rests = (short[len(prefix) :] for short in plain.values() if short.startswith(prefix))
        start = next(filter(None, map(_PREFIX.match, rests)), None)
        if start is None:
            return best, found
        prefix += start[0]
        stripped = {name: short.removeprefix(prefix) for name, short in plain.items()}
        matches = sum(name in own for name in stripped.values())
        if matches > most and len(set(stripped.values())) == len(stripped):
            best, most, found = stripped, matches, prefix


def _match_suffixes(names: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Map each name of the model to the longest name of the file that it ends with, as detectron2 does.

    Names of the file that several names of the model end with are ambiguous, and stay as they are.
    """
    matched = {name: plain_name(name) for name in names}
    by_plain = {plain: name for name, plain in matched.items()}
    takers = defaultdict(list)
    for name in own:
        parts = name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))
        if suffix := next((suffix for suffix in suffixes if suffix in by_plain), None):
            takers[by_plain[suffix]].append(name)
    return matched | {name: taken[0] for name, taken in takers.items() if len(taken) == 1}


def _metadata(of_file: Mapping[str, Any], of_model: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the modules' versions, which ``load_state_dict()`` uses to convert old weights.

    Without versions in the file (hookline's, safetensors) the model's own are used.
    """
    versions = dict(of_model)
    full_names = {plain_name(f"{name}.") or ".": name for name in of_model}
    for name, value in of_file.items():
        short = plain_name(f"{name}.").removeprefix(prefix) or "."  # the model itself
        if short in full_names:
            versions[full_names[short]] = value
    return versions


# ---------------------------------------------------------------------------- messages


def group(names: Iterable[str]) -> str:
    """List names, one indented line per module: ``backbone.conv1.{bias, weight}``."""
    groups = defaultdict(list)
    for name in names:
        module, _, last = name.rpartition(".")
        groups[module].append(last)
    lines = []
    for module, lasts in groups.items():
        ending = lasts[0] if len(lasts) == 1 else "{" + ", ".join(sorted(lasts)) + "}"
        lines.append(f"  {module}.{ending}" if module else f"  {ending}")
    return _cut(lines)


def _cut(lines: list[str]) -> str:
    rest = len(lines) - _MAX_LINES
    return "\n".join(lines if rest <= 0 else [*lines[:_MAX_LINES], f"  ... and {rest} more lines"])
