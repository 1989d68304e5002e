"""Chooses how a trainer's steps run."""

from collections.abc import Mapping
from typing import Any

from ...config import ConfigError
from ..parallel.base import own_method
from .compiled_step import CompiledStep
from .cuda_graph import GraphedStep
from .scheduled_step import ScheduledStep
from .turns import Turns, takes_turns
from .whole_step import WholeStep

__all__ = ["whole_step"]


def whole_step(
    compile_step: bool | Mapping[str, Any], cuda_graph: bool, trainer: Any
) -> WholeStep | ScheduledStep | Turns | None:
    """Return what runs a step as one unit, by a schedule or in turns; None if its parts run one by one.

    Args:
        compile_step: whether a step is compiled; a dict has the arguments of ``torch.compile``.
        cuda_graph: whether a step is captured in a CUDA graph.
        trainer: has model, optimizer (perhaps an ``OptimizerList``), strategy and gradient scaler.

    Raises:
        ConfigError: both keys are set, or the strategy's own methods do not work with them.
    """
    if compile_step is not False and cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    key = "SOLVER.CUDA_GRAPH" if cuda_graph else "" if compile_step is False else "SOLVER.COMPILE_STEP"
    strategy = trainer.strategy
    own = [name for name in ("forward_backward", "backward", "step") if own_method(strategy, name)]
    if own and key:
        raise ConfigError(f"{key}: the strategy {type(strategy).__name__} has its own {own[0]}(); set {key} to False")
    if "step" in own and trainer.grad_scaler is not None:
        raise ConfigError(
            f"SOLVER.AMP.DTYPE: float16's gradient scaler calls the optimizer's step(), and the strategy "
            f"{type(strategy).__name__} has its own: use bfloat16"
        )
    turns = takes_turns(trainer.model, trainer.optimizer)
    if "forward_backward" in own:
        if turns:
            raise ConfigError(
                f"SOLVER.OPTIMIZERS: the strategy {type(strategy).__name__} has its own forward_backward(), in which "
                "optimizers cannot take turns"
            )
        return ScheduledStep(strategy.forward_backward)
    if not key:
        return Turns() if turns else None
    if cuda_graph:
        return GraphedStep()
    return CompiledStep({} if isinstance(compile_step, bool) else compile_step)
