"""An optimizer that the config holds itself, in place of a name."""

import logging

from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError, get_cfg
from ...config.values import ObjectName
from ...hooks.common.tensors import is_sharded

__all__ = ["given_optimizer"]

logger = logging.getLogger(__name__)


def given_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer | None:
    """Return the optimizer that the config holds; None if it names one.

    Args:
        cfg: the config.
        model: the model whose parameters the optimizer updates.

    Raises:
        ConfigError: it does not update this model's parameters.
    """
    name = getattr(cfg.SOLVER.OPTIMIZER, "NAME", None)
    if not isinstance(name, ObjectName) or not name.is_component:
        return None
    optimizer: Optimizer = name.value
    solver, defaults = cfg.SOLVER, get_cfg().SOLVER
    for key in ("PARAM_GROUPS", "LAYER_DECAY", "BIAS_LR_FACTOR"):
        if solver[key] != defaults[key]:
            logger.warning("SOLVER.%s has no effect: %s has its own groups. Pass its class and arguments", key, name)
    own = {id(parameter) for parameter in model.parameters()}
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"SOLVER.OPTIMIZER: {name} was built before the model's parameters were sharded over ranks; pass its class "
            "and arguments instead"
        )
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"SOLVER.OPTIMIZER: {name} does not update any parameter of the model; build it with model.parameters() of "
            "the model that is trained"
        )
    return optimizer
