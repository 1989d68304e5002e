"""Losses and gradients of a step: they are recorded, and checked for NaN and infinite values; and so are weights."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common import is_sharded, local_part, optimizers_of, start_momentum, unwrap_model
from ...hooks.event_storage import EventStorage, get_event_storage
from .. import comm
from .protocol import StepTrainer

logger = logging.getLogger(__name__)

# Sets a flag if a tensor of a list has a NaN or an infinity, and multiplies the tensors by a number, here 1. One call
# checks all tensors of a device and type, which makes it the cheapest check.
_check_all = torch._amp_foreach_non_finite_check_and_unscale_

# Flags on a device are read when metrics are written or something is saved, and at the latest after this many.
_MAX_UNREAD = 1000


class NonFinitePolicy:
    """Decides what happens if a loss or a gradient is NaN or infinite. The weights never receive such an update.

    On the CPU each step is checked before its update. On other devices the check sets a flag on the device: fused
    optimizers skip the update by themselves, and the flag is read before metrics are written and before anything is
    evaluated or saved. With "raise", an optimizer that is not fused may have updated the weights by then; they are not
    saved. Ranks that hold shards of the gradients exchange the flag in each step.

    A skipped step keeps its effect on buffers, such as batch norm's statistics: :meth:`check_weights` names a buffer
    that became NaN.

    Args:
        policy: "raise" a FloatingPointError; "skip" the update; "stop" training, without the update.
        limit: this many iterations in a row without an update are an error, with any policy. Updates that a gradient
            scaler skips while it lowers its scale count too.

    Attributes:
        policy, limit: the arguments.
        skip_update: whether the trainer must skip the update of the present step.
        steps: number of skipped updates.
        in_a_row: number of iterations without an update since the last one that had one.
    """

    def __init__(self, policy: Literal["raise", "skip", "stop"] = "raise", limit: int = 100) -> None:
        self.policy, self.limit = policy, limit
        self.skip_update = False
        self.steps = self.in_a_row = 0
        self._warned = False  # of a batch that was skipped
        self._counted = -1  # the last iteration counted in in_a_row
        self._unread: list[tuple[int, torch.Tensor, bool]] = []  # iteration, flag, whether it is a gradient scaler's
        self._optimizer: Any = None
        self._waits = True  # on the CPU, reading a result waits for nothing else
        self._alone = True  # no other rank makes the same update
        self._sharded = self._exchanges = False  # gradients: whether sharded; whether each rank has only some
        self._flag, self._one = torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32)

    def check(
        self, trainer: StepTrainer, losses: Mapping[str, torch.Tensor], error: FloatingPointError | None = None
    ) -> None:
        """Check a step after its backward passes and before its update.

        Args:
            trainer: the trainer.
            losses: this rank's losses.
            error: says that one of the losses is NaN or infinite, if that is known. Ignored, as the losses are, if the
                trainer has a check of its own.

        Raises:
            FloatingPointError: something is NaN or infinite and the policy is "raise", or the limit is reached.
        """
        if self._optimizer is not trainer.optimizer:
            self._prepare(trainer)
        checks_losses = type(trainer)._detect_anomaly is detect_anomaly  # otherwise the trainer has done it
        scaled, alone = trainer.grad_scaler is not None, self._alone
        gradients: list[torch.Tensor] = []
        if not scaled:  # a scaler checks them itself
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        gradients.append(gradient)
        if self._sharded:
            with torch.no_grad():  # otherwise autograd records the conversion, which takes most of the time
                gradients = list(map(local_part, gradients))
        if not self._waits:
            self._check_on_device(trainer, gradients, [loss.detach() for loss in losses.values()], checks_losses)
            return
        error = error if checks_losses else None
        bad = not scaled and self._find(gradients, self._flag).item()
        if bad:
            self._flag.zero_()
        # A rank that averages gradients with others skips a step only if all do: if the gradients are not finite.
        if bad or (error is not None and alone):
            text = _describe_gradients(trainer, losses) if error is None else str(error)
            if self._exchanges or not alone:
                text = _first_of_all_ranks(text, error is not None)
            self._apply(trainer, trainer.iter, text)
        elif error is not None and self.policy != "skip":  # of this rank alone: all ranks make the update
            self._apply(trainer, trainer.iter, f"on rank {comm.get_rank()} {error}", late=True)
        elif not scaled:
            self.in_a_row = 0

    def _prepare(self, trainer: StepTrainer) -> None:
        self._optimizer = trainer.optimizer
        self._waits, self._alone = trainer.device_type == "cpu", trainer.averaging_ranks == 1
        self._sharded = any(is_sharded(p) for group in trainer.optimizer.param_groups for p in group["params"])
        size = comm.get_world_size()
        self._exchanges = size > 1 and (self._sharded or comm.get_data_size() != size)

    def _find(self, tensors: list[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
        """Set a flag if something in ``tensors`` is not finite, on any rank. Does not wait for the device."""
        if self._one.device != found.device:
            self._one = torch.ones((), dtype=torch.float32, device=found.device)
        try:
            _check_all(tensors, found, self._one)
        except RuntimeError:  # sparse, complex or integer tensors, or several devices
            _find_in_any(tensors, found)
        return (comm.all_reduce_sum(found) > 0).to(torch.float32) if self._exchanges else found

    def _check_on_device(
        self, trainer: StepTrainer, gradients: list[torch.Tensor], losses: list[torch.Tensor], checks_losses: bool
    ) -> None:
        found, checked = torch.zeros((), dtype=torch.float32, device=losses[0].device), losses if checks_losses else []
        found = self._find([*gradients, *checked] if self._alone else gradients, found)
        if trainer.grad_scaler is None:
            skip_on_device(optimizers_of(trainer.optimizer), found, self.policy)
        if not self._alone and self.policy != "skip":  # of this rank alone: all ranks make the update
            found = _find_in_any(checked, found.clone())
        self._unread.append((trainer.iter, found, False))
        if len(self._unread) >= _MAX_UNREAD:
            self.raise_pending(trainer)

    def scaled_step(self, trainer: StepTrainer) -> None:
        """Update the weights and the scale; the gradient scaler skips the update if a gradient is NaN or infinite."""
        scaler: Any = trainer.grad_scaler
        for optimizer in optimizers_of(trainer.optimizer):
            if not optimizer.state:
                start_momentum(optimizer)
        scaler.step(trainer.optimizer)
        flags = list(scaler._found_inf_per_device(trainer.optimizer).values())
        scaler.update()
        found = torch.stack([flag.reshape(()).to(flags[0].device) for flag in flags]).max()
        self._unread.append((trainer.iter, found, True))
        if trainer.device_type == "cpu":
            self.raise_pending(trainer)
        if scaler._scale is not None:  # get_scale() would wait for the device
            trainer.storage.put_scalar("grad_scale", scaler._scale, smoothing_hint=False)

    def raise_pending(self, trainer: StepTrainer) -> None:
        """Read the flags on the device and apply the policy.

        Raises:
            FloatingPointError: something is NaN or infinite and the policy is "raise", or the limit is reached.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        flags = torch.stack([flag.reshape(()).to(unread[0][1].device) for _, flag, _ in unread]).tolist()
        for (iteration, _, of_scaler), bad in zip(unread, flags, strict=True):
            if bad and of_scaler:
                self._count(iteration, f"gradients are NaN or infinite at iteration {iteration}")
            elif bad:
                text = f"a loss or a gradient is NaN or infinite at iteration {iteration}"
                self._apply(trainer, iteration, text, late=True)
            elif iteration != self._counted and (of_scaler or trainer.grad_scaler is None):
                self.in_a_row = 0

    def check_weights(self, trainer: StepTrainer, all_ranks: bool = False) -> None:
        """Check weights and buffers before they are evaluated or saved: a finite gradient can make an infinite update.

        A buffer may be infinite, as masks are, but not NaN.

        Args:
            trainer: the trainer.
            all_ranks: whether all ranks call this, so that shards are checked on all of them.

        Raises:
            FloatingPointError: weights or buffers are not finite; the message names the first.
        """
        trained = {name: one for name, one in _named_parameters(trainer).items() if one.requires_grad}
        weights = {name: _part(one) for name, one in trained.items() if not is_lazy(one)}
        named = unwrap_model(trainer.model).named_buffers()
        buffers = {f"the buffer {name}": _part(one) for name, one in named if not is_lazy(one)}
        norm = nn.utils.get_total_norm([one for one in (weights | buffers).values() if _has_norm(one)])
        bad: list[str] = []
        if not norm.isfinite():  # one wait for the device; infinite buffers, and norms that overflow, are looked at
            bad = [name for name, one in weights.items() if not one.isfinite().all()]
            bad += [name for name, one in buffers.items() if one.isnan().any()]
        if all_ranks and self._exchanges:
            bad = next(filter(None, comm.all_gather(bad)), [])
        if bad:
            raise _error(
                f"{_listed(bad)} is NaN or infinite after iteration {trainer.finished_iter}: the weights are neither "
                "evaluated nor saved. Resume from the last checkpoint, for example with a lower learning rate. A "
                "buffer, such as the statistics of batch norm, is also changed by a step whose update is skipped",
                trainer.finished_iter,
            )

    # ------------------------------------------------------------------ the policy

    def _apply(self, trainer: StepTrainer, iteration: int, text: str, late: bool = False) -> None:
        """Apply the policy to a step; ``late``: the update was due, and skipped on the device."""
        if self.policy == "raise":
            raise _error(text, iteration)
        self.skip_update = not late
        self.steps += 1
        trainer.storage.put_scalar("nonfinite_steps", self.steps, smoothing_hint=False, cur_iter=iteration)
        if self.policy == "stop":
            (trainer.request_stop if self._alone or late else trainer.stop)(text)
        elif self.steps == 1:
            logger.warning("%s; the update is skipped. Skipped updates are counted as nonfinite_steps", text)
        if (self.policy == "stop" or self.steps == 1) and (command := trainer.replay_command(iteration)):
            logger.warning("Look at this step: %s", command)
        if self.policy == "skip":
            self._count(iteration, text)

    def count_skipped(self, iteration: int) -> None:
        """Count a step whose batch the model's ``train_step`` skipped."""
        if not self._warned:
            self._warned = True
            logger.warning("train_step() returned None at iteration %d: such batches are skipped", iteration)
        self._count(iteration, "train_step() returned None")

    def _count(self, iteration: int, text: str) -> None:
        if iteration == self._counted:  # the losses of the step were counted already
            return
        self._counted = iteration
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{text}. {self.in_a_row} iterations in a row had no update, which is SOLVER.NONFINITE_LIMIT: lower "
                "the learning rate, clip gradients, or look for bad samples"
            )

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.steps, self.in_a_row = state_dict.get("steps", 0), state_dict.get("in_a_row", 0)


def record_step(
    trainer: StepTrainer,
    loss_dict: Mapping[str, torch.Tensor],
    data_time: float | None = None,
    prefix: str = "",
    iter: int | None = None,
) -> None:
    """Put the metrics of a step every ``gather_metric_period``, and check its losses and gradients.

    It is ``_write_metrics`` of a trainer. If ``data_time`` is not given, it is an entry of ``loss_dict``.
    """
    if data_time is None:
        loss_dict = {name: torch.as_tensor(value) for name, value in loss_dict.items()}
        data_time = float(loss_dict.pop("data_time", 0.0))
    storage, error = trainer.storage, None
    if not trainer.hooks.running:  # another trainer calls the steps
        trainer.iter = storage.iter
    iteration = trainer.iter if iter is None else iter
    try:
        if (iteration + 1) % trainer.gather_metric_period == 0:
            if trainer.strategy.averages:
                storage.over_ranks |= {prefix + name: "loss" for name in (*loss_dict, "total_loss")}
            # One of a subclass has detectron2's parameters.
            known = (storage,) if trainer.write_metrics is write_metrics else ()
            trainer.write_metrics(loss_dict, data_time, iteration, prefix, *known)
        else:
            on_cpu = {name: loss.item() for name, loss in loss_dict.items() if loss.is_cpu}
            check_finite(sum(on_cpu.values()), on_cpu, iteration)
    except FloatingPointError as found:
        error = found
    trainer.nonfinite.check(trainer, loss_dict, error)


def write_metrics(
    loss_dict: Mapping[str, torch.Tensor],
    data_time: float,
    cur_iter: int | None = None,
    prefix: str = "",
    storage: EventStorage | None = None,
) -> None:
    """Put the losses, their sum as ``total_loss``, and ``data_time`` (seconds) into the storage.

    Raises:
        FloatingPointError: a loss on the CPU is NaN or infinite. Losses on a GPU are not waited for.
    """
    put = (storage or get_event_storage()).put_scalar
    put("data_time", data_time, cur_iter=cur_iter)
    values: dict[str, Any] = {}
    total: Any = 0.0
    for name, loss in loss_dict.items():
        value = loss.item() if loss.is_cpu else loss.detach()
        values[prefix + name] = value
        put(prefix + name, value, cur_iter=cur_iter)
        total = total + value
    if "total_loss" not in loss_dict:
        put(f"{prefix}total_loss", total, cur_iter=cur_iter)
    if type(total) is float and total - total != 0.0:  # only if it is NaN or infinite
        check_finite(total, values, get_event_storage().iter if cur_iter is None else cur_iter)


def detect_anomaly(trainer: StepTrainer, losses: torch.Tensor, loss_dict: Mapping[str, torch.Tensor]) -> None:
    """Raise a FloatingPointError if the sum of the losses is NaN or infinite.

    It is ``_detect_anomaly`` of a trainer. If a subclass overrides that, with detectron2's arguments, its method is
    called before each update, in place of the check of the losses here. Gradients are still checked.
    """
    check_finite(losses.item(), loss_dict, trainer.iter)


def check_finite(total: Any, values: Mapping[str, Any], iteration: int) -> None:
    """Raise a FloatingPointError if a sum of losses is NaN or infinite. One on a device is not waited for."""
    if isinstance(total, float) and not math.isfinite(total):
        raise FloatingPointError(f"the loss is NaN or infinite at iteration {iteration}: {values}")


def _find_in_any(tensors: Iterable[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """Set a flag if a tensor of any kind, or this rank's part of it, has a NaN or an infinity; return the flag."""
    # Integers are finite, and empty tensors have no largest number.
    parts = [part for part in map(_part, tensors) if part.numel() and _has_norm(part)]
    largest = nn.utils.get_total_norm(parts, math.inf)  # unlike a sum of squares, it does not overflow
    return found.copy_(torch.where(largest.isfinite().to(found.device), found, 1.0))


def _has_norm(tensor: torch.Tensor) -> bool:
    """Whether torch computes norms of the tensor's type: not of integers, which are finite, nor of float8."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)


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


def _part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, and the values of a sparse one."""
    part = local_part(tensor).detach()
    return part._values() if part.is_sparse else part


def _named_parameters(trainer: StepTrainer) -> dict[str, nn.Parameter]:
    """Return the parameters of the model and of its loss."""
    loss = getattr(trainer, "loss_module", None)
    return {**dict(unwrap_model(trainer.model).named_parameters()), **({} if loss is None else loss.named_parameters())}


def _describe_gradients(trainer: StepTrainer, losses: Mapping[str, torch.Tensor]) -> str:
    """Return an error text that names the parameters whose gradients are not finite; empty if none is on this rank."""
    named = _named_parameters(trainer)
    bad = [name for name, p in named.items() if p.grad is not None and not _part(p.grad).isfinite().all()]
    if not bad:
        return ""
    values = {name: loss.item() for name, loss in losses.items()}
    return f"the gradient of {_listed(bad)} is NaN or infinite at iteration {trainer.iter}, with losses {values}"


def _first_of_all_ranks(text: str, of_loss: bool) -> str:
    """Return the text of the first rank that found something. Losses come first, since they cause the gradients."""
    texts = comm.all_gather((not of_loss, comm.get_rank(), text))
    nothing = True, comm.get_rank(), "a gradient is NaN or infinite"
    _, rank, first = min((found for found in texts if found[2]), default=nothing)
    return f"on rank {rank} {first}"


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} others" if len(names) > 1 else "")


def _error(text: str, iteration: int) -> FloatingPointError:
    """Return an error that may be raised after its step."""
    error = FloatingPointError(text)
    error.found_in_step = iteration  # type: ignore[attr-defined]
    return error
