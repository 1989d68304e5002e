"""Giving a model the weights that were read for it: names are matched, and what does not fit is reported."""

import itertools
import logging
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError

__all__ = ["LoadReport", "load_weights", "plain_name"]

# What wraps a model, or its parts, adds to the names of weights: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What others' checkpoints have before the names: DistributedDataParallel, Lightning's modules, DeepSpeed.
_PREFIXES = ("module.", "model.", "_forward_module.")
_MAX_LINES = 40


def plain_name(name: str) -> str:
    """The name of a weight in the model as the user wrote it, without what wraps it or parts of it."""
    return _WRAPPERS.sub("", name)


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights of a file.

    Attributes:
        total: weights of the model, parameters and buffers.
        loaded: how many of them were set.
        missing: the model's that the file does not hold.
        unexpected: the file's that the model does not have, by their names in the file.
        mismatched: (name, in the file, in the model) where the shape differs, or the kind of number.
        converted: how many were converted, by (dtype in the file, dtype in the model).
        prefix: what was left out of the file's names to match them.
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
        """Whether file and model have the same weights, in the same shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """What was loaded, in a line."""
        notes = [f"names taken without {self.prefix!r}"] if self.prefix else []
        notes += [f"{count} converted from {old} to {new}" for (old, new), count in self.converted.items()]
        return f"{self.loaded} of the model's {self.total} weights" + (f" ({'; '.join(notes)})" if notes else "")

    def differences(self) -> list[str]:
        """What does not fit: a text for each kind of difference, names grouped by module."""
        texts = []
        if self.missing:
            texts.append(
                f"weights not in the file, left as the model was built ({len(self.missing)}):\n{group(self.missing)}"
            )
        if self.mismatched:
            lines = [f"  {name}: {there} in the file, {own} in the model" for name, there, own in self.mismatched]
            texts.append(f"weights of another shape, left as the model was built ({len(lines)}):\n{_cut(lines)}")
        if self.unexpected:
            texts.append(f"weights not in the model, left out ({len(self.unexpected)}):\n{group(self.unexpected)}")
        return texts

    def log(self, logger: logging.Logger, path: str, which: str = "model") -> None:
        """Tell it: what was loaded at INFO, each kind of difference at WARNING.

        Args:
            logger: where.
            path: the file's.
            which: of its weights, as :func:`~hookline.engine.checkpoint.weights.choose_weights` calls them.
        """
        averaged = "" if which == "model" else f", {which}"
        logger.info("Loaded %s from %s%s", self.summary(), path, averaged)
        for text in self.differences():
            logger.warning("%s: %s", path, text)


def load_weights(
    model: nn.Module, weights: Mapping[str, Any], *, path: str = "the file", by_suffix: bool = False
) -> LoadReport:
    """Set a model's weights to those of the same names, whatever wraps the model or wrapped the one they are of.

    Wrappers' parts of names (``_orig_mod.``) are left out on both sides. Prefixes of the file's names (``module.``,
    ``model.``) are left out if more names match then. Numbers are converted to the model's dtype.

    Args:
        model: the model.
        weights: tensors by name, and extra state of modules.
        path: the file they are of, for messages.
        by_suffix: match a name of the model with the longest name of the file that it ends with, as detectron2 does
            for checkpoints with ``matching_heuristics``.

    Returns:
        What was loaded, and what does not fit.

    Raises:
        ConfigError: the model has weights, and none was loaded; or it refuses them.
    """
    own = model.state_dict(keep_vars=True)  # tied weights are one object then
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
        raise ConfigError(f"{path} is of another model: {_nothing_fits(report, weights, full_names)}")
    return report


def _nothing_fits(report: LoadReport, weights: Mapping[str, Any], own: Iterable[str]) -> str:
    if report.mismatched:
        name, there, here = report.mismatched[0]
        return f"no weight has the shape it has in the model; {name} is {there} in the file and {here} in the model"
    in_file = ", ".join(itertools.islice(weights, 3)) or "nothing"
    in_model = ", ".join(itertools.islice(own, 3))
    return f"none of its weights ({in_file} ...) is one of the model's ({in_model} ...)"


def _difference(value: Any, own: torch.Tensor) -> tuple[Any, Any] | None:
    """What keeps a value from being copied into a weight, in the file and in the model."""
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
    """The model's name for each of the file's, and the prefix that was left out: the one that lets most names match."""
    best = {name: plain_name(name) for name in names}
    most, found = sum(name in own for name in best.values()), ""
    plain = dict(best)
    for length in (1, 2, 3):
        for parts in itertools.product(_PREFIXES, repeat=length):
            prefix = "".join(parts)
            if not any(name.startswith(prefix) for name in plain.values()):
                continue
            stripped = {name: short.removeprefix(prefix) for name, short in plain.items()}
            matches = sum(name in own for name in stripped.values())
            if matches > most and len(set(stripped.values())) == len(stripped):
                best, most, found = stripped, matches, prefix
    return best, found


def _match_suffixes(names: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """As detectron2: each of the model's names takes the longest of the file's that it ends with.

    A name of the file that several of the model's would take is left alone: which one is meant cannot be known.
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
    """Versions of modules, which load_state_dict() converts old weights by.

    A file without them (ours, safetensors) counts as of the model's own versions.
    """
    versions = dict(of_model)
    full_names = {plain_name(f"{name}.") or ".": name for name in of_model}
    for name, value in of_file.items():
        short = plain_name(f"{name}.").removeprefix(prefix) or "."  # the model itself
        if short in full_names:
            versions[full_names[short]] = value
    return versions


# ---------------------------------------------------------------------------- words


def group(names: Iterable[str]) -> str:
    """Names, a line for each module, indented: ``backbone.conv1.{bias, weight}``."""
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
