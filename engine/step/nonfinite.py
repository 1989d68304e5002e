"""What is done about losses and gradients that are NaN or infinite."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common.models import unwrap_model
from ...hooks.common.optimizers import optimizers_of
from .. import comm

__all__ = ["Buffers", "NonFinitePolicy", "find_nonfinite", "skip_on_device"]

logger = logging.getLogger(__name__)

# Sets a flag if a tensor of a list has a NaN or an infinity, and multiplies the tensors by a number, here 1: the
# cheapest check there is, since it is one call for all of them.
_check_all = torch._amp_foreach_non_finite_check_and_unscale_
_ONE = torch.ones(())
# Flags on a device are read before metrics are written or anything is saved; in a run that does neither, this often.
_MAX_UNREAD = 1000

# What a flag stands for. The losses and gradients of a step: it is skipped.
_STEP = "step"
# The losses alone: the gradients are checked by a gradient scaler.
_LOSSES = "losses"
# The losses of this rank alone, where the gradients of all ranks are another flag.
_OWN_LOSSES = "own losses"
# The gradients that a gradient scaler has checked: it skips the update and lowers its scale.
_OVERFLOW = "overflow"


class NonFinitePolicy:
    """Decides what happens if a loss or a gradient is NaN or infinite. The weights never see such an update.

    On the CPU each step is checked before its update. On other devices the check stays on the device: fused optimizers
    skip the update by themselves, and the host reads the result later, but before metrics are written and before
    anything is evaluated or saved. With "raise", an optimizer that is not fused may then have made the update; such
    weights are not saved.

    Args:
        policy: "raise" a FloatingPointError; "skip" the update; "stop" training, without the update.
        limit: so many iterations in a row without an update are an error, whatever the policy. With a gradient scaler,
            which skips updates as it looks for its scale, too.

    Attributes:
        policy, limit: as given.
        skip_update: whether the update of the present step must not be made.
        steps: how many updates were skipped.
        in_a_row: how many of the last iterations had no update.
    """

    def __init__(self, policy: Literal["raise", "skip", "stop"] = "raise", limit: int = 100) -> None:
        self.policy = policy
        self.limit = limit
        self.skip_update = False
        self.steps = 0
        self.in_a_row = 0
        self._counted = -1
        self._unread: list[tuple[int, torch.Tensor, str]] = []
        self._flag = torch.zeros(())
        self._optimizer: Any = None
        self._buffers: Buffers | None = None
        self._plain = self._parts = False
        self._one = _ONE

    # ------------------------------------------------------------------ in a step

    def begin(self, trainer: Any) -> None:
        """Before the forward pass: keep what the model's buffers are, which a step that is skipped must not change."""
        if self.policy == "raise":
            return
        if self._buffers is None or self._buffers.model is not trainer.model:
            self._buffers = Buffers(trainer.model)
        self._buffers.keep()

    def check(self, trainer: Any, losses: Mapping[str, torch.Tensor], error: FloatingPointError | None = None) -> None:
        """Check a step: its gradients are complete, and its update is not made yet.

        Args:
            trainer: whose step it is.
            losses: of this rank.
            error: says that one of them is NaN or infinite, where that is known.

        Raises:
            FloatingPointError: by the policy "raise", or because the limit is reached.
        """
        if self._optimizer is not trainer.optimizer:
            self._optimizer = trainer.optimizer
            parameters = (p for group in trainer.optimizer.param_groups for p in group["params"])
            self._plain = not any(hasattr(p, "to_local") for p in parameters)
            # Ranks with parts of one model see parts of its gradients, and must decide alike.
            self._parts = comm.get_world_size() > 1 and not (
                self._plain and comm.get_data_size() == comm.get_world_size()
            )
        if trainer._device_type() != "cpu":
            self._check_on_device(trainer, losses)
            return
        if trainer.grad_scaler is not None:
            bad, kind = error is not None, _LOSSES
        elif trainer._found is not None:
            bad, kind = bool(trainer._found), _STEP
        else:
            bad, kind = self._found_in_gradients(trainer.optimizer), _STEP
            if error is not None and not bad and trainer._ranks is None:
                bad = True
        if bad:
            self._judge(trainer, trainer.iter, kind, self._error(trainer, losses, error))
        else:
            if error is not None:  # the gradients that all ranks share are finite
                self._judge(trainer, trainer.iter, _OWN_LOSSES, error)
            if self.in_a_row and kind is _STEP:
                self.in_a_row = 0

    def _found_in_gradients(self, optimizer: Any) -> bool:
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    gradients.append(gradient)
        flag = self._flag
        self._find(gradients, flag, _ONE)
        if self._parts:
            flag = comm.all_reduce_sum(flag)
        if not flag.item():
            return False
        self._flag.zero_()
        return True

    def _find(self, tensors: list[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> None:
        if self._plain:
            try:
                _check_all(tensors, found, one)
                return
            except RuntimeError:  # some are sparse or complex, or they differ in type or device
                self._plain = False
        find_nonfinite(tensors, found)

    def _check_on_device(self, trainer: Any, losses: Mapping[str, torch.Tensor]) -> None:
        iteration, scaler = trainer.iter, trainer.grad_scaler
        if trainer._found is not None:  # the step was made as one unit, without the update if it was to be skipped
            self._unread.append((iteration, trainer._found, _STEP))
        else:
            gradients = [p.grad for group in trainer.optimizer.param_groups for p in group["params"]]
            tensors = [gradient for gradient in gradients if gradient is not None] if scaler is None else []
            own = [loss.detach() for loss in losses.values()]
            device = own[0].device
            if trainer._ranks is None:
                tensors += own
            else:  # all ranks have the same gradients, and must decide alike
                self._unread.append((iteration, find_nonfinite(own, torch.zeros((), device=device)), _OWN_LOSSES))
            if self._one.device != device:
                self._one = torch.ones((), device=device)
            found = torch.zeros((), device=device)
            self._find(tensors, found, self._one)
            if self._parts and scaler is None:
                found = (comm.all_reduce_sum(found) > 0).to(torch.float32)
            self._unread.append((iteration, found, _STEP if scaler is None else _LOSSES))
            if scaler is None:
                skip_on_device(optimizers_of(trainer.optimizer), found, self.policy)
            if self._buffers is not None:
                self._buffers.restore(found)
        if len(self._unread) >= _MAX_UNREAD:
            self.settle(trainer)

    def count_overflow(self, trainer: Any, found: list[torch.Tensor]) -> None:
        """Note whether a gradient scaler skipped the updates of the present step.

        Args:
            trainer: whose step it is.
            found: by the scaler: 1 where there was a NaN or an infinity.
        """
        if not found:
            return
        if trainer._device_type() != "cpu":
            highest = torch.stack([flag.reshape(()).to(found[0].device) for flag in found]).max()
            self._unread.append((trainer.iter, highest, _OVERFLOW))
        elif any(flag.item() for flag in found):
            what = f"gradients are NaN or infinite at iteration {trainer.iter}"
            self._judge(trainer, trainer.iter, _OVERFLOW, FloatingPointError(what))
        else:
            self.in_a_row = 0

    # ------------------------------------------------------------------ afterwards

    def settle(self, trainer: Any) -> None:
        """Read what was found on the device, and act on it: before metrics are written and anything is saved.

        Raises:
            FloatingPointError: by the policy "raise", or because the limit is reached.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        flags = torch.stack([flag.reshape(()).to(unread[0][1].device) for _, flag, _ in unread]).tolist()
        for (iteration, _, kind), bad in zip(unread, flags, strict=True):
            if bad:
                is_loss = kind in (_LOSSES, _OWN_LOSSES) or _total_loss_is_bad(trainer.storage, iteration)
                what = "the loss" if is_loss else "a gradient"
                error = FloatingPointError(f"{what} is NaN or infinite at iteration {iteration}")
                self._judge(trainer, iteration, kind, error, late=True)
            elif kind is _STEP or (kind is _OVERFLOW and iteration != self._counted):
                self.in_a_row = 0

    def check_weights(self, trainer: Any, together: bool = False) -> None:
        """Find weights that are NaN or infinite, before they are evaluated or saved.

        Args:
            trainer: whose weights they are.
            together: whether all ranks call this, so that shards can be checked on all of them.

        Raises:
            FloatingPointError: some are; the message names the first.
        """
        weights = [p.detach() for group in trainer.optimizer.param_groups for p in group["params"]]
        weights = [_local(weight) for weight in weights if not is_lazy(weight)]
        weights = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
        norms = torch._foreach_norm([weight for weight in weights if weight.numel()]) if weights else []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for norm in norms:
            by_device.setdefault(norm.device, []).append(norm.float())
        fine = all(math.isfinite(torch.stack(some).sum().item()) for some in by_device.values())
        # A norm can be infinite where no weight is.
        fine = fine or all(bool(weight.isfinite().all()) for weight in weights)
        if together and self._parts:
            fine = not comm.all_reduce_sum(int(not fine))
        if fine:
            return
        names = _names(trainer, lambda parameter: parameter.detach())
        raise FloatingPointError(
            f"{_first(names, 'a weight')} is NaN or infinite after iteration {trainer.finished_iter}: the weights are "
            "neither evaluated nor saved. Resume from the last checkpoint, for example with a lower learning rate"
        )

    # ------------------------------------------------------------------ deciding

    def _judge(self, trainer: Any, iteration: int, kind: str, error: FloatingPointError, late: bool = False) -> None:
        """Do what the policy says about a step in which something was found."""
        if kind is _OVERFLOW:
            self._count(iteration, error)
            return
        if kind is _OWN_LOSSES:  # no gradient depends on it: the other ranks make the update, and so does this one
            error = FloatingPointError(f"on rank {comm.get_rank()} {error}")
        if self.policy == "raise":
            raise error
        if self.policy == "stop":
            together = not late and kind is _STEP and trainer._ranks is not None
            trainer.request_stop(str(error), everywhere=together)
        if kind is _OWN_LOSSES:
            return
        self.skip_update = not late
        if self._buffers is not None and not late and trainer._found is None:
            self._buffers.restore()
        if iteration == self._counted:  # more than one flag of a step
            return
        self.steps += 1
        trainer.storage.put_scalar("nonfinite_steps", self.steps, smoothing_hint=False, cur_iter=iteration)
        if self.policy == "skip":
            if self.steps == 1:
                logger.warning("%s; the update is skipped, as all such will be, counted as nonfinite_steps", error)
            self._count(iteration, error)
        self._counted = iteration

    def _count(self, iteration: int, error: FloatingPointError) -> None:
        if iteration == self._counted:
            return
        self._counted = iteration
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{error}. {self.in_a_row} iterations in a row had no update, which is SOLVER.NONFINITE_LIMIT: lower "
                "the learning rate, clip gradients, or look for bad samples"
            )

    def _error(
        self, trainer: Any, losses: Mapping[str, torch.Tensor], error: FloatingPointError | None
    ) -> FloatingPointError:
        """What was found, in words; the same on all ranks that share gradients."""
        is_loss = error is not None
        if error is None:
            which = _first(_names(trainer, lambda parameter: parameter.grad), "some parameter")
            values = {name: loss.item() for name, loss in losses.items()}
            text = f"the gradient of {which} is NaN or infinite at iteration {trainer.iter}, with losses {values}"
            if "num_items" in trainer.storage.histories():
                text += (
                    ". If num_items is 0 for a part of the batch (of a rank, or a micro-batch), have the model divide "
                    "by max(num_items, 1)"
                )
            error = FloatingPointError(text)
        if trainer._ranks is None:
            return error
        found: list[tuple[bool, str]] = comm.all_gather((is_loss, str(error)))
        bad = [(rank, message) for rank, (is_loss, message) in enumerate(found) if is_loss]
        if not bad:
            return FloatingPointError(found[0][1])
        others = f" (and on {len(bad) - 1} other ranks)" if len(bad) > 1 else ""
        return FloatingPointError(f"on rank {bad[0][0]}{others} {bad[0][1]}")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.steps, self.in_a_row = state_dict.get("steps", 0), state_dict.get("in_a_row", 0)


class Buffers:
    """The buffers of a model, such as batch norm's statistics, as they were before a forward pass.

    Args:
        model: whose buffers they are. They are looked up in each step: some code replaces them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._kept: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy them."""
        there = [owner.get(name) for owner, name in self._places]
        self._tensors = [_local(buffer) for buffer in there if buffer is not None and not is_lazy(buffer)]
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._tensors]
        if kinds != [(kept.shape, kept.dtype, kept.device) for kept in self._kept]:
            self._kept = [torch.empty_like(tensor) for tensor in self._tensors]
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._tensors)

    @torch.no_grad()
    def restore(self, found: torch.Tensor | None = None) -> None:
        """Give them the values back that were kept: if ``found`` is 1, on whatever device, or in any case."""
        if not self._kept:
            return
        if found is None:
            torch._foreach_copy_(self._tensors, self._kept)
            return
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for now, kept in zip(self._tensors, self._kept, strict=True):
            groups.setdefault((now.device, now.dtype), []).append((now, kept))
        for (device, _), pairs in groups.items():  # all in a few calls: models have hundreds
            now, kept = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*pairs, strict=True))
            chosen = torch.where(found.to(device) > 0, kept, now).split([tensor.numel() for tensor, _ in pairs])
            values = [value.view(tensor.shape) for value, (tensor, _) in zip(chosen, pairs, strict=True)]
            torch._foreach_copy_([tensor for tensor, _ in pairs], values)


def find_nonfinite(tensors: Iterable[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """Look for NaN and infinity, without waiting for a device.

    Args:
        tensors: of any kind; of sharded ones this rank's part is checked. Their values stay what they are.
        found: of shape () and float32; it is set to 1 if there are any.

    Returns:
        ``found``
    """
    at_once: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        part = _local(tensor)
        if part.layout is not torch.strided:
            part = part._values() if part.layout is torch.sparse_coo else part.values()
        if part.is_floating_point() and part.device.type in ("cpu", "cuda"):
            at_once.setdefault((part.device, part.dtype), []).append(part)
        else:
            found.copy_(torch.maximum(found, (~part.isfinite().all()).to(found)))
    for (device, _), parts in at_once.items():
        one = torch.ones((), device=device)
        if device == found.device:
            _check_all(parts, found, one)
        else:
            there = torch.zeros((), device=device)
            _check_all(parts, there, one)
            found.copy_(torch.maximum(found, there.to(found.device)))
    return found


def skip_on_device(optimizers: Iterable[Any], found: torch.Tensor, policy: str = "skip") -> None:
    """Have fused optimizers make no update if ``found`` is 1, without asking the device.

    Raises:
        ConfigError: an optimizer is not fused, and the policy is not "raise".
    """
    for optimizer in optimizers:
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.grad_scale, optimizer.found_inf = None, found
        elif policy != "raise":
            raise ConfigError(
                f"SOLVER.NONFINITE_LOSS: {policy} needs a fused optimizer on {found.device.type}, and this "
                f"{type(optimizer).__name__} is not; set SOLVER.OPTIMIZER.ARGS.fused, or choose raise"
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _total_loss_is_bad(storage: Any, iteration: int) -> bool:
    history = storage.histories().get("total_loss")
    return any(it == iteration and not math.isfinite(value) for value, it in history.values()) if history else False


def _names(trainer: Any, value_of: Any) -> list[str]:
    """The model's parameters of which ``value_of(parameter)`` is NaN or infinite, as far as this rank has them."""
    found = []
    for name, parameter in unwrap_model(trainer.model).named_parameters():
        value = value_of(parameter)
        if value is not None and find_nonfinite([value], torch.zeros((), device=_local(value).device)).item():
            found.append(name)
    return found


def _first(names: list[str], otherwise: str) -> str:
    if not names:
        return otherwise
    return names[0] + (f" and {len(names) - 1} others" if len(names) > 1 else "")
