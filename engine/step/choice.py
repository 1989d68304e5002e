"""Chooses how a trainer's steps run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...config import ConfigError
from .compiled_step import CompiledStep
from .cuda_graph import GraphedStep
from .turns import Turns, takes_turns
from .whole_step import WholeStep

__all__ = ["whole_step"]


def whole_step(
    compile_step: bool | Mapping[str, Any], cuda_graph: bool, model: nn.Module, optimizer: Any
) -> WholeStep | Turns | None:
    """Return what runs a step as one unit, or in turns; None if its parts run one by one.

    Args:
        compile_step: whether a step is compiled; a dict has the arguments of ``torch.compile``.
        cuda_graph: whether a step is captured in a CUDA graph.
        model: the model.
        optimizer: its optimizer, or an ``OptimizerList``.

    Raises:
        ConfigError: both keys are set.
    """
    if compile_step is False:
        if cuda_graph:
            return GraphedStep()
        return Turns() if takes_turns(model, optimizer) else None
    if cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    return CompiledStep({} if compile_step is True else compile_step)
