"""Gradient clipping: by value, by the global norm, or by each parameter's own norm."""

import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError
from ...hooks.common import is_sharded, local_part, optimizers_of
from .param_groups import full_config

logger = logging.getLogger(__name__)

GradClipper = Callable[[list[nn.Parameter]], torch.Tensor | None]
"""Clips the gradients of parameters in place. Returns their global norm before clipping, if it was computed."""

OptimizerOrType = TypeVar("OptimizerOrType", Optimizer, type[Optimizer])


def build_grad_clipper(cfg: CfgNode) -> GradClipper | None:
    """Build the gradient clipper of ``SOLVER.CLIP_GRADIENTS``; None if it is not enabled and the norm is not logged.

    "value" limits each element to [-CLIP_VALUE, CLIP_VALUE]. "norm" scales all gradients by one factor so that their
    global norm is at most CLIP_VALUE (Pascanu et al., arXiv:1211.5063); "full_model", as projects of detectron2 call
    it, is the same. "param_norm" scales the gradient of each
    parameter separately. Norms are of order NORM_TYPE. With ``LOG.GRAD_NORM`` the clipper always returns the global
    norm.

    Raises:
        ConfigError: a number is not positive.
    """
    cfg = full_config(cfg)
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return partial(_clip, kind="", limit=0.0, norm_type=2.0, with_norm=True) if cfg.LOG.GRAD_NORM else None
    for name in ("CLIP_VALUE", "NORM_TYPE"):
        if not clip[name] > 0:  # also refuses NaN
            raise ConfigError(f"SOLVER.CLIP_GRADIENTS.{name}: must be greater than 0, not {clip[name]}")
    return partial(
        _clip, kind=clip.CLIP_TYPE, limit=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE, with_norm=cfg.LOG.GRAD_NORM
    )


def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: OptimizerOrType) -> OptimizerOrType:
    """Make an optimizer clip gradients in its ``step``, if ``SOLVER.CLIP_GRADIENTS`` is enabled.

    :func:`build_optimizer` calls it. A trainer whose own step clips takes over (see :class:`ClipBeforeStep`), so
    gradients are clipped once.

    Args:
        cfg: the whole config.
        optimizer: an optimizer, which is changed and returned, or a class, of which a subclass is returned.
    """
    cfg = full_config(cfg)
    clip = build_grad_clipper(cfg)
    if clip is None or not cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
        return optimizer
    if cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE == "norm" and "hookline.detectron2" in sys.modules:
        logger.warning(
            'SOLVER.CLIP_GRADIENTS.CLIP_TYPE "norm" limits the norm of all gradients together. detectron2\'s "norm" '
            'limits that of each parameter: set "param_norm" for it',
        )
    if isinstance(optimizer, Optimizer):
        for hook in clip_hooks(optimizer):
            hook.clip = clip
            return optimizer
        optimizer.register_step_pre_hook(ClipBeforeStep(clip))
        return optimizer
    base: Any = optimizer

    def __init__(self: Optimizer, *args: object, **kwargs: object) -> None:
        base.__init__(self, *args, **kwargs)
        self.register_step_pre_hook(ClipBeforeStep(clip))

    return type(f"{base.__name__}WithGradientClip", (base,), {"__init__": __init__})


class ClipBeforeStep:
    """A step hook of an optimizer, which clips the gradients of its parameters.

    Args:
        clip: the clipper.

    Attributes:
        paused: True while a trainer that has clipped the gradients itself calls ``step()``.
    """

    def __init__(self, clip: GradClipper) -> None:
        self.clip = clip
        self.paused = False

    def __call__(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self.paused:
            return
        if len(args) > 1 or kwargs.get("closure") is not None:  # args[0] is the optimizer
            raise ConfigError(
                "SOLVER.CLIP_GRADIENTS: step(closure) computes gradients after they would be clipped; call backward() "
                "first and step() without a closure, or clip in the closure"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a GradScaler leaves the division to a fused optimizer
            for parameter in parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).div_(scale)
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.clip(parameters)


def clip_hooks(optimizer: object) -> list[ClipBeforeStep]:
    """Return the hooks by which an optimizer, or each of several, clips in its ``step``."""
    hooks = []
    for one in optimizers_of(optimizer):
        for hook in getattr(one, "_optimizer_step_pre_hooks", {}).values():
            if isinstance(hook, ClipBeforeStep):
                hooks.append(hook)
    return hooks


def clipper_of(optimizer: object) -> GradClipper | None:
    """Return the clipper with which an optimizer clips in its ``step``; None if it does not, or there are several."""
    hooks = clip_hooks(optimizer) if isinstance(optimizer, Optimizer) else []
    return hooks[0].clip if hooks else None


# ---------------------------------------------------------------------- arithmetic

# Foreach calls are faster than nn.utils.clip_grad_norm_, which groups gradients by device and dtype in another way. Of
# sharded gradients each rank handles its shards. The host never waits for the device.


def _clip(
    parameters: list[nn.Parameter], kind: str, limit: float, norm_type: float, with_norm: bool
) -> torch.Tensor | None:
    """Clip gradients, or none if ``kind`` is empty, and return their global norm if it is needed."""
    alike = _alike(parameters)
    together = kind in ("norm", "full_model")
    norm = _total_norm(alike, norm_type) if together or with_norm else None
    for grads in alike if kind else ():
        local = list(map(local_part, grads))
        if kind == "value":
            torch._foreach_clamp_max_(local, limit)
            torch._foreach_clamp_min_(local, -limit)
            continue
        norms = norm if together and norm is not None else _norms(grads, norm_type)
        factors = (limit / (norms + 1e-6)).clamp(max=1.0).to(local[0])  # keeps NaN
        torch._foreach_mul_(local, factors if together else list(factors.unbind()))
    return norm


def _alike(parameters: list[nn.Parameter]) -> list[list[torch.Tensor]]:
    """Return the gradients in lists, each of one device, dtype and way of sharding.

    Sums over ranks that are still to be taken (DTensor's ``Partial``) are taken.
    """
    found: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        kind: tuple[object, ...] = (grad.device, grad.dtype)
        if is_sharded(grad):
            if any(placement.is_partial() for placement in grad.placements):
                parameter.grad = grad = grad.redistribute(placements=cast(Any, parameter).placements)
            kind = (*kind, grad.device_mesh, grad.placements)
        found.setdefault(kind, []).append(grad)
    return list(found.values())


def _total_norm(alike: list[list[torch.Tensor]], norm_type: float) -> torch.Tensor:
    norms = [_norms(grads, norm_type) for grads in alike] or [torch.zeros(1)]
    if len(norms) > 1:
        norms = [torch.cat([norm.to(norms[0].device) for norm in norms])]
    return torch.linalg.vector_norm(norms[0], norm_type)


def _norms(grads: list[Any], norm_type: float) -> torch.Tensor:
    """Return the norm of each gradient. Shards, of one way of sharding, need one all-reduce."""
    local = list(map(local_part, grads))
    if norm_type == math.inf:  # a rank may have an empty shard, which has no maximum
        values = torch.stack([part.abs().max() if part.numel() else part.new_zeros(()) for part in local])
    else:
        values = torch.stack(torch._foreach_norm(local, norm_type))
    if not is_sharded(grads[0]):
        return values
    from torch.distributed.tensor import DTensor, Partial, Replicate

    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    if norm_type == math.inf:  # the maximum over ranks would lose a NaN, so NaN becomes infinity
        exact, reduce = exact.nan_to_num(nan=math.inf, posinf=math.inf), "max"
    else:
        exact, reduce = exact.pow(norm_type), "sum"
    placements = [Replicate() if one.is_replicate() else Partial(reduce) for one in grads[0].placements]
    whole = DTensor.from_local(exact, grads[0].device_mesh, placements, run_check=False).full_tensor()
    return (whole if norm_type == math.inf else whole.pow(1.0 / norm_type)).to(values)
