"""Shortcuts around what torch does in every step for uses that a training step does not have.

Each does exactly what the public call does, to the bit, and steps aside for it wherever somebody could tell the
difference: an optimizer with hooks, a profiler that runs, an overridden method, a tensor subclass. The public calls
stand beside each shortcut; ``tests/engine/step/test_fast_path.py`` compares the two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer_module

__all__ = ["FastOptimizer", "backward", "plain_step"]

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_profiler_enabled = torch.autograd._profiler_enabled
_set_grad_enabled = torch._C._set_grad_enabled
# ones_like(loss) for each dtype and device that losses have had.
_ones: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def backward(loss: torch.Tensor) -> None:
    """``loss.backward()``: the autograd engine is called with a gradient of one that is made once, not in each step.

    Args:
        loss: a scalar.
    """
    if type(loss) is not torch.Tensor or loss.ndim or _engine is None or torch._C._are_functorch_transforms_active():
        loss.backward()
        return
    key = (loss.dtype, loss.device)
    one = _ones.get(key)
    if one is None:
        one = _ones[key] = torch.ones((), dtype=loss.dtype, device=loss.device)
    _engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class FastOptimizer:
    """``optimizer.step()`` and ``optimizer.zero_grad()``, without their profiling wrappers where nobody profiles.

    Args:
        optimizer: any.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._plain_zero_grad = type(optimizer).zero_grad is Optimizer.zero_grad
        self._step = plain_step(optimizer) if isinstance(optimizer, Optimizer) else None
        self._hooks: tuple[Any, ...] = (
            getattr(optimizer, "_optimizer_step_pre_hooks", None),
            getattr(optimizer, "_optimizer_step_post_hooks", None),
            _optimizer_module._global_optimizer_pre_hooks,
            _optimizer_module._global_optimizer_post_hooks,
        )

    def step(self) -> None:
        """``optimizer.step()``"""
        optimizer = self.optimizer
        pre, post, global_pre, global_post = self._hooks
        own = optimizer.__dict__.get("step")
        if (
            self._step is None
            or pre
            or post
            or global_pre
            or global_post
            or _profiler_enabled()
            or not (own is None or getattr(own, "_wrapped_by_lr_sched", False))
        ):
            optimizer.step()
            return
        if own is not None:  # torch's schedulers wrap step() to note that it was called
            optimizer._opt_called = True
        grad_enabled = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            self._step(optimizer)
        finally:
            _set_grad_enabled(grad_enabled)

    def zero_grad(self) -> None:
        """``optimizer.zero_grad()``"""
        optimizer = self.optimizer
        if not self._plain_zero_grad or "zero_grad" in optimizer.__dict__ or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The optimizer's step() as its class was written, to be called without gradients being recorded.

    Returns:
        It; None if what is around it is not just what torch puts there.
    """
    step = type(optimizer).step
    if not getattr(step, "hooked", False) or optimizer.defaults.get("differentiable", False):
        return None
    wrapped: Any = getattr(step, "__wrapped__", None)  # without profile_hook_step
    if getattr(wrapped, "__name__", "") != "step" or wrapped.__code__.co_name != "_use_grad":
        return None
    return wrapped.__wrapped__  # without _use_grad: step() above switches gradients off
