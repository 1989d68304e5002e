"""A new run that continues the optimizer of another one: ``MODEL.WEIGHTS_OPTIMIZER``."""

import logging
from typing import Any

import torch

from ...config import ConfigError
from ...hooks.common.models import optimizers_of
from ...hooks.common.tensors import has_shards
from ..checkpoint.weights import read_checkpoint

__all__ = ["load_optimizer"]

logger = logging.getLogger(__name__)


def load_optimizer(optimizer: Any, model: Any, path: str) -> None:
    """Load an optimizer's state, such as momentum, from a checkpoint. Learning rates and other settings stay.

    Args:
        optimizer: the optimizer, or an OptimizerList.
        model: its model.
        path: a local checkpoint of a trainer.

    Raises:
        ConfigError: the file has no state of an optimizer, or one that does not fit.
    """
    key = "MODEL.WEIGHTS_OPTIMIZER"
    if has_shards(model):
        raise ConfigError(f"{key}: is not supported for sharded models")
    state = read_checkpoint(path).get("trainer", {}).get("optimizer")
    if state is None:
        raise ConfigError(f"{key}: {path} has weights only, and no state of an optimizer")
    own, saved = optimizers_of(optimizer), state.get("optimizers", [state])
    if len(own) != len(saved):
        raise ConfigError(f"{key}: {path} has {len(saved)} optimizers, and this run {len(own)}")
    for one, other in zip(own, saved, strict=True):
        groups = one.state_dict()["param_groups"]
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        before, now = ([len(group["params"]) for group in g] for g in (other["param_groups"], groups))
        fits = before == now and all(
            not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == parameters[index].shape
            for index, values in other["state"].items()
            for value in values.values()
        )
        if not fits:
            raise ConfigError(
                f"{key}: the optimizer in {path} is of other parameters: its groups have {before} of them, and those "
                f"of {type(one).__name__} {now}, or shapes differ"
            )
        try:
            one.load_state_dict({"state": other["state"], "param_groups": groups})
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{key}: the optimizer in {path} does not fit {type(one).__name__}: {error}") from error
    logger.info("Loaded the optimizer's state from %s", path)
