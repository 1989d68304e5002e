"""Build the model, the loss and the model adapter of a config."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import CfgNode, ConfigError, Registry
from ...config.components import ComponentKey
from ...config.signatures import parameters_of
from ...hooks.common import unwrap_model
from .. import comm
from ..parallel.base import build_strategy
from .adapters import ModelAdapter
from .inputs import check_names
from .model_options import apply_model_options

if TYPE_CHECKING:  # imported for losses with state
    from .loss_module import LossModule

logger = logging.getLogger(__name__)

MODEL_REGISTRY = Registry("MODEL", nn.Module)
"""Models for ``MODEL.NAME``, called with ``MODEL.ARGS`` (and ``cfg`` if that is their first parameter)."""

META_ARCH_REGISTRY = MODEL_REGISTRY
"""detectron2's name for :data:`MODEL_REGISTRY`."""

LOSS_REGISTRY = Registry("LOSS", Callable, function_of=2)
"""Losses for ``MODEL.LOSS.NAME``: ``loss(model(x), y)`` returns a scalar tensor, or ``(loss, num_items)``."""


MODEL_KEY, LOSS_KEY = ComponentKey(MODEL_REGISTRY, "MODEL.NAME"), ComponentKey(LOSS_REGISTRY, "MODEL.LOSS.NAME")

for _loss in (
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.NLLLoss,
    nn.SmoothL1Loss,
):
    LOSS_REGISTRY.register(_loss)


def resolve_device(name: str) -> torch.device:
    """Return the device that a value of ``MODEL.DEVICE`` selects on this rank.

    Args:
        name: "auto" (the first available of cuda, mps and cpu), "cuda" (with several ranks: the GPU of the local
            rank), "cuda:N", "mps" or "cpu".

    Raises:
        ConfigError: the name is unknown, or this machine does not have the device.
    """
    several = comm.get_world_size() > 1
    if name == "auto":
        other = "mps" if torch.mps.is_available() and not several else "cpu"
        name = "cuda" if torch.cuda.is_available() else other
    if name == "cuda" and several:
        name = f"cuda:{comm.get_local_rank()}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    # Large indices overflow in torch: "cuda:256" becomes "cuda:0".
    if device is None or device.type not in ("cpu", "cuda", "mps") or str(device) != name:
        raise ConfigError(f'MODEL.DEVICE: unknown device {name!r}; use "auto", "cpu", "cuda", "cuda:N" or "mps"')
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available())}[device.type]
    if (device.index or 0) >= available:
        raise ConfigError(
            f"MODEL.DEVICE: {name!r} is not available: torch {torch.__version__} sees {available} such device(s); "
            'use "auto", "cpu" or a smaller index'
        )
    return device


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model of ``cfg.MODEL`` on ``cfg.MODEL.DEVICE``. No weights are loaded.

    If the strategy of ``PARALLEL`` shards the model over several ranks, it stays in host memory, where it is built.

    Memory format, activation checkpointing and compilation change neither its class nor the names of its weights.

    Raises:
        ConfigError: the name, the arguments or the device are wrong, or a pattern of ACTIVATION_CHECKPOINTING or
            COMPILE.MODULES matches nothing.
    """
    wanted = cfg.MODEL
    if not wanted.NAME:
        raise ConfigError(
            'MODEL.NAME is empty: set it to a registered model such as "MLP", or to "package.module:Class"'
        )
    device = resolve_device(wanted.DEVICE)
    model: nn.Module = MODEL_KEY.build(cfg)
    if comm.get_world_size() == 1 or not build_strategy(cfg).shards_weights:
        model = model.to(device)
    recomputes = wanted.ACTIVATION_CHECKPOINTING or wanted.ACTIVATION_CHECKPOINTING_KEEP
    if wanted.COMPILE.ENABLED or wanted.CHANNELS_LAST or wanted.SYNC_BATCHNORM or recomputes:
        model = apply_model_options(cfg, model, device)
    return model


def build_loss(cfg: CfgNode) -> nn.Module | None:
    """Build the loss of ``cfg.MODEL.LOSS`` on ``cfg.MODEL.DEVICE``; None if the model computes its own losses."""
    if not cfg.MODEL.LOSS.NAME:
        return None
    loss = LOSS_KEY.build(cfg)
    return loss.to(resolve_device(cfg.MODEL.DEVICE)) if isinstance(loss, nn.Module) else loss


def build_adapter(cfg: CfgNode) -> ModelAdapter:
    """Build the model adapter of ``cfg.MODEL``, with the loss of :func:`build_loss`.

    Raises:
        ConfigError: names or arguments are wrong.
    """
    return ModelAdapter(
        build_loss(cfg),
        inputs=cfg.MODEL.INPUTS,
        input_mapping=cfg.MODEL.INPUT_MAPPING,
        output_mapping=cfg.MODEL.OUTPUT_MAPPING,
        target=cfg.MODEL.TARGET,
    )


def loss_module_of(loss: Callable[..., Any] | None, model: nn.Module) -> "LossModule | None":
    """Return the module of a loss; None if it has no state of its own, or belongs to the model.

    Args:
        loss: a module, a method of one, or any other callable, in a ``functools.partial`` or not.
        model: the model, wrapped or not.
    """
    holder = getattr(loss, "func", loss)  # of a functools.partial
    module = getattr(holder, "__self__", holder)  # of a method
    if not isinstance(module, nn.Module):
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and [*value.parameters()]):
                _warn_of_untrained(type(holder).__name__, name)
    elif module.state_dict():
        from .loss_module import LossModule  # only where it is used

        found = LossModule(module, unwrap_model(model))
        return found if found.names else None
    return None


@functools.cache
def _warn_of_untrained(kind: str, name: str) -> None:
    logger.warning("MODEL.LOSS: parameters of %s.%s are neither trained nor saved: it is no nn.Module", kind, name)


@contextmanager
def attached_to(model: nn.Module, loss: Callable[..., Any] | None) -> Iterator[None]:
    """Make a loss with state the model's submodule ``loss`` within the block, where an optimizer finds its parameters.

    It is ``loss_`` if the model's own ``loss`` has parameters or buffers.
    """
    found = loss_module_of(loss, model)
    if found is None:
        yield
        return
    name, others = "loss", dict(model._modules)
    while (other := others.get(name)) is not None and [*other.parameters(), *other.buffers()]:
        name += "_"
    model._modules[name] = found.module
    try:
        yield
    finally:
        if name in others:
            model._modules[name] = others[name]  # where it was
        else:
            del model._modules[name]


def check_input_mapping(cfg: CfgNode, target: Any) -> None:
    """Check that the model has the parameters that MODEL.INPUT_MAPPING names.

    Args:
        cfg: the config.
        target: the class of the model; a function that builds it is not checked.

    Raises:
        ConfigError: it does not have one.
    """
    if inspect.isclass(target) and issubclass(target, nn.Module) and target.forward is not nn.Module.forward:
        taken = parameters_of(target.forward)
        if taken is not None and taken.positions:
            taken.keywords.pop(taken.positions.pop(0), None)  # self
        check_names("MODEL.INPUT_MAPPING", target.__name__, taken, cfg.MODEL.INPUT_MAPPING.values())
