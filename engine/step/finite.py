"""Finding NaN and infinite values in tensors, and undoing their effect on buffers, without waiting for a device."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common.tensors import is_sharded, local_part
from .. import comm

__all__ = ["Buffers", "GradientCheck", "all_finite", "find_nonfinite", "skip_on_device", "start_momentum"]

# Sets a flag if a tensor of a list has a NaN or an infinity, and multiplies the tensors by a number, here 1. One call
# checks all tensors, which makes it the cheapest check.
_check_all = torch._amp_foreach_non_finite_check_and_unscale_
_ONE = torch.ones(())


class GradientCheck:
    """Looks for NaN and infinity in an optimizer's gradients, in one call where their types allow it.

    Attributes:
        optimizer: the optimizer.
        differs_by_rank: whether each rank has only a part of the gradients, so that ranks may find different things.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._sharded, self._one_call = any(map(is_sharded, parameters)), True
        size = comm.get_world_size()
        self.differs_by_rank = size > 1 and (self._sharded or comm.get_data_size() != size)
        self._flag = torch.zeros(())
        self._one = _ONE

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the present step; of sharded ones this rank's part."""
        groups = self.optimizer.param_groups
        found = [gradient for group in groups for p in group["params"] if (gradient := p.grad) is not None]
        if self._sharded:
            with torch.no_grad():  # otherwise autograd records the conversion, which takes most of the time
                return list(map(local_part, found))
        return found

    def any_bad(self, exchange: bool) -> bool:
        """Return whether a gradient is NaN or infinite. Waits for the result.

        Args:
            exchange: whether the ranks exchange what they find, if their gradients differ.
        """
        flag = self._flag
        self._mark(self.gradients(), flag, _ONE)
        if exchange and self.differs_by_rank:
            flag = comm.all_reduce_sum(flag)
        if not flag.item():
            return False
        self._flag.zero_()
        return True

    def find(self, tensors: list[torch.Tensor], device: torch.device, exchange: bool) -> torch.Tensor:
        """Check tensors without waiting for the device.

        Args:
            tensors: the tensors to check.
            device: the device of the result.
            exchange: whether the ranks exchange what they find, if their gradients differ.

        Returns:
            A flag: 1 if a tensor has a NaN or an infinity, otherwise 0.
        """
        if self._one.device != device:
            self._one = torch.ones((), device=device)
        found = torch.zeros((), device=device)
        self._mark(tensors, found, self._one)
        if exchange and self.differs_by_rank:
            found = (comm.all_reduce_sum(found) > 0).to(torch.float32)
        return found

    def _mark(self, tensors: list[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> None:
        if self._one_call:
            try:
                _check_all(tensors, found, one)
                return
            except RuntimeError:  # sparse or complex tensors, or tensors of different types or devices
                self._one_call = False
        find_nonfinite(tensors, found)


class Buffers:
    """A copy of a model's buffers (batch norm's statistics, for example), to restore them if a step is skipped.

    Args:
        model: the model. Its buffers are looked up in each step, since code may replace them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._kept: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy the buffers."""
        found = [owner.get(name) for owner, name in self._places]
        self._tensors = [local_part(buffer) for buffer in found if buffer is not None and not is_lazy(buffer)]
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._tensors]
        if kinds != [(kept.shape, kept.dtype, kept.device) for kept in self._kept]:
            self._kept = [torch.empty_like(tensor) for tensor in self._tensors]
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._tensors)

    @torch.no_grad()
    def restore(self, found: torch.Tensor | None = None) -> None:
        """Restore the copied values.

        Args:
            found: restore only if this tensor, on any device, is 1; None: always.
        """
        if not self._kept:
            return
        if found is None:
            torch._foreach_copy_(self._tensors, self._kept)
            return
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for now, kept in zip(self._tensors, self._kept, strict=True):
            groups.setdefault((now.device, now.dtype), []).append((now, kept))
        for (device, _), pairs in groups.items():  # few calls for the hundreds of buffers that models have
            now, kept = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*pairs, strict=True))
            chosen = torch.where(found.to(device) > 0, kept, now).split([tensor.numel() for tensor, _ in pairs])
            values = [value.view(tensor.shape) for value, (tensor, _) in zip(chosen, pairs, strict=True)]
            torch._foreach_copy_([tensor for tensor, _ in pairs], values)


def find_nonfinite(tensors: Iterable[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """Set a flag if a tensor has a NaN or an infinity. Does not wait for the device.

    Args:
        tensors: tensors of any type; of sharded ones this rank's part is checked. Their values do not change.
        found: the flag, float32 of shape (); it is set to 1 or not changed.

    Returns:
        ``found``
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        part = local_part(tensor)
        if part.layout is not torch.strided:
            part = part._values() if part.layout is torch.sparse_coo else part.values()
        if part.is_floating_point() and part.device.type in ("cpu", "cuda"):
            groups.setdefault((part.device, part.dtype), []).append(part)
        else:
            found.copy_(torch.maximum(found, (~part.isfinite().all()).to(found)))
    for (device, _), parts in groups.items():
        one = torch.ones((), device=device)
        if device == found.device:
            _check_all(parts, found, one)
        else:
            there = torch.zeros((), device=device)
            _check_all(parts, there, one)
            found.copy_(torch.maximum(found, there.to(found.device)))
    return found


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all values are finite, in this rank's parts of the tensors. Waits for the device."""
    parts = [local_part(tensor) for tensor in tensors if not is_lazy(tensor)]
    parts = [part for part in parts if part.numel() and (part.is_floating_point() or part.is_complex())]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in torch._foreach_norm(parts) if parts else []:
        by_device.setdefault(norm.device, []).append(norm.float())
    if all(math.isfinite(torch.stack(norms).sum().item()) for norms in by_device.values()):
        return True
    # A norm of finite values can overflow.
    return all(bool(part.isfinite().all()) for part in parts)


def skip_on_device(optimizers: Iterable[Any], found: torch.Tensor, policy: str = "skip") -> None:
    """Make fused optimizers skip their next update if ``found`` is 1. Does not wait for the device.

    Raises:
        ConfigError: an optimizer is not fused, and the policy is not "raise".
    """
    for optimizer in optimizers:
        if all(group.get("fused") for group in optimizer.param_groups):
            if not optimizer.state:
                start_momentum(optimizer)
            optimizer.grad_scale, optimizer.found_inf = None, found
        elif policy != "raise":
            raise ConfigError(
                f"SOLVER.NONFINITE_LOSS: {policy} needs a fused optimizer on {found.device.type}, and this "
                f"{type(optimizer).__name__} is not; set SOLVER.OPTIMIZER.ARGS.fused, or choose raise"
            )


def start_momentum(optimizer: Any) -> None:
    """Create the momentum of a fused SGD, as zeros, before its first step.

    torch leaves it uninitialized if the first step is skipped because of a NaN or an infinity.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.detach()))
