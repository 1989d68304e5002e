"""Steps whose forward and backward passes are run by the strategy."""

from collections.abc import Callable
from typing import Any

import torch

from ...config import ConfigError
from ...hooks.hook_list import hook_name
from ..ranks.loss_weights import LossWeights

__all__ = ["ScheduledStep"]

# Events between the start of the forward passes and the end of the backward passes.
_WITHIN = ("after_forward", "before_backward")


class ScheduledStep:
    """A step in which the strategy computes losses and gradients. Checks, clipping and update are those of any step.

    Args:
        forward_backward: the method of the strategy.
    """

    def __init__(self, forward_backward: Callable[[Any, Any, float], dict[str, torch.Tensor]]) -> None:
        self._forward_backward = forward_backward
        self._called = False

    @property
    def _name(self) -> str:
        return type(getattr(self._forward_backward, "__self__", None)).__name__

    def check(self, trainer: Any) -> None:
        """Check the trainer's hooks.

        Raises:
            ConfigError: a hook listens to an event that such a step does not have.
        """
        for hook in trainer._hooks:
            if hook.uses_outputs:
                raise ConfigError(
                    f"PARALLEL.NAME: the hook {hook_name(hook)} uses the model's outputs, which forward_backward() of "
                    f"the strategy {self._name} does not return: remove the hook"
                )
        for event in _WITHIN:
            if trainer._listeners[event]:
                raise ConfigError(
                    f"PARALLEL.NAME: the hook {hook_name(trainer._listeners[event][0][2])} listens to {event}, which "
                    f"comes in the middle of forward_backward() of the strategy {self._name}: remove the hook"
                )

    def check_called(self, trainer: Any) -> None:
        """Check, after the first step, that the trainer called :meth:`run`.

        Raises:
            ConfigError: it did not.
        """
        if not self._called:
            raise ConfigError(
                f"PARALLEL.NAME: {type(trainer).__name__}.run_step does not call SimpleTrainer.run_step, so "
                f"forward_backward() of the strategy {self._name} is not called"
            )

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        """Run a step, except for reading its batch."""
        self._called = True
        if trainer.zero_grad_before_forward:
            trainer.zero_grad()
        trainer.nonfinite.begin(trainer)
        if trainer._listeners["before_forward"]:
            trainer.emit("before_forward", batch)
        weight = LossWeights(trainer._batches, batch, trainer._averaging_ranks).of_rank()
        losses = self._forward_backward(trainer, batch, weight)
        trainer.after_backward()
        trainer._write_metrics(losses, data_time)
        trainer.optimizer_step()
        if not trainer.zero_grad_before_forward:
            trainer.zero_grad()
        return True
