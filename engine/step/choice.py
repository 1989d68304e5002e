"""Chooses how a trainer's steps run, and checks what a config says about it."""

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ...config import CfgNode, ConfigError, component
from ...hooks.base import HOOK_REGISTRY, HookBase
from ...hooks.common.models import unwrap_model
from .. import comm
from ..modeling import check_compile, resolve_device
from ..parallel.base import own_method
from ..solver.several import OptimizerList

if TYPE_CHECKING:  # imported where they are chosen
    from .fused_step import FusedStep
    from .scheduled_step import ScheduledStep
    from .turns import Turns

__all__ = ["check_step_config", "whole_step"]


def whole_step(
    compile_step: bool | Mapping[str, Any], cuda_graph: bool, trainer: Any
) -> "FusedStep | ScheduledStep | Turns | None":
    """Return what runs a step as one function, by a schedule or in turns; None if its parts run one by one.

    Args:
        compile_step: whether a step is compiled; a dict has the arguments of ``torch.compile``.
        cuda_graph: whether a step is captured in a CUDA graph.
        trainer: has model, optimizer (perhaps an ``OptimizerList``), strategy and gradient scaler.

    Raises:
        ConfigError: both keys are set, or the strategy's own methods do not work with them.
    """
    key = _key(compile_step is not False, cuda_graph)
    strategy = trainer.strategy
    own = [name for name in ("forward_backward", "backward", "step") if own_method(strategy, name)]
    if own and key:
        raise ConfigError(f"{key}: the strategy {type(strategy).__name__} has its own {own[0]}(); set {key} to False")
    if "step" in own and trainer.grad_scaler is not None:
        raise ConfigError(
            f"SOLVER.AMP.DTYPE: float16's gradient scaler calls the optimizer's step(), and the strategy "
            f"{type(strategy).__name__} has its own: use bfloat16"
        )
    turns = _takes_turns(trainer.model, trainer.optimizer)
    if "forward_backward" in own:
        if turns:
            raise ConfigError(
                f"SOLVER.OPTIMIZERS: the strategy {type(strategy).__name__} has its own forward_backward(), in which "
                "optimizers cannot take turns"
            )
        from .scheduled_step import ScheduledStep

        return ScheduledStep(strategy.forward_backward)
    if not key and turns:
        from .turns import Turns

        return Turns()
    if not key:
        return None
    if cuda_graph:
        from .cuda_graph import GraphedStep

        return GraphedStep()
    from .compiled_step import CompiledStep

    return CompiledStep({} if isinstance(compile_step, bool) else compile_step)


def _takes_turns(model: nn.Module, optimizer: Any) -> bool:
    """Return whether there are several optimizers, and the model's ``forward`` has a parameter ``optimizer``.

    Raises:
        ConfigError: it has not, but an optimizer is to be stepped only every so many iterations.
    """
    if not isinstance(optimizer, OptimizerList):
        return False
    module = unwrap_model(model)
    if "optimizer" in inspect.signature(module.forward).parameters:
        return True
    if any(every > 1 for every in optimizer.every.values()):
        raise ConfigError(
            f"SOLVER.OPTIMIZERS: EVERY needs a model that takes turns, but {type(module).__name__}.forward has no "
            "parameter 'optimizer'"
        )
    return False


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says about compiled and captured steps, before anything is built.

    Raises:
        ConfigError: SOLVER.COMPILE_STEP or SOLVER.CUDA_GRAPH does not work with another setting.
    """
    solver, args = cfg.SOLVER, cfg.SOLVER.COMPILE_STEP_ARGS
    check_compile("SOLVER.COMPILE_STEP_ARGS", args, ask_for_backends=solver.COMPILE_STEP)
    for name in ("fullgraph", "disable"):
        if name in args:
            raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS.{name}: the step is always one graph; leave it out")
    if args.get("mode") in ("reduce-overhead", "max-autotune"):  # the outputs of their graphs are overwritten
        raise ConfigError(
            f"SOLVER.COMPILE_STEP_ARGS.mode: {args.mode} captures CUDA graphs by itself, which is not supported: use "
            "max-autotune-no-cudagraphs, or SOLVER.CUDA_GRAPH"
        )
    key = _key(solver.COMPILE_STEP, solver.CUDA_GRAPH)
    for problem in _problems(cfg) if key else ():
        raise ConfigError(f"{key}: {problem}; or set {key} to False")


def _key(compile_step: bool, cuda_graph: bool) -> str:
    if compile_step and cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    return "SOLVER.COMPILE_STEP" if compile_step else "SOLVER.CUDA_GRAPH" if cuda_graph else ""


def _problems(cfg: CfgNode) -> Iterator[str]:
    device = resolve_device(cfg.MODEL.DEVICE)
    if cfg.SOLVER.CUDA_GRAPH and device.type != "cuda":
        yield f"needs a CUDA device, and MODEL.DEVICE {cfg.MODEL.DEVICE!r} is {device}"
    if comm.get_world_size() > 1:
        yield f"works in one process only, and there are {comm.get_world_size()}"
    if cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16":
        yield "does not work with SOLVER.AMP.DTYPE float16; use bfloat16"
    from .fused_step import INSIDE_EVENTS

    for index, entry in enumerate(cfg.HOOKS):
        name, _ = component(entry)
        cls = HOOK_REGISTRY.get(name, f"HOOKS[{index}]")
        for event in INSIDE_EVENTS if isinstance(cls, type) else ():
            if getattr(cls, event, None) is not getattr(HookBase, event):
                yield f"HOOKS[{index}]: {name} listens to {event}, in the middle of the step: remove the hook"
