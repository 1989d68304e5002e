"""Handles losses and gradients that are NaN or infinite."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...hooks.common.models import optimizers_of, unwrap_model
from ...hooks.common.tensors import local_part
from .. import comm
from .finite import Buffers, GradientCheck, all_finite, find_nonfinite, skip_on_device

__all__ = ["NonFinitePolicy"]

logger = logging.getLogger(__name__)

# Flags on a device are read when metrics are written or something is saved, and at the latest after this many.
_MAX_UNREAD = 1000

# What a flag reports:
_STEP = "step"  # the losses and gradients of a step, which is skipped
_OWN_LOSSES = "own losses"  # with several ranks, the losses of this rank; the gradients are the same on all of them
_SCALER = "scaler"  # gradients checked by a gradient scaler, which skips the update itself and lowers its scale


class NonFinitePolicy:
    """Decides what happens if a loss or a gradient is NaN or infinite. The weights never receive such an update.

    On the CPU each step is checked before its update. On other devices the check does not wait: fused optimizers skip
    the update by themselves, and the result is read before metrics are written and before anything is evaluated or
    saved. With "raise", an optimizer that is not fused may have updated the weights by then; they are not saved.

    Ranks that hold shards check their own. With "skip" and "stop" they exchange what they find in each step. With
    "raise" a rank that finds something sets its gradients to zero and asks the others to stop: all raise the same error
    at the end of the same step, within about a second, and before anything is written, evaluated or saved.

    Args:
        policy: "raise" a FloatingPointError; "skip" the update; "stop" training, without the update.
        limit: this many iterations in a row without an update are an error, with any policy. Updates that a gradient
            scaler skips while it lowers its scale count too.

    Attributes:
        policy, limit: the arguments.
        skip_update: whether the trainer must skip the update of the present step.
        found: in a compiled or captured step, the flag it returned; otherwise None.
        steps: number of skipped updates.
        in_a_row: number of iterations without an update since the last one that had one.
    """

    def __init__(self, policy: Literal["raise", "skip", "stop"] = "raise", limit: int = 100) -> None:
        self.policy = policy
        self.limit = limit
        self.skip_update = False
        self.found: torch.Tensor | None = None
        self.steps = 0
        self.in_a_row = 0
        self._counted = -1  # the last iteration counted in in_a_row
        self._unread: list[tuple[int, torch.Tensor, str]] = []
        self._gradients: GradientCheck | None = None
        self._waits = True  # on the CPU, reading a result waits for nothing else
        self._buffers: Buffers | None = None
        self._finding: _Finding | None = None  # the first of this rank, which all ranks will raise

    # ------------------------------------------------------------------ in a step

    def begin(self, trainer: Any) -> None:
        """Copy the model's buffers before the forward pass, since a skipped step must not change them."""
        self.found = None
        if self.policy == "raise":
            return
        if self._buffers is None or self._buffers.model is not trainer.model:
            self._buffers = Buffers(trainer.model)
        self._buffers.keep()

    def check(self, trainer: Any, losses: Mapping[str, torch.Tensor], error: FloatingPointError | None = None) -> None:
        """Check a step after its backward passes and before its update.

        Args:
            trainer: the trainer.
            losses: this rank's losses.
            error: says that one of the losses is NaN or infinite, if that is known.

        Raises:
            FloatingPointError: something is NaN or infinite and the policy is "raise", or the limit is reached.
        """
        gradients = self._gradients
        if gradients is None or gradients.optimizer is not trainer.optimizer:
            gradients = self._gradients = GradientCheck(trainer.optimizer)
            self._waits = trainer._device_type() == "cpu"
        if not self._waits:
            self._check_on_device(trainer, losses, gradients)
            return
        # A rank that averages gradients with others skips a step only if all do: if the gradients are not finite.
        skip = error is not None and trainer._averaging_ranks == 1
        late = gradients.differs_by_rank and self._raises_later(trainer)
        if self.found is not None:
            skip = bool(self.found)
        elif trainer.grad_scaler is None:
            skip = gradients.any_bad(exchange=not late) or skip
        if late and (skip or error is not None):
            self._note(trainer, self._finding or self._describe(trainer, losses, error))
            for gradient in gradients.gradients() if skip else ():  # the update exchanges norms, so all ranks make it
                gradient.zero_()
            return
        if skip:
            found = [self._describe(trainer, losses, error)]
            if trainer._averaging_ranks > 1:
                found = comm.all_gather(found[0])
            self._skip(trainer, trainer.iter, _first_error(trainer, found))
            return
        if error is not None:
            self._report_own_losses(trainer, error)
        if trainer.grad_scaler is None:
            self.in_a_row = 0

    def _check_on_device(self, trainer: Any, losses: Mapping[str, torch.Tensor], gradients: GradientCheck) -> None:
        iteration, unread = trainer.iter, self._unread
        if self.found is not None:
            unread.append((iteration, self.found, _STEP))
        else:
            unscaled = trainer.grad_scaler is None
            tensors = gradients.gradients() if unscaled else []
            own = [loss.detach() for loss in losses.values()]
            device = own[0].device
            if trainer._averaging_ranks == 1:
                tensors += own
            else:
                unread.append((iteration, find_nonfinite(own, torch.zeros((), device=device)), _OWN_LOSSES))
            # A norm for clipping would carry the NaN to ranks that do not skip the update.
            alone = trainer.clip_gradients is None and gradients.differs_by_rank and self._raises_later(trainer)
            found = gradients.find(tensors, device, exchange=unscaled and not alone)
            unread.append((iteration, found, _STEP))
            if unscaled:
                skip_on_device(optimizers_of(trainer.optimizer), found, self.policy)
            if self._buffers is not None:
                self._buffers.restore(found)
        if len(unread) >= _MAX_UNREAD:
            self.settle(trainer)

    def check_scaler(self, trainer: Any, flags: list[torch.Tensor]) -> None:
        """Note whether a gradient scaler skipped the update of the present step.

        Args:
            trainer: the trainer.
            flags: the scaler's flags, 1 where it found a NaN or an infinity.
        """
        if not flags:
            return
        if trainer._device_type() == "cpu":
            self._count_scaler(trainer.iter, any(flag.item() for flag in flags))
        else:
            highest = torch.stack([flag.reshape(()).to(flags[0].device) for flag in flags]).max()
            self._unread.append((trainer.iter, highest, _SCALER))

    # ------------------------------------------------------------------ between steps

    def settle(self, trainer: Any, all_ranks: bool = False) -> None:
        """Read the flags on the device and apply the policy.

        Args:
            trainer: the trainer.
            all_ranks: whether all ranks call this, so that they can exchange what they found.

        Raises:
            FloatingPointError: something is NaN or infinite and the policy is "raise", or the limit is reached.
        """
        if self._unread:
            self._read_flags(trainer)
        finding = self._finding
        if all_ranks and self._raises_later(trainer):
            if comm.all_reduce_sum(int(finding is not None)):
                self._finding = None
                raise _first_error(trainer, comm.all_gather(finding))
        elif finding is not None:
            self._finding = None
            raise _error(finding.text, finding.iteration)

    def _read_flags(self, trainer: Any) -> None:
        unread, self._unread = self._unread, []
        flags = torch.stack([flag.reshape(()).to(unread[0][1].device) for _, flag, _ in unread]).tolist()
        for (iteration, _, kind), bad in zip(unread, flags, strict=True):
            if kind is _SCALER:
                self._count_scaler(iteration, bad)
            elif bad:
                # With a scaler, only losses are checked here.
                is_loss = kind is _OWN_LOSSES or trainer.grad_scaler is not None or _bad_total_loss(trainer, iteration)
                what = "the loss" if is_loss else "a gradient"
                error = _error(f"{what} is NaN or infinite at iteration {iteration}", iteration)
                if self._raises_later(trainer):
                    self._note(trainer, _Finding(iteration, is_loss, str(error)))
                elif kind is _OWN_LOSSES:
                    self._report_own_losses(trainer, error)
                else:
                    self._skip(trainer, iteration, error, late=True)
            elif kind is _STEP and trainer.grad_scaler is None:
                self.in_a_row = 0

    def check_weights(self, trainer: Any, all_ranks: bool = False) -> None:
        """Check the weights before they are evaluated or saved: a finite gradient can make an infinite update.

        Args:
            trainer: the trainer.
            all_ranks: whether all ranks call this, so that shards are checked on all of them.

        Raises:
            FloatingPointError: weights are NaN or infinite; the message names the first.
        """
        fine = all_finite([p.detach() for group in trainer.optimizer.param_groups for p in group["params"]])
        if all_ranks and self._gradients is not None and self._gradients.differs_by_rank:
            fine = not comm.all_reduce_sum(int(not fine))
        if fine:
            return
        raise _error(
            f"{_name_bad(trainer, lambda parameter: parameter.detach()) or 'a weight'} is NaN or infinite after "
            f"iteration {trainer.finished_iter}: the weights are neither evaluated nor saved. Resume from the last "
            "checkpoint, for example with a lower learning rate",
            trainer.finished_iter,
        )

    # ------------------------------------------------------------------ the policy

    def _raises_later(self, trainer: Any) -> bool:
        """Whether ranks find different things, and raise an error together at the end of a later step."""
        gradients = self._gradients
        return (
            self.policy == "raise"
            and gradients is not None
            and gradients.differs_by_rank
            and trainer.grad_scaler is None
            and trainer.ranks_in_sync
        )

    def _note(self, trainer: Any, finding: "_Finding") -> None:
        """Note what this rank has found, perhaps alone, and ask all ranks to raise it."""
        if self._finding is None:
            self._finding = finding
            trainer.request_write()  # the ranks settle before they write

    def _skip(self, trainer: Any, iteration: int, error: FloatingPointError, late: bool = False) -> None:
        """Apply the policy to a step; ``late``: the update was due, and skipped on the device."""
        if self.policy == "raise":
            raise error
        if self.policy == "stop":
            _name_replay(trainer, iteration)
            trainer.request_stop(str(error), everywhere=not late and trainer._averaging_ranks > 1)
        self.skip_update = not late
        if self._buffers is not None and not late and self.found is None:
            self._buffers.restore()
        self.steps += 1
        trainer.storage.put_scalar("nonfinite_steps", self.steps, smoothing_hint=False, cur_iter=iteration)
        if self.policy == "skip":
            if self.steps == 1:
                logger.warning("%s; the update is skipped. Skipped updates are counted as nonfinite_steps", error)
                _name_replay(trainer, iteration)
            self._count(iteration, error)

    def _report_own_losses(self, trainer: Any, error: FloatingPointError) -> None:
        """Apply the policy to losses of one rank that no gradient depends on: no rank skips the update."""
        iteration = getattr(error, "found_in_step", trainer.iter)
        error = _error(f"on rank {comm.get_rank()} {error}", iteration)
        if self.policy == "raise":
            raise error
        if self.policy == "stop":
            _name_replay(trainer, iteration)
            trainer.request_stop(str(error))

    def _count_scaler(self, iteration: int, skipped: float) -> None:
        if iteration == self._counted:  # the step was skipped already, for its losses
            return
        if skipped:
            self._count(iteration, FloatingPointError(f"gradients are NaN or infinite at iteration {iteration}"))
        else:
            self.in_a_row = 0

    def _count(self, iteration: int, error: FloatingPointError) -> None:
        self._counted = iteration
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{error}. {self.in_a_row} iterations in a row had no update, which is SOLVER.NONFINITE_LIMIT: lower "
                "the learning rate, clip gradients, or look for bad samples"
            )

    def _describe(
        self, trainer: Any, losses: Mapping[str, torch.Tensor], error: FloatingPointError | None
    ) -> "_Finding":
        """Return what was found in the present step, for the error message."""
        is_loss = error is not None
        text = str(error)
        if error is None:
            which = _name_bad(trainer, lambda parameter: parameter.grad) or "some parameter"
            values = {name: loss.item() for name, loss in losses.items()}
            text = f"the gradient of {which} is NaN or infinite at iteration {trainer.iter}, with losses {values}"
            if "num_items" in trainer.storage.histories():
                text += (
                    ". If num_items is 0 for a part of the batch (of a rank, or a micro-batch), have the model divide "
                    "by max(num_items, 1)"
                )
        return _Finding(trainer.iter, is_loss, text)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.steps, self.in_a_row = state_dict.get("steps", 0), state_dict.get("in_a_row", 0)


class _Finding(NamedTuple):
    """What is NaN or infinite on a rank: at which iteration, whether it is a loss of this rank, and the message."""

    iteration: int
    is_loss: bool
    text: str


def _first_error(trainer: Any, findings: Sequence[_Finding | None]) -> FloatingPointError:
    """Return the first error of all ranks. A loss names its rank, and comes before gradients, which it causes."""
    found = [(finding, rank) for rank, finding in enumerate(findings) if finding is not None]
    first, rank = min(found, key=lambda pair: (pair[0].iteration, not pair[0].is_loss, pair[1]))
    if trainer._averaging_ranks == 1 or not first.is_loss:
        return _error(first.text, first.iteration)
    count = sum(finding.is_loss and finding.iteration == first.iteration for finding, _ in found)
    others = f" (and on {count - 1} other ranks)" if count > 1 else ""
    return _error(f"on rank {rank}{others} {first.text}", first.iteration)


def _error(text: str, iteration: int) -> FloatingPointError:
    """Return an error that may be raised after its step."""
    error = FloatingPointError(text)
    error.found_in_step = iteration  # type: ignore[attr-defined]
    return error


def _name_replay(trainer: Any, iteration: int) -> None:
    if command := trainer.replay_command(iteration):
        logger.warning("Look at this step: %s", command)


def _bad_total_loss(trainer: Any, iteration: int) -> bool:
    history = trainer.storage.histories().get("total_loss")
    return any(it == iteration and not math.isfinite(value) for value, it in history.values()) if history else False


def _name_bad(trainer: Any, value_of: Any) -> str:
    """Return the first parameter of which ``value_of(parameter)`` is not finite, and how many more; "" if none is."""
    names = []
    for name, parameter in unwrap_model(trainer.model).named_parameters():
        value = value_of(parameter)
        if value is not None and find_nonfinite([value], torch.zeros((), device=local_part(value).device)).item():
            names.append(name)
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return names[0] + others if names else ""
