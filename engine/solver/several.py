"""Several optimizers as one, for models whose parts are trained differently."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerList"]


class OptimizerList:
    """Optimizers that are stepped together: one for the matrices, another for the rest, for example.

    What trainers, hooks and checkpointers use of an optimizer works on all of them. Schedules belong to one each:
    register an ``LRScheduler(optimizer, scheduler, name="lr_head")`` for every one.

    Args:
        optimizers: with no parameter in common.
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
        """The groups of all optimizers, one after the other."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Step each."""
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
            raise ValueError(f"the state is of {len(states)} optimizers, there are {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
