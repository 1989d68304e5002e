"""What is done about losses that are NaN or infinite."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from ..config import ConfigError
from . import comm

__all__ = ["NonFinitePolicy", "skip_on_device"]

logger = logging.getLogger(__name__)


class NonFinitePolicy:
    """Decides what becomes of a step whose loss is NaN or infinite. The value is logged in any case.

    Args:
        policy: "raise" a FloatingPointError; "skip" the update; "stop" training in good order, without the update.

    Attributes:
        policy: as given.
        skip_update: whether the update of the present step must not be made.
        steps: how many updates were left out.
    """

    def __init__(self, policy: Literal["raise", "skip", "stop"] = "raise") -> None:
        self.policy = policy
        self.skip_update = False
        self.steps = 0

    def found(self, trainer: Any, error: FloatingPointError) -> None:
        """A loss of the present step is NaN or infinite: if that is no reason to fail, no update is made of it.

        Args:
            trainer: whose step it is.
            error: says what was found; raised by the policy "raise".
        """
        if self.policy == "raise":
            raise error
        self.skip_update = True
        self.count(trainer, str(error))

    def count(self, trainer: Any, what: str) -> None:
        """An update of ``trainer`` is left out, because of ``what``."""
        self.steps += 1
        trainer.storage.put_scalar("nonfinite_steps", self.steps, smoothing_hint=False)
        if self.policy == "stop":
            trainer.request_stop(what, everywhere=True)
        elif self.steps == 1:
            logger.warning("%s; the update is skipped, as all such will be, counted as nonfinite_steps", what)

    def found_late(self, trainer: Any) -> None:
        """Look at the losses that were brought from the device just now: their updates have been made.

        Raises:
            FloatingPointError: one is NaN or infinite, and the policy is "raise".
        """
        iteration = trainer.storage.nonfinite.get("total_loss")
        if iteration is None or self.steps:
            return
        what = f"the loss is NaN or infinite at iteration {iteration}"
        if self.policy == "raise":
            raise FloatingPointError(what)
        if self.policy == "stop":
            trainer.request_stop(what, everywhere=True)


def skip_on_device(optimizers: Iterable[Any], losses: Mapping[str, torch.Tensor]) -> None:
    """Have fused optimizers leave the weights alone if a loss is not finite, without asking the device.

    Raises:
        ConfigError: an optimizer is not fused.
    """
    finite = torch.stack([loss.detach() for loss in losses.values()]).isfinite().all()
    if comm.get_world_size() > 1:  # a loss of any rank is in the gradients of all
        finite = comm.all_reduce_sum((~finite).to(torch.float32)) == 0
    for optimizer in optimizers:
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise ConfigError(
                f"SOLVER.NONFINITE_LOSS: skip needs a fused optimizer on {finite.device.type}, and this "
                f"{type(optimizer).__name__} is not; set SOLVER.OPTIMIZER.ARGS.fused, or choose raise or stop"
            )
        optimizer.grad_scale, optimizer.found_inf = None, (~finite).to(torch.float32)
