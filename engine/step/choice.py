"""Chooses how a trainer's steps run."""

from collections.abc import Mapping
from typing import Any

from ...config import ConfigError
from .compiled_step import CompiledStep
from .cuda_graph import GraphedStep
from .whole_step import WholeStep

__all__ = ["whole_step"]


def whole_step(compile_step: bool | Mapping[str, Any], cuda_graph: bool) -> WholeStep | None:
    """Return what runs a step as one unit; None if its parts run one by one.

    Args:
        compile_step: whether a step is compiled; a dict has the arguments of ``torch.compile``.
        cuda_graph: whether a step is captured in a CUDA graph.

    Raises:
        ConfigError: both keys are set.
    """
    if compile_step is False:
        return GraphedStep() if cuda_graph else None
    if cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    return CompiledStep({} if compile_step is True else compile_step)
