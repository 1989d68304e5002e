"""Loads weights into a model: matches their names, and reports what does not fit."""

import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common import is_sharded, plain_name, shard_like

# Prefixes of names in other checkpoints: DistributedDataParallel, Lightning, DeepSpeed.
_PREFIX = re.compile(r"(module|model|_forward_module)\.")
_MAX_LINES = 40


def split_query(path: str) -> tuple[str, bool]:
    """Split ``weights.pth?matching_heuristics=True``, as detectron2's configs have it.

    Returns:
        The path without this query, and whether names of weights are matched by their ends.
    """
    base = path.removesuffix("?matching_heuristics=True")
    return base, base != path


@dataclass(frozen=True)
class LoadReport:
    """How the weights of a file matched a model. Fields that fvcore also has bear its names.

    Attributes:
        total: number of the model's weights, parameters and buffers.
        loaded: how many of them were loaded.
        missing_keys: weights of the model that the file does not hold.
        unexpected_keys: weights of the file that the model does not have.
        incorrect_shapes: (name, in the file, in the model) where the shape differs, or complex meets real.
        prefix: prefix that was removed from the file's names.
    """

    total: int
    loaded: int
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    incorrect_shapes: list[tuple[str, Any, Any]] = field(default_factory=list)
    prefix: str = ""

    def differences(self) -> list[str]:
        """Describe what does not fit: one text per kind of difference."""
        shapes = [f"{name}: {there} in the file, {here} in the model" for name, there, here in self.incorrect_shapes]
        kinds = {
            "weights not in the file, left as the model was built": self.missing_keys,
            "weights of another shape, left as the model was built": shapes,
            "weights not in the model, ignored": self.unexpected_keys,
        }
        texts = []
        for what, names in kinds.items():
            more = [f"... and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
            texts += ["\n  ".join([f"{what} ({len(names)}):", *names[:_MAX_LINES], *more])] if names else []
        return texts

    def check_exact(self, path: str) -> None:
        """Raise a ConfigError if the weights of a file and the model's are not the same ones."""
        if differences := self.differences():
            raise ConfigError(
                "\n".join([f"{path} does not fit the model exactly, as strict loading requires:", *differences])
            )

    def log(self, logger: logging.Logger, path: str, which: str = "model") -> None:
        """Log what was loaded at INFO, and each kind of difference at WARNING.

        Args:
            logger: the logger.
            path: the file.
            which: which weights, as returned by :func:`~hookline.engine.checkpoint.weights.choose_weights`.
        """
        note = f" (prefix {self.prefix!r} removed)" if self.prefix else ""
        averaged = "" if which == "model" else f", {which}"
        logger.info("Loaded %d of the model's %d weights%s from %s%s", self.loaded, self.total, note, path, averaged)
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
    in_model = model.state_dict(keep_vars=True)  # so that tied weights are one object
    full_names = {plain_name(name): name for name in in_model}
    names, prefix = {name: plain_name(name) for name in weights}, ""
    if by_suffix:
        names |= _match_suffixes(names, full_names)
    elif not full_names.keys() >= set(names.values()):
        prefix = _find_prefix(names.values(), full_names)
        names = {name: plain.removeprefix(prefix) for name, plain in names.items()}
    state: OrderedDict[str, object] = OrderedDict()
    mismatched: list[tuple[str, Any, Any]] = []
    for name, value in weights.items():
        target = full_names.get(names[name], names[name])
        here = in_model.get(target)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(here, torch.Tensor) and not is_lazy(here):
            found: Any = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if found != tuple(here.shape):
                mismatched.append((names[name], found, tuple(here.shape)))
                continue
            if value.is_complex() and not here.is_complex():
                mismatched.append((names[name], value.dtype, here.dtype))
                continue
            if is_sharded(here) and not is_sharded(value):
                value = shard_like(value, here)
        state[target] = value
    # The modules' versions, by which torch converts old weights. hookline's files and safetensors have none.
    versions = dict(getattr(in_model, "_metadata", {}))
    modules = {plain_name(f"{name}."): name for name in versions}
    for name, version in getattr(weights, "_metadata", {}).items():
        short = plain_name(f"{name}.").removeprefix(prefix)
        versions[modules.get(short or ".", name)] = version  # "." is the model itself
    state._metadata = versions  # type: ignore[attr-defined]
    try:
        incompatible = model.load_state_dict(state, strict=False)
    except Exception as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error

    file_names = {full_names.get(names[name], names[name]): name for name in weights}
    unset = set(incompatible.missing_keys)
    set_ones = {id(value) for name, value in in_model.items() if name not in unset}
    wrong = {name for name, _, _ in mismatched}
    missing = [
        plain_name(name)
        for name in incompatible.missing_keys
        if id(in_model.get(name)) not in set_ones and plain_name(name) not in wrong
    ]
    tensors = [name for name, value in in_model.items() if isinstance(value, torch.Tensor)]
    lost = wrong | set(missing)
    report = LoadReport(
        total=len(tensors),
        loaded=sum(plain_name(name) not in lost for name in tensors),
        missing_keys=missing,
        unexpected_keys=[file_names.get(name, name) for name in incompatible.unexpected_keys],
        incorrect_shapes=mismatched,
        prefix=prefix,
    )
    if report.total and not report.loaded:
        raise ConfigError(
            f"{path} is a checkpoint of another model: none of its weights has a name and a shape of the model\n"
            + "\n".join(report.differences())
        )
    return report


# ---------------------------------------------------------------------------- names


def _find_prefix(names: Collection[str], in_model: Mapping[str, object]) -> str:
    """Return the prefix of the file's names without which most of them are the model's; the shortest one."""
    prefixes = {""}
    for name in names:
        prefix = ""
        while match := _PREFIX.match(name, len(prefix)):
            prefix += match[0]
            prefixes.add(prefix)
    found = {prefix: {name.removeprefix(prefix) for name in names} & in_model.keys() for prefix in prefixes}
    return min(prefixes, key=lambda prefix: (-len(found[prefix]), len(prefix)))


def _match_suffixes(names: Mapping[str, str], in_model: Iterable[str]) -> dict[str, str]:
    """Map names of the file to the names of the model that end with them, as detectron2 does.

    A name of the model takes the longest one. Names of the file that several names of the model end with are
    ambiguous, and stay as they are.
    """
    by_plain = {plain: name for name, plain in names.items()}
    takers = defaultdict(list)
    for name in in_model:
        pieces = name.split(".")
        suffixes = (".".join(pieces[start:]) for start in range(len(pieces)))
        if suffix := next((suffix for suffix in suffixes if suffix in by_plain), None):
            takers[by_plain[suffix]].append(name)
    return {name: taken[0] for name, taken in takers.items() if len(taken) == 1}
