"""Several optimizers as one, for models whose parts need different optimizers."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerList"]


class OptimizerList:
    """A list of optimizers with the interface of one, for example one for matrices and another for the rest.

    Trainers, hooks and checkpointers use it like one optimizer. A schedule belongs to one optimizer of the list:
    register an ``LRScheduler(optimizer, scheduler, name="lr_head")`` for each.

    Args:
        optimizers: must not share parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        seen: set[int] = set()
        for optimizer in self.optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if own & seen:
                raise ValueError("two of the optimizers share a parameter: it would be updated twice a step")
            seen |= own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, concatenated."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            raise ValueError(f"the state has {len(states)} optimizers, but this list has {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
