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

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes


class TrainedCheckpointer(Checkpointer):
    """Leaves frozen parameters out of its files, for ``CHECKPOINT.TRAINABLE_ONLY``.

    Those are the parameters that need no gradient and that no optimizer has when the trainer is built. A file holds
    their names, a digest, and the files that they were read from. Loading it checks that the model has the same
    weights; if it does not, they are read again.

    Args:
        model, save_dir, **options: as for :class:`Checkpointer`.
        optimizer: the optimizer. None: nothing is left out; for loading.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, save_dir, **options)
        optimizers = [] if optimizer is None else optimizers_of(optimizer)
        trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        saved = self.model.state_dict().keys()
        self._frozen = {
            plain_name(name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if optimizers and not parameter.requires_grad and id(parameter) not in trained and name in saved
        }
        if optimizers and not self._frozen:
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
        """As :meth:`Checkpointer.load`.

        Raises:
            ConfigError: also if frozen weights are those of a file in ``save_dir``, which this run may replace.
        """
        self._left_out = {}
        rest = super().load(path, *args, weights_from=weights_from, **options)
        if not path:
            return rest
        before, self._sums, self._digest = self._sums, self._sums_now(), ""
        changed = self._sums != before
        if self._left_out:
            self._sources = [(source, weights) for source, weights in self._left_out["sources"]]
            changed = not self._frozen.keys() <= set(self._left_out["names"])  # it has some that are trained there
        if changed:
            source = path if "://" in path else os.path.realpath(self.fetch(path)) + path[len(path.partition("?")[0]) :]
            if self.save_dir and os.path.dirname(source) == os.path.realpath(self.save_dir):
                raise ConfigError(
                    f"CHECKPOINT.TRAINABLE_ONLY: the frozen weights are in {path} alone, and later checkpoints of this "
                    "folder may replace it: set the key to False, or set another OUTPUT_DIR and MODEL.WEIGHTS"
                )
            self._sources = [*self._sources, (source, weights_from)]
        return rest

    def _load_model(self, checkpoint: Any) -> Any:
        if "left_out" in checkpoint:
            self._left_out = checkpoint["left_out"] = {**checkpoint["left_out"], "given": self._given}
        return super()._load_model(checkpoint)

    def _sums_now(self) -> list[int]:
        """A sum of each frozen weight's bits, far quicker on a GPU than a digest. Hooks may write to ``data``."""
        parts = [one.detach().contiguous().reshape(-1) for one in self._frozen.values()]
        return [int(part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64)) for part in parts]

    def _contents(self, further: dict[str, Any]) -> dict[str, Any]:
        contents = super()._contents(further)
        if not self._frozen:
            return contents
        for name, before, now in zip(self._frozen, self._sums, self._sums_now(), strict=True):
            if before != now:
                raise ConfigError(
                    f"CHECKPOINT.TRAINABLE_ONLY: the frozen weight {name} was changed after it was built or loaded, so "
                    "a resume could not restore it; set the key to False"
                )
        self._digest = self._digest or hash_weights(self._frozen)
        states = [one for one in contents.get("trainer", {}).get("hooks", {}).values() if isinstance(one, dict)]
        averages = [(state, "averaged_model") for state in states if "averaged_model" in state]
        for holder, key in [(contents, "model"), *averages]:
            holder[key] = {name: value for name, value in holder[key].items() if name not in self._frozen}
        contents["left_out"] = {"names": list(self._frozen), "sha256": self._digest, "sources": self._sources}
        return contents
