"""The checkpointer that saves only what is trained (CHECKPOINT.TRAINABLE_ONLY)."""

import os
from typing import Any

from torch import nn

from ...config import ConfigError
from ...hooks.common import optimizers_of, plain_name
from .checkpointer import Checkpointer
from .trainable_only import bit_sums


class TrainableCheckpointer(Checkpointer):
    """A :class:`Checkpointer` that leaves the frozen parameters of the model out of its files.

    Those are the parameters that need no gradient and that the optimizer does not have when the trainer is built. A
    file holds their names, a sum of each one's bits, and the file that they were read from: see
    :func:`~hookline.engine.checkpoint.trainable_only.add_frozen`.

    Args:
        model, save_dir, **options: as for :class:`Checkpointer`.
        optimizer: the model's optimizer. None: the checkpointer only loads.

    Raises:
        ConfigError: no parameter is frozen.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, save_dir, **options)
        self._frozen: dict[str, nn.Parameter] = {}
        self._sums: list[int] = []
        # The file that gave the frozen parameters, and which of its weights; empty: the constructor did.
        self._sources: list[tuple[str, str]] = []
        if optimizer is None:
            return
        trained = {id(p) for one in optimizers_of(optimizer) for group in one.param_groups for p in group["params"]}
        saved = self.model.state_dict().keys()
        self._frozen = {
            plain_name(name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and id(parameter) not in trained and name in saved
        }
        if not self._frozen:
            raise ConfigError("CHECKPOINT.TRAINABLE_ONLY: the model has no frozen parameter; set it to False")
        self._sums = bit_sums(self._frozen.values())

    def load(
        self, path: str, checkpointables: list[str] | None = None, *, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        """Like :meth:`Checkpointer.load`; later files name ``path`` as the one that gave the frozen parameters.

        Raises:
            ConfigError: it is in the run's folder, where this run may replace it, and alone has them.
        """
        rest = super().load(path, checkpointables, strict=strict, weights_from=weights_from)
        if not path or not self._frozen:
            return rest
        before, self._sums, left_out = self._sums, bit_sums(self._frozen.values()), rest.get("left_out")
        if left_out is not None and self._frozen.keys() <= set(left_out["names"]):
            self._sources = left_out["sources"]
        elif left_out is not None or self._sums != before:
            local = os.path.realpath(self.fetch(path)) + path[len(path.partition("?")[0]) :]
            if self.save_dir and os.path.dirname(local) == os.path.realpath(self.save_dir):
                raise ConfigError(
                    f"CHECKPOINT.TRAINABLE_ONLY: the frozen weights are in {path} alone, and later checkpoints of this "
                    "folder may replace it: set the key to False, or set another OUTPUT_DIR and MODEL.WEIGHTS"
                )
            self._sources = [(path if "://" in path else local, weights_from)]
        return rest

    def _plain(self, contents: dict[str, Any]) -> object:
        """Leave the frozen parameters out, also of averaged weights.

        Raises:
            ConfigError: one was changed after it was built or loaded.
        """
        for name, before, now in zip(self._frozen, self._sums, bit_sums(self._frozen.values()), strict=True):
            if before != now:
                raise ConfigError(
                    f"CHECKPOINT.TRAINABLE_ONLY: the frozen weight {name} was changed after it was built or loaded, so "
                    "a resume could not restore it; set the key to False"
                )
        states = [one for one in contents.get("trainer", {}).get("hooks", {}).values() if isinstance(one, dict)]
        averages = [(state, "averaged_model") for state in states if "averaged_model" in state]
        for holder, key in [(contents, "model"), *averages]:
            holder[key] = {name: value for name, value in holder[key].items() if name not in self._frozen}
        left_out = {"names": list(self._frozen), "sums": self._sums, "sources": self._sources}
        return super()._plain({**contents, "left_out": left_out})
