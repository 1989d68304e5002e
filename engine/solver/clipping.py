"""Gradient clipping: by value, by the global norm, or by each parameter's own norm."""

import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError
from ...hooks.common.models import optimizers_of
from ...hooks.common.tensors import is_sharded, local_part

__all__ = [
    "ClipBeforeStep",
    "GradClipper",
    "build_grad_clipper",
    "clip_hooks",
    "clipper_of",
    "maybe_add_gradient_clipping",
]

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
        ConfigError: CLIP_TYPE is unknown, or a number is not positive.
    """
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return partial(_measure, clip=None, norm_type=2.0) if cfg.LOG.GRAD_NORM else None
    for name in ("CLIP_VALUE", "NORM_TYPE"):
        if not clip[name] > 0:  # also refuses NaN
            raise ConfigError(f"SOLVER.CLIP_GRADIENTS.{name}: must be greater than 0, not {clip[name]}")
    if clip.CLIP_TYPE not in _CLIPPERS:
        raise ConfigError(
            f'SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clip.CLIP_TYPE!r}; use "value", "norm" (global), "full_model" (the '
            'same) or "param_norm"'
        )
    clipper = partial(_CLIPPERS[clip.CLIP_TYPE], limit=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    if cfg.LOG.GRAD_NORM and _CLIPPERS[clip.CLIP_TYPE] is not _clip_norm:
        return partial(_measure, clip=clipper, norm_type=clip.NORM_TYPE)
    return clipper


def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: OptimizerOrType) -> OptimizerOrType:
    """Make an optimizer clip gradients in its ``step``, if ``SOLVER.CLIP_GRADIENTS`` is enabled.

    :func:`build_optimizer` calls it. A trainer whose own step clips takes over (see :class:`ClipBeforeStep`), so
    gradients are clipped once.

    Args:
        cfg: the whole config.
        optimizer: an optimizer, which is changed and returned, or a class, of which a subclass is returned.
    """
    clip = build_grad_clipper(cfg)
    if clip is None or not cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
        return optimizer
    if cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE == "norm":
        logger.log(
            logging.WARNING if "hookline.detectron2" in sys.modules else logging.INFO,
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

    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
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

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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


def clip_hooks(optimizer: Any) -> list[ClipBeforeStep]:
    """Return the hooks by which an optimizer, or each of several, clips in its ``step``."""
    hooks = (
        hook for one in optimizers_of(optimizer) for hook in getattr(one, "_optimizer_step_pre_hooks", {}).values()
    )
    return [hook for hook in hooks if isinstance(hook, ClipBeforeStep)]


def clipper_of(optimizer: Any) -> GradClipper | None:
    """Return the clipper with which an optimizer clips in its ``step``; None if it does not, or there are several."""
    hooks = clip_hooks(optimizer) if isinstance(optimizer, Optimizer) else []
    return hooks[0].clip if hooks else None


# ---------------------------------------------------------------------- arithmetic

# Foreach calls are faster than nn.utils.clip_grad_norm_, which groups gradients by device and dtype first. Of sharded
# gradients each rank handles its shards. The host never waits for the device.


def _clip_value(parameters: list[nn.Parameter], limit: float, norm_type: float = 2.0) -> None:
    if own := [local_part(grad) for grad in _gradients(parameters)]:
        torch._foreach_clamp_max_(own, limit)
        torch._foreach_clamp_min_(own, -limit)


def _clip_norm(parameters: list[nn.Parameter], limit: float, norm_type: float) -> torch.Tensor:
    grads = _gradients(parameters)
    norm = torch.linalg.vector_norm(_norms(grads, norm_type), norm_type)
    own = [local_part(grad) for grad in grads]
    kinds = {(grad.device, grad.dtype) for grad in own}
    for kind in kinds:
        same = own if len(kinds) == 1 else [grad for grad in own if (grad.device, grad.dtype) == kind]
        torch._foreach_mul_(same, _factors(norm, limit).to(*kind))
    return norm


def _clip_each_norm(parameters: list[nn.Parameter], limit: float, norm_type: float) -> None:
    grads = _gradients(parameters)
    own = [local_part(grad) for grad in grads]
    factors = _factors(_norms(grads, norm_type), limit).unbind()
    if own:
        torch._foreach_mul_(own, [factor.to(grad) for factor, grad in zip(factors, own, strict=True)])


_CLIPPERS: dict[str, Callable[..., torch.Tensor | None]] = {
    "value": _clip_value,
    "norm": _clip_norm,
    "full_model": _clip_norm,
    "param_norm": _clip_each_norm,
}


def _measure(parameters: list[nn.Parameter], clip: GradClipper | None, norm_type: float) -> torch.Tensor:
    """Return the global norm, and clip in another way, if at all."""
    norm = torch.linalg.vector_norm(_norms(_gradients(parameters), norm_type), norm_type)
    if clip is not None:
        clip(parameters)
    return norm


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients. Sums over ranks that are still to be taken (DTensor's ``Partial``) are taken."""
    for parameter in parameters:
        grad: Any = parameter.grad
        if is_sharded(grad) and any(placement.is_partial() for placement in grad.placements):
            parameter.grad = grad.redistribute(placements=cast(Any, parameter).placements)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norms(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each gradient. Shards need one all-reduce for each group of ranks over which some are."""
    if not grads:
        return torch.zeros(1)
    own = [local_part(grad) for grad in grads]
    if norm_type == math.inf:  # a rank may have an empty shard, which has no maximum
        norms = [part.abs().max() if part.numel() else part.new_zeros(()) for part in own]
    else:
        norms = list(torch._foreach_norm(own, norm_type))
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    values = torch.stack(norms)
    if not any(map(is_sharded, grads)):
        return values
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    if norm_type == math.inf:  # the maximum over ranks would lose a NaN, so NaN becomes infinity
        exact = exact.nan_to_num(nan=math.inf, posinf=math.inf)
        return _reduce(exact, grads, dist.ReduceOp.MAX).to(values.dtype)
    return _reduce(exact.pow(norm_type), grads, dist.ReduceOp.SUM).pow(1.0 / norm_type).to(values.dtype)


def _reduce(values: torch.Tensor, grads: list[Any], op: Any) -> torch.Tensor:
    """Reduce a value of each gradient over the ranks that have its shards."""
    kinds: dict[Any, list[int]] = {}
    for index, grad in enumerate(grads):
        if is_sharded(grad):
            kinds.setdefault((grad.device_mesh, grad.placements), []).append(index)
    rows: dict[Any, list[int]] = {}
    for (mesh, placements), indices in kinds.items():
        for dim, placement in enumerate(placements):
            if not placement.is_replicate() and mesh.size(dim) > 1:
                rows.setdefault(mesh.get_group(dim), []).extend(indices)
    for group, indices in rows.items():
        parts = list(values.unbind())
        chosen = torch.stack([parts[index] for index in indices])
        dist.all_reduce(chosen, op, group=group)
        for index, value in zip(indices, chosen.unbind(), strict=True):
            parts[index] = value
        values = torch.stack(parts)
    return values


def _factors(norms: torch.Tensor, limit: float) -> torch.Tensor:
    return (limit / (norms + 1e-6)).clamp(max=1.0)  # clamp keeps NaN
