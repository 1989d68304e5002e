"""Gradient clipping: by value, by the global norm, or by each parameter's own norm."""

import functools
import logging
import math
import sys
from collections.abc import Callable
from functools import cache, partial
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
    if clip.CLIP_TYPE == "norm" and "hookline.detectron2" in sys.modules:
        _warn_of_global_norm()
    clipper = _clipper(clip)
    if cfg.LOG.GRAD_NORM and clip.CLIP_TYPE not in ("norm", "full_model"):
        return partial(_measure, clip=clipper, norm_type=clip.NORM_TYPE)
    return clipper


@cache
def _warn_of_global_norm() -> None:
    logger.warning(
        'SOLVER.CLIP_GRADIENTS.CLIP_TYPE "norm" clips the norm of all gradients together here. detectron2 clips that '
        'of each parameter: set "param_norm" for it'
    )


def _clipper(clip: CfgNode) -> GradClipper:
    for name in ("CLIP_VALUE", "NORM_TYPE"):
        if not clip[name] > 0:  # also refuses NaN
            raise ConfigError(f"SOLVER.CLIP_GRADIENTS.{name}: must be greater than 0, not {clip[name]}")
    if clip.CLIP_TYPE == "value":
        return partial(_clip_value, limit=clip.CLIP_VALUE)
    if clip.CLIP_TYPE in ("norm", "full_model"):
        return partial(_clip_norm, limit=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    if clip.CLIP_TYPE == "param_norm":
        return partial(_clip_each_norm, limit=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    raise ConfigError(
        f'SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clip.CLIP_TYPE!r}; use "value", "norm" (global), "full_model" (the same) '
        'or "param_norm"'
    )


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
        logger.info(
            'SOLVER.CLIP_GRADIENTS.CLIP_TYPE "norm" limits the norm of all gradients together. detectron2\'s "norm" '
            'limits that of each parameter, which is "param_norm" here'
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

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.paused:
            return None
        own, *rest = args  # the optimizer, and a closure if there is one
        closure = kwargs.get("closure", rest[0] if rest else None)
        if closure is None:
            self._clip(optimizer)
            return None

        def clipped_closure() -> Any:  # the closure computes the gradients
            loss = closure()
            self._clip(optimizer)
            return loss

        return (own, clipped_closure), {name: value for name, value in kwargs.items() if name != "closure"}

    def _clip(self, optimizer: Optimizer) -> None:
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


def _clip_value(parameters: list[nn.Parameter], limit: float) -> None:
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if any(is_sharded(parameter.grad) for parameter in parameters):
        for parameter in parameters:
            if _is_partial(parameter.grad):  # a sum over ranks that is still to be taken
                parameter.grad = cast(Any, parameter.grad).redistribute(placements=cast(Any, parameter).placements)
            local_part(parameter.grad).clamp_(-limit, limit)
    elif parameters:
        nn.utils.clip_grad_value_(parameters, limit)


def _clip_norm(parameters: list[nn.Parameter], limit: float, norm_type: float) -> torch.Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = _uniform_tensors(grads)
    if own is None and not any(map(is_sharded, grads)):
        return nn.utils.clip_grad_norm_(parameters, limit, norm_type)
    norm = _total_norm(grads, own, norm_type)
    if own is None:
        for grad in grads:
            local_part(grad).mul_(_factors(norm, limit).to(grad.dtype))
        return norm
    # Faster than clip_grad_norm_, which groups gradients by device and dtype first.
    torch._foreach_mul_(own, _factors(norm, limit))
    return norm


def _measure(parameters: list[nn.Parameter], clip: GradClipper | None, norm_type: float) -> torch.Tensor:
    """Return the global norm, and clip in another way, if at all."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _total_norm(grads, _uniform_tensors(grads), norm_type)
    if clip is not None:
        clip(parameters)
    return norm


def _total_norm(grads: list[torch.Tensor], own: list[torch.Tensor] | None, norm_type: float) -> torch.Tensor:
    if own is not None:
        return torch.linalg.vector_norm(_norms(grads, own, norm_type), norm_type)
    if any(map(is_sharded, grads)):
        return torch.linalg.vector_norm(_mixed_norms(grads, norm_type), norm_type)
    return nn.utils.get_total_norm(grads, norm_type)


def _clip_each_norm(parameters: list[nn.Parameter], limit: float, norm_type: float) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = _uniform_tensors(grads)
    if own is None and any(map(is_sharded, grads)):
        for grad, factor in zip(grads, _factors(_mixed_norms(grads, norm_type), limit), strict=True):
            local_part(grad).mul_(factor.to(grad.dtype))
        return
    if own is None:
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, limit, norm_type)
        return
    torch._foreach_mul_(own, _factors(_norms(grads, own, norm_type), limit).unbind())


def _norms(grads: list[torch.Tensor], own: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each gradient.

    Sharded gradients need one all-reduce for each group of ranks over which some are sharded; the host does not wait.
    """
    if own is grads:
        return torch.stack(torch._foreach_norm(own, norm_type))
    exact = torch.promote_types(own[0].dtype, torch.float32)
    if norm_type == math.inf:
        # A rank may have an empty shard. The maximum over ranks would lose a NaN, so NaN becomes infinity.
        largest = [part.abs().max() if part.numel() else part.new_zeros(()) for part in own]
        values = torch.stack(largest).to(exact).nan_to_num(nan=math.inf, posinf=math.inf)
        return _reduce(values, grads, dist.ReduceOp.MAX).to(own[0].dtype)
    values = torch.stack(torch._foreach_norm(own, norm_type)).to(exact).pow(norm_type)
    return _reduce(values, grads, dist.ReduceOp.SUM).pow(1.0 / norm_type).to(own[0].dtype)


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
        if len(indices) == len(values):
            dist.all_reduce(values, op, group=group)
            continue
        parts = list(values.unbind())
        chosen = torch.stack([parts[index] for index in indices])
        dist.all_reduce(chosen, op, group=group)
        for index, value in zip(indices, chosen.unbind(), strict=True):
            parts[index] = value
        values = torch.stack(parts)
    return values


def _mixed_norms(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each gradient if their dtypes differ, or some are sums over ranks still to be taken."""
    exact = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms: list[Any] = [torch.linalg.vector_norm(grad, norm_type, dtype=exact) for grad in grads]
    return torch.stack([norm.full_tensor() if is_sharded(norm) else norm for norm in norms])


def _factors(norms: torch.Tensor, limit: float) -> torch.Tensor:
    return (limit / (norms + 1e-6)).clamp(max=1.0)  # clamp keeps NaN


def _uniform_tensors(grads: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the gradients, or this rank's shards of them, if one foreach call can process them.

    Returns:
        None if there are no gradients, or they differ in type, device or dtype.
    """
    kinds = {(type(grad), grad.device, grad.dtype) for grad in grads}
    if len(kinds) == 1 and next(iter(kinds))[0] is torch.Tensor:
        return grads
    if not any(map(is_sharded, grads)) or any(map(_is_partial, grads)):
        return None
    own = [local_part(grad) for grad in grads]
    return own if len({(type(part), part.device, part.dtype) for part in own}) == 1 else None


def _is_partial(grad: Any) -> bool:
    return is_sharded(grad) and any(placement.is_partial() for placement in grad.placements)
