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


class TrainedCheckpointer(Checkpointer):
    """Leaves frozen parameters out of its files, for ``CHECKPOINT.TRAINABLE_ONLY``.

    Those are the parameters that need no gradient and that no optimizer has when the trainer is built. A file holds
    their names and a digest, and loading it checks that the model has the same ones; if it does not, they are read
    from ``base`` first.

    Args:
        model, save_dir, **options: as for :class:`Checkpointer`.
        optimizer: the optimizer.
        base: MODEL.WEIGHTS: where the frozen weights come from. Empty: the model's constructor.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, optimizer: Any, base: str, **options: Any) -> None:
        super().__init__(model, save_dir, **options)
        trained = {id(p) for one in optimizers_of(optimizer) for group in one.param_groups for p in group["params"]}
        self._frozen = {
            plain_name(name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and id(parameter) not in trained
        }
        if not self._frozen:
            raise ConfigError("CHECKPOINT.TRAINABLE_ONLY: the model has no frozen parameter; set it to False")
        self._base = base if not base or "://" in base else os.path.abspath(base)
        self._digest = ""
        self._sums = self._sums_now()

    def load(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As :meth:`Checkpointer.load`."""
        rest = super().load(*args, **kwargs)
        self._sums = self._sums_now()
        return rest

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
        contents["model"] = {name: value for name, value in contents["model"].items() if name not in self._frozen}
        contents["left_out"] = {"names": list(self._frozen), "sha256": self._digest, "base": self._base}
        return contents
