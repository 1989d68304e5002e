"""Frozen weights that a checkpoint left out: checked, and read again from where the run had them."""

from collections.abc import Mapping
from typing import Any

import torch

from ...config import ConfigError
from .matching import load_weights
from .state import plain_name
from .weights import choose_weights, hash_weights, read_checkpoint

__all__ = ["restore_frozen"]


@torch.no_grad()
def restore_frozen(checkpointer: Any, left_out: Mapping[str, Any]) -> None:
    """Check the weights that a file left out against those of the model, and read them if they differ.

    Args:
        checkpointer: a Checkpointer that has loaded the file's other weights.
        left_out: the file's entry of that name.

    Raises:
        ConfigError: the model has other weights, and so has the file that they were read from.
    """
    names, base, model = set(left_out["names"]), left_out["base"], checkpointer.model

    def same() -> bool:
        own = {plain_name(name): value for name, value in model.state_dict().items()}
        return hash_weights({name: value for name, value in own.items() if name in names}) == left_out["sha256"]

    path = checkpointer.loaded_from
    if not same() and base and base != path:
        try:
            weights = _weights_of(checkpointer, base)
        except ConfigError as error:
            raise ConfigError(f"{path} was saved without its frozen weights, which were in {base}: {error}") from error
        load_weights(model, {name: value for name, value in weights.items() if plain_name(name) in names}, path=base)
    if not same():
        raise ConfigError(
            f"{path} has only the trained weights (CHECKPOINT.TRAINABLE_ONLY), and its {len(names)} frozen ones are "
            f"not those of {base or 'the model as it was built'}: give it the weights that the run began with"
        )
    checkpointer.logger.info("%d frozen weights are not in %s: checked by their digest", len(names), path)
    checkpointer.load_report.missing[:] = [name for name in checkpointer.load_report.missing if name not in names]
    checkpointer.missing_keys = [name for name in checkpointer.missing_keys if name not in names]


def _weights_of(checkpointer: Any, path: str) -> dict[str, Any]:
    """Return the weights of a file, with those that it left out itself."""
    checkpoint = read_checkpoint(checkpointer.fetch(path), mmap=True)
    weights, _ = choose_weights(checkpoint, "model", path)
    base = checkpoint.get("left_out", {}).get("base", "")
    return {**(_weights_of(checkpointer, base) if base else {}), **weights}
