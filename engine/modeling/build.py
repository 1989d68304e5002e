"""From a config to a model on its device, and to the loss that judges its outputs."""

import torch
from torch import nn

from ...config import CfgNode, ConfigError, Registry

__all__ = [
    "LOSS_REGISTRY",
    "META_ARCH_REGISTRY",
    "MODEL_REGISTRY",
    "build_loss",
    "build_model",
    "check_model",
    "resolve_device",
]

MODEL_REGISTRY = Registry("MODEL")
"""Models for ``MODEL.NAME``; called with ``MODEL.ARGS`` (and ``cfg``, if that is their first parameter)."""

META_ARCH_REGISTRY = MODEL_REGISTRY
"""detectron2's name of :data:`MODEL_REGISTRY`."""

LOSS_REGISTRY = Registry("LOSS")
"""Losses for ``MODEL.LOSS.NAME``: called as ``loss(model(x), y)``, they return a scalar tensor."""

for _loss in (
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.NLLLoss,
    nn.SmoothL1Loss,
):
    LOSS_REGISTRY.register(_loss)


def resolve_device(name: str) -> torch.device:
    """The device that ``MODEL.DEVICE`` means on this machine.

    Args:
        name: "auto" (cuda, then mps, then cpu: the first there is), "cpu", "cuda", "cuda:N" or "mps".

    Raises:
        ConfigError: no device is called so, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    # torch lets large indices overflow: "cuda:256" becomes "cuda:0"
    if device is None or device.type not in ("cpu", "cuda", "mps") or str(device) != name:
        raise ConfigError(f'MODEL.DEVICE: unknown device {name!r}; use "auto", "cpu", "cuda", "cuda:N" or "mps"')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"MODEL.DEVICE: {name!r} is not available: torch {torch.__version__} sees {count} CUDA device(s); "
                'use "auto", "cpu" or a smaller index'
            )
    if device.type == "mps" and not torch.mps.is_available():
        raise ConfigError(f'MODEL.DEVICE: {name!r} is not available on this machine; use "auto" or "cpu"')
    return device


def build_model(cfg: CfgNode) -> nn.Module:
    """The model ``cfg.MODEL`` describes, on ``cfg.MODEL.DEVICE``; no weights are loaded.

    Raises:
        ConfigError: the name, the arguments or the device are wrong.
    """
    if not cfg.MODEL.NAME:
        raise ConfigError(
            'MODEL.NAME is empty: set it to a registered model such as "MLP", or to "package.module:Class"'
        )
    device = resolve_device(cfg.MODEL.DEVICE)
    model: nn.Module = MODEL_REGISTRY.build(cfg.MODEL.NAME, cfg.MODEL.ARGS, offered={"cfg": cfg}, key="MODEL.ARGS")
    return model.to(device)


def build_loss(cfg: CfgNode) -> nn.Module | None:
    """The loss ``cfg.MODEL.LOSS`` describes, on ``cfg.MODEL.DEVICE``; None where the model makes its own losses."""
    entry = cfg.MODEL.LOSS
    if not entry.NAME:
        return None
    loss = LOSS_REGISTRY.build(entry.NAME, entry.ARGS, offered={"cfg": cfg}, key="MODEL.LOSS.ARGS")
    return loss.to(resolve_device(cfg.MODEL.DEVICE)) if isinstance(loss, nn.Module) else loss


def check_model(cfg: CfgNode) -> None:
    """Check names and arguments of model and loss, and the device, without building anything.

    Raises:
        ConfigError: the first thing wrong.
    """
    resolve_device(cfg.MODEL.DEVICE)
    if cfg.MODEL.NAME:
        MODEL_REGISTRY.check(cfg.MODEL.NAME, cfg.MODEL.ARGS, offered=("cfg",), key="MODEL.ARGS")
    if cfg.MODEL.LOSS.NAME:
        LOSS_REGISTRY.check(cfg.MODEL.LOSS.NAME, cfg.MODEL.LOSS.ARGS, offered=("cfg",), key="MODEL.LOSS.ARGS")
