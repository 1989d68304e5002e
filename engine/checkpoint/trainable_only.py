"""Checkpoints of what is trained (CHECKPOINT.TRAINABLE_ONLY): their files leave the frozen weights out."""

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...config import ConfigError
from ...hooks.common import optimizers_of, plain_name
from .checkpointer import Checkpointer

_AT_ONCE = 1 << 22  # numbers that are summed at once, for little memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes


def bit_sums(weights: Iterable[torch.Tensor]) -> list[int]:
    """Return a sum of each weight's bits times their positions, which tells changed and exchanged weights."""
    sums = []
    for one in weights:
        total = 0
        for number, block in enumerate(one.detach().contiguous().reshape(-1).split(_AT_ONCE)):
            bits = block.view(_INTEGERS[block.element_size()]).to(torch.int64)
            positions = torch.arange(1, len(block) + 1, device=block.device)
            total += int((bits * (number * _AT_ONCE + positions)).sum())
        sums.append(total % 2**63)
    return sums


def add_frozen(checkpointer: Any, left_out: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Add the frozen weights that a file left out to those that it has.

    They are the model's. If their sums are not those in the file, they are read from the file that the run had them
    from, or else from MODEL.WEIGHTS.

    Args:
        checkpointer: the Checkpointer that loads the file.
        left_out: the file's entry of that name.
        weights: the file's weights.

    Raises:
        ConfigError: the model has other weights, and so have those files.
    """
    reader, names = copy.copy(checkpointer), left_out["names"]
    reader.base, reader.save_dir = ("", "model"), ""
    sums, problem = dict(zip(names, left_out["sums"], strict=True)), ""
    for source, weights_from in [("", "model"), *left_out["sources"], checkpointer.base]:
        try:
            if source:
                reader.load(source, [], weights_from=weights_from)
        except ConfigError as error:
            problem = problem or f" ({error})"
        there = {plain_name(name): value for name, value in checkpointer.model.state_dict().items()}
        frozen = {name: there[name] for name in names if name in there}
        if bit_sums(frozen.values()) == [sums[name] for name in frozen]:
            return {**frozen, **weights}
    read_from = " and ".join(source for source, _ in left_out["sources"]) or "the model as it was built"
    raise ConfigError(
        f"{checkpointer.loaded_from} has only the trained weights (CHECKPOINT.TRAINABLE_ONLY), and its {len(names)} "
        f"frozen ones are not those of {read_from}{problem}: put that file back, or load it into the model first; at "
        "a resume, set MODEL.WEIGHTS to it"
    )


class TrainableCheckpointer(Checkpointer):
    """A :class:`Checkpointer` that leaves the frozen parameters of the model out of its files.

    Those are the parameters that need no gradient and that the optimizer does not have when the trainer is built. A
    file holds their names, a sum of each one's bits, and the file that they were read from: see :func:`add_frozen`.

    Args:
        model, save_dir, **options: as for :class:`Checkpointer`.
        optimizer: the model's optimizer. None: the checkpointer only loads.

    Raises:
        ConfigError: no parameter is frozen.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, save_dir, **options)
        self._frozen: dict[str, nn.Parameter] = {}
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
