"""Frozen weights that a checkpoint left out: checked, and read again from where the run had them."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch

from ...config import ConfigError
from .state import plain_name
from .weights import hash_weights

__all__ = ["restore_frozen"]


@torch.no_grad()
def restore_frozen(checkpointer: Any, left_out: Mapping[str, Any]) -> None:
    """Check the weights that a file left out against those of the model, and read them if they differ.

    A model without some of them is another one, which may use the others: that is logged.

    Args:
        checkpointer: a Checkpointer that has loaded the file's other weights.
        left_out: the file's entry of that name; ``given`` in it: where to look if the files that the weights were read
            from have moved or changed.

    Raises:
        ConfigError: the model has other weights, and so have those files.
    """
    names, path, model = set(left_out["names"]), checkpointer.loaded_from, checkpointer.model
    if lost := names - {plain_name(name) for name in model.state_dict()}:
        checkpointer.logger.warning("%s left out frozen weights that this model does not have: %s", path, min(lost))
        return

    def same() -> bool:
        weights = {plain_name(name): value for name, value in model.state_dict().items()}
        return hash_weights({name: value for name, value in weights.items() if name in names}) == left_out["sha256"]

    trained = {name: value for name, value in model.state_dict().items() if plain_name(name) not in names}
    trained = copy.deepcopy(trained)  # files with the frozen weights may have these, too
    reader, problem = copy.copy(checkpointer), ""
    reader.reading = {*getattr(checkpointer, "reading", ()), os.path.realpath(path)}  # moved files may form a circle
    for source, weights_from in (*left_out["sources"], *left_out.get("given", ())):
        try:
            if os.path.realpath(source) not in reader.reading and not same():
                reader.load(source, [], weights_from=weights_from)
        except ConfigError as error:
            problem = problem or f" ({error})"
    model.load_state_dict(trained, strict=False)
    if not same():
        read_from = " and ".join(source for source, _ in left_out["sources"]) or "the model as it was built"
        raise ConfigError(
            f"{path} has only the trained weights (CHECKPOINT.TRAINABLE_ONLY), and its {len(names)} frozen ones are "
            f"not those of {read_from}{problem}: put that file back, or load it into the model first; at a resume, "
            "set MODEL.WEIGHTS to it"
        )
    checkpointer.logger.info("%d frozen weights are not in %s: checked by their digest", len(names), path)
    for missing in (checkpointer.load_report.missing, checkpointer.missing_keys):
        missing[:] = [name for name in missing if name not in names]
