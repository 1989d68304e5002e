"""Linear layers that compute in float8, by torchao."""

import importlib.util
import logging

import torch
from torch import nn

from ...config import ConfigError

__all__ = ["check_float8", "to_float8"]

logger = logging.getLogger(__name__)

# torch._scaled_mm needs sizes that are multiples of it.
_MULTIPLE = 16


def check_float8(recipe: str, device: torch.device) -> None:
    """Check ``MODEL.FLOAT8``.

    Raises:
        ConfigError: the device cannot compute in float8, or torchao is not installed.
    """
    if not recipe:
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < (8, 9):
        which = f"{torch.cuda.get_device_name(device)} has {capability}" if capability else f"MODEL.DEVICE is {device}"
        raise ConfigError(
            f"MODEL.FLOAT8: needs a GPU of compute capability (8, 9) or higher (Ada, Hopper), and {which}. Set "
            'MODEL.FLOAT8 to ""; SOLVER.AMP with bfloat16 works everywhere'
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError('MODEL.FLOAT8: needs the package torchao: pip install "hookline[float8]"')


def to_float8(model: nn.Module, recipe: str, device: torch.device) -> nn.Module:
    """Make linear layers compute in float8. Weights keep their names, dtype and values.

    Args:
        model: the model. Linear layers with a size that is not a multiple of 16 do not change.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp" of torchao.
        device: where it will run.

    Raises:
        ConfigError: the device cannot compute in float8, or torchao is not installed.
    """
    check_float8(recipe, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(model, config=config, module_filter_fn=_fits)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    changed = sum(type(module) is not nn.Linear for module in linear)
    logger.info("MODEL.FLOAT8: %d of %d linear layers compute in float8", changed, len(linear))
    return model


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)
