"""``SOLVER.OPTIMIZERS``: an optimizer and a schedule for each part of a model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError, get_cfg, suggest
from ...config.components import errors_at
from .param_groups import Group, find_parameters

_Part = TypeVar("_Part")


class _Named(Generic[_Part]):
    """Objects in an order, each with a name: that of a mapping, or its number."""

    def __init__(self, parts: Sequence[_Part] | Mapping[str, _Part]) -> None:
        named = parts.items() if isinstance(parts, Mapping) else ((str(i), part) for i, part in enumerate(parts))
        self.named: dict[str, _Part] = dict(named)

    def __len__(self) -> int:
        return len(self.named)

    def __iter__(self) -> Iterator[_Part]:
        return iter(self.named.values())

    def __getitem__(self, key: str | int) -> _Part:
        """Return a part by its name or number."""
        return self.named[key] if isinstance(key, str) else list(self.named.values())[key]

    def step(self) -> None:
        """Step each of them."""
        for part in self:
            part.step()  # type: ignore[attr-defined]


class OptimizerList(_Named[Optimizer]):
    """Several optimizers with the interface of one, for example one for matrices and another for the rest.

    Trainers, hooks and checkpointers use it like one optimizer. A schedule belongs to one optimizer: see
    :class:`SchedulerList`, or register an ``LRScheduler(optimizer, scheduler, name="lr_head")`` for each.

    Args:
        optimizers: must not share parameters. Without names they are "0", "1" and so on.
    """

    def __init__(self, optimizers: "Sequence[Optimizer] | Mapping[str, Optimizer]") -> None:
        super().__init__(optimizers)
        parameters = [{id(p) for group in one.param_groups for p in group["params"]} for one in self]
        if len(set().union(*parameters)) < sum(map(len, parameters)):
            raise ValueError("two of the optimizers share a parameter: it would be updated twice a step")

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in order."""
        return list(self)

    @property
    def param_groups(self) -> list[Group]:
        """The groups of all optimizers, concatenated."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.named), "optimizers": [optimizer.state_dict() for optimizer in self]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states, names = state_dict["optimizers"], state_dict["names"]
        if set(names) != set(self.named):
            raise ValueError(f"the state has the optimizers {', '.join(names)}, but this list {', '.join(self.named)}")
        for name, state in zip(names, states, strict=True):
            self.named[name].load_state_dict(state)


class SchedulerList(_Named[Any]):
    """The schedules of an :class:`OptimizerList`, with the same names.

    Trainers step each with an ``LRScheduler(part=name)`` hook; ``step()`` is for a loop of your own.
    """


# ---------------------------------------------------------------------- the config


def solver_parts(cfg: CfgNode) -> dict[str, CfgNode]:
    """Return the config of each of ``SOLVER.OPTIMIZERS``: the whole config, with the keys of SOLVER that it sets.

    Raises:
        ConfigError: a part is malformed, or two have no PARAMS; the message has the full key.
    """
    # The default config has the keys of one optimizer and its schedule before OPTIMIZERS.
    keys, parts = list(get_cfg().SOLVER), {}
    allowed = ["PARAMS", *keys[: keys.index("OPTIMIZERS")]]
    for name, entry in cfg.SOLVER.OPTIMIZERS.items():
        key = f"SOLVER.OPTIMIZERS.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{key}: expected a mapping such as {{PARAMS: head, BASE_LR: 0.01}}, got {entry!r}")
        for option in entry:
            if option not in allowed:
                hint = suggest(option, allowed) or "."
                raise ConfigError(f"{key}.{option}: there is no such key{hint} Keys: PARAMS and those of SOLVER")
        part = cfg.thawed()
        part.SOLVER.OPTIMIZERS.clear()
        with errors_at(key):
            part.SOLVER.merge_from_other_cfg(CfgNode({option: entry[option] for option in entry if option != "PARAMS"}))
        parts[name] = part
    without = [name for name, entry in cfg.SOLVER.OPTIMIZERS.items() if "PARAMS" not in entry]
    if len(without) > 1:
        raise ConfigError(
            f"SOLVER.OPTIMIZERS.{without[1]}.PARAMS: is missing; only one optimizer can be without PARAMS, for the "
            "parameters that the others leave"
        )
    return parts


def parameters_of_parts(cfg: CfgNode, model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Return the trainable parameters of each of ``SOLVER.OPTIMIZERS``.

    Raises:
        ConfigError: a parameter belongs to two optimizers or to none, or an optimizer has no parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not names:
        raise ConfigError(f"MODEL.NAME: {type(model).__name__} has no parameter that requires a gradient")
    owner: dict[nn.Parameter, str] = {}
    rest = ""
    for part, entry in cfg.SOLVER.OPTIMIZERS.items():
        if "PARAMS" not in entry:
            rest = part
            continue
        for parameter in find_parameters(model, entry["PARAMS"], f"SOLVER.OPTIMIZERS.{part}.PARAMS").values():
            if owner.setdefault(parameter, part) != part:
                raise ConfigError(
                    f"SOLVER.OPTIMIZERS.{part}.PARAMS: {names.get(parameter)} belongs to {owner[parameter]} already"
                )
    left = [parameter for parameter in names if parameter not in owner]
    if left and not rest:
        more = f" and {len(left) - 1} others belong" if len(left) > 1 else " belongs"
        raise ConfigError(
            f"SOLVER.OPTIMIZERS: {names[left[0]]}{more} to no optimizer; add an optimizer without PARAMS for the rest"
        )
    owner |= dict.fromkeys(left, rest)
    parts = {part: {p for p in names if owner[p] == part} for part in cfg.SOLVER.OPTIMIZERS}
    for part, parameters in parts.items():
        if not parameters:
            raise ConfigError(f"SOLVER.OPTIMIZERS.{part}: has no parameter that requires a gradient")
    return parts
