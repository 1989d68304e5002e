"""Several optimizers and schedules as one, for models whose parts need different ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerList", "SchedulerList", "one_or_several", "schedulers_of"]


class _Named:
    """Objects in an order, each with a name: that of a mapping, or its number."""

    def __init__(self, parts: "Sequence[Any] | Mapping[str, Any]") -> None:
        named = parts.items() if isinstance(parts, Mapping) else ((str(i), part) for i, part in enumerate(parts))
        self.named: dict[str, Any] = dict(named)

    def __len__(self) -> int:
        return len(self.named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.named.values())

    def __getitem__(self, key: str | int) -> Any:
        """Return a part by its name or number."""
        return self.named[key] if isinstance(key, str) else list(self.named.values())[key]


class OptimizerList(_Named):
    """Several optimizers with the interface of one, for example one for matrices and another for the rest.

    Trainers, hooks and checkpointers use it like one optimizer. A schedule belongs to one optimizer: see
    :class:`SchedulerList`, or register an ``LRScheduler(optimizer, scheduler, name="lr_head")`` for each.

    Args:
        optimizers: must not share parameters. Without names they are "0", "1" and so on.
        every: names of optimizers that are stepped only every so many iterations, if the model takes turns (see
            :class:`~hookline.engine.step.turns.Turns`).
    """

    def __init__(
        self, optimizers: "Sequence[Optimizer] | Mapping[str, Optimizer]", every: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(optimizers)
        self.every = dict(every or {})
        seen: set[int] = set()
        for optimizer in self:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if own & seen:
                raise ValueError("two of the optimizers share a parameter: it would be updated twice a step")
            seen |= own

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in order."""
        return list(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, concatenated."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.named), "optimizers": [optimizer.state_dict() for optimizer in self]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states, names = state_dict["optimizers"], state_dict["names"]
        if len(states) != len(self):
            raise ValueError(f"the state has {len(states)} optimizers, but this list has {len(self)}")
        if set(names) != set(self.named):
            raise ValueError(f"the state has the optimizers {', '.join(names)}, but this list {', '.join(self.named)}")
        for name, state in zip(names, states, strict=True):
            self.named[name].load_state_dict(state)


class SchedulerList(_Named):
    """The schedules of an :class:`OptimizerList`, with the same names.

    Trainers step each with an ``LRScheduler(part=name)`` hook.
    """

    def step(self) -> None:
        """Step each schedule, in a loop of your own."""
        for schedule in self:
            schedule.step()


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return the schedulers of a :class:`SchedulerList`; for any other scheduler a list of it alone."""
    return list(scheduler) if isinstance(scheduler, SchedulerList) else [scheduler]


def one_or_several(parts: Any, kind: type) -> Any:
    """Return a list, tuple or mapping as a ``kind``, and a single object as it is."""
    return kind(parts) if isinstance(parts, list | tuple | Mapping) else parts
