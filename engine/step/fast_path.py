"""Shortcuts for torch's public calls, without the parts that a training step does not need.

Each gives the same bits as its public call, and falls back to it where the difference could be seen: an optimizer with
hooks, an active profiler, an overridden method, a tensor subclass. ``tests/engine/step/test_fast_path.py`` compares
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer_module

from ..parallel.base import Strategy
from ..solver.clipping import clip_hooks

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_profiler_enabled = torch.autograd._profiler_enabled
_set_grad_enabled = torch._C._set_grad_enabled
# The gradient of a loss, by its dtype and device.
_ones: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def backward(loss: torch.Tensor) -> None:
    """Call ``loss.backward()``, but with a gradient of one that is created once and not in each step.

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


class FastStep:
    """``backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()`` without their profiling wrappers.

    Args:
        strategy: its ``backward`` and ``step`` are called instead, if it overrides them.

    Attributes:
        backward: called with the loss.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.backward: Callable[[torch.Tensor], None] = strategy.overridden("backward") or backward
        self._own_step = strategy.overridden("step")
        self._optimizer: Any = None

    def _use(self, optimizer: Any) -> None:
        """Look at an optimizer that was not stepped before."""
        self._optimizer = optimizer
        self._clip_hooks = clip_hooks(optimizer)
        self._plain_zero_grad = type(optimizer).zero_grad is Optimizer.zero_grad
        self._step = plain_step(optimizer) if isinstance(optimizer, Optimizer) else None
        self._hooks: tuple[Any, ...] = (
            getattr(optimizer, "_optimizer_step_pre_hooks", None),
            getattr(optimizer, "_optimizer_step_post_hooks", None),
            _optimizer_module._global_optimizer_pre_hooks,
            _optimizer_module._global_optimizer_post_hooks,
        )

    def pause_clipping(self, optimizer: Any, paused: bool) -> None:
        """Pause the optimizer's own clipping of gradients, or resume it: the trainer has clipped them itself."""
        if optimizer is not self._optimizer:
            self._use(optimizer)
        for hook in self._clip_hooks:
            hook.paused = paused

    def step(self, optimizer: Any) -> None:
        """Call ``optimizer.step()``."""
        if optimizer is not self._optimizer:
            self._use(optimizer)
        if self._own_step is not None:
            optimizer._opt_called = True  # torch's schedulers check it, and the step may not call the optimizer's
            self._own_step(optimizer)
            return
        pre, post, global_pre, global_post = self._hooks
        own = optimizer.__dict__.get("step")
        hooked = post or global_pre or global_post or (pre and not all(map(_is_paused, pre.values())))
        changed = own is not None and not getattr(own, "_wrapped_by_lr_sched", False)
        if self._step is None or hooked or changed or _profiler_enabled():
            optimizer.step()
            return
        if own is not None:  # wrapped by a torch scheduler, to note that it was called
            optimizer._opt_called = True
        grad_enabled = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            self._step(optimizer)
        finally:
            _set_grad_enabled(grad_enabled)

    def zero_grad(self, optimizer: Any) -> None:
        """Call ``optimizer.zero_grad()``."""
        if optimizer is not self._optimizer:
            self._use(optimizer)
        if not self._plain_zero_grad or "zero_grad" in optimizer.__dict__ or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _is_paused(hook: object) -> bool:
    return getattr(hook, "paused", False)


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return an optimizer's ``step()`` without torch's wrappers; it must be called with gradients disabled.

    Returns:
        The function, or None if it has other wrappers than torch's.
    """
    step = type(optimizer).step
    if not getattr(step, "hooked", False) or optimizer.defaults.get("differentiable", False):
        return None
    wrapped: Any = getattr(step, "__wrapped__", None)  # without profile_hook_step
    if getattr(wrapped, "__name__", "") != "step" or wrapped.__code__.co_name != "_use_grad":
        return None
    return wrapped.__wrapped__  # without _use_grad, which disables gradients
