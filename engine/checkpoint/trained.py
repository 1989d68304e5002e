"""Checkpoints of what is trained: frozen weights that a file or the model's constructor gives are left out."""

import os
from typing import Any

import torch
from torch import nn

from ...config import ConfigError
from ...hooks.common import optimizers_of
from .checkpointer import Checkpointer
from .state import plain_name
from .weights import hash_weights

__all__ = ["TrainedCheckpointer"]

Source = tuple[str, str]
"""A file that weights were read from, and which of its weights: see ``weights_from`` of :meth:`Checkpointer.load`."""


class TrainedCheckpointer(Checkpointer):
    """Leaves frozen parameters out of its files, for ``CHECKPOINT.TRAINABLE_ONLY``.

    Those are the parameters that need no gradient and that no optimizer has when the trainer is built. A file holds
    their names, a digest, and the files that they were read from. Loading it checks that the model has the same
    weights; if it does not, they are read again.

    Args:
        model, save_dir, **options: as for :class:`Checkpointer`.
        optimizer: the optimizer.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, optimizer: Any, **options: Any) -> None:
        super().__init__(model, save_dir, **options)
        trained = {id(p) for one in optimizers_of(optimizer) for group in one.param_groups for p in group["params"]}
        self._frozen = {
            plain_name(name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and id(parameter) not in trained
        }
        if not self._frozen:
            raise ConfigError("CHECKPOINT.TRAINABLE_ONLY: the model has no frozen parameter; set it to False")
        self._sources: list[Source] = []  # of the frozen weights, in the order they were read
        self._given: list[Source] = []  # MODEL.WEIGHTS
        self._left_out: dict[str, Any] = {}  # of the file that is loaded
        self._digest = ""
        self._sums = self._sums_now()

    def resume_or_load(self, path: str, *, weights_from: str = "model", **options: Any) -> dict[str, Any]:
        """As :meth:`Checkpointer.resume_or_load`."""
        self._given = [(path, weights_from)] if path else []
        return super().resume_or_load(path, weights_from=weights_from, **options)

    def load(self, path: str, *args: Any, weights_from: str = "model", **options: Any) -> dict[str, Any]:
        """As :meth:`Checkpointer.load`."""
        self._left_out = {}
        rest = super().load(path, *args, weights_from=weights_from, **options)
        before, self._sums, self._digest = self._sums, self._sums_now(), ""
        changed = self._sums != before
        if self._left_out:
            self._sources = [(source, weights) for source, weights in self._left_out["sources"]]
            changed = not self._frozen.keys() <= set(self._left_out["names"])  # it has some that are trained there
        if changed:
            self._sources = [*self._sources, (path if "://" in path else os.path.abspath(path), weights_from)]
        return rest

    def _load_model(self, checkpoint: Any) -> Any:
        if "left_out" in checkpoint:
            self._left_out = checkpoint["left_out"] = {**checkpoint["left_out"], "given": self._given}
        return super()._load_model(checkpoint)

    def _sums_now(self) -> list[int]:
        """A sum of each frozen weight's bytes, which takes far less time than a digest. Hooks may write to ``data``."""
        parts = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in self._frozen.values()]
        return [int(part.sum(dtype=torch.int64)) for part in parts]

    def _contents(self, further: dict[str, Any]) -> dict[str, Any]:
        for name, before, now in zip(self._frozen, self._sums, self._sums_now(), strict=True):
            if before != now:
                raise ConfigError(
                    f"CHECKPOINT.TRAINABLE_ONLY: the frozen weight {name} was changed after it was built or loaded, so "
                    "a resume could not restore it; set the key to False"
                )
        self._digest = self._digest or hash_weights(self._frozen)
        contents = super()._contents(further)
        hooks = contents.get("trainer", {}).get("hooks", {}).values()
        averages = [(state, "averaged_model") for state in hooks if "averaged_model" in state]
        for holder, key in [(contents, "model"), *averages]:
            holder[key] = {name: value for name, value in holder[key].items() if name not in self._frozen}
        contents["left_out"] = {"names": list(self._frozen), "sha256": self._digest, "sources": self._sources}
        return contents
