"""Checks of what a config says about steps that run as one unit."""

from ...config import CfgNode, ConfigError, component
from ...hooks.base import HOOK_REGISTRY, STEP_EVENTS, HookBase
from .. import comm
from ..modeling import check_compile, resolve_device
from .whole_step import OUTSIDE_EVENTS

__all__ = ["check_step_config"]


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says about steps that run as one unit, before anything is built.

    Raises:
        ConfigError: SOLVER.COMPILE_STEP or SOLVER.CUDA_GRAPH does not work with another setting.
    """
    solver = cfg.SOLVER
    args = solver.COMPILE_STEP_ARGS
    check_compile("SOLVER.COMPILE_STEP_ARGS", args, ask_for_backends=solver.COMPILE_STEP)
    for name in ("fullgraph", "disable"):
        if name in args:
            raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS.{name}: the step is always one graph; leave it out")
    if args.get("mode") in ("reduce-overhead", "max-autotune"):  # the outputs of their graphs are overwritten
        raise ConfigError(
            f"SOLVER.COMPILE_STEP_ARGS.mode: {args.mode} captures CUDA graphs by itself, which is not supported: use "
            "max-autotune-no-cudagraphs, or SOLVER.CUDA_GRAPH"
        )
    wanted = [name for name in ("COMPILE_STEP", "CUDA_GRAPH") if solver[name]]
    if len(wanted) == 2:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    if not wanted:
        return
    key = f"SOLVER.{wanted[0]}"
    device = resolve_device(cfg.MODEL.DEVICE)
    if solver.CUDA_GRAPH and device.type != "cuda":
        raise ConfigError(
            f"{key}: needs a CUDA device, and MODEL.DEVICE {cfg.MODEL.DEVICE!r} is {device}; set {key} to False"
        )
    if comm.get_world_size() > 1:
        raise ConfigError(
            f"{key}: works in one process only, and there are {comm.get_world_size()}; set {key} to False"
        )
    if solver.AMP.ENABLED and solver.AMP.DTYPE == "float16":
        raise ConfigError(f"{key}: does not work with SOLVER.AMP.DTYPE float16; use bfloat16, or set {key} to False")
    for index, entry in enumerate(cfg.HOOKS):
        name, _ = component(entry)
        cls = HOOK_REGISTRY.get(name, f"HOOKS[{index}]")
        if not isinstance(cls, type):
            continue  # a function that makes a hook: the trainer checks that
        if getattr(cls, "uses_outputs", False):
            raise ConfigError(
                f"HOOKS[{index}]: {name} uses the model's outputs, which a step under {key} does not return. Remove "
                f"the hook, or set {key} to False"
            )
        for event in STEP_EVENTS:
            if event not in OUTSIDE_EVENTS and getattr(cls, event, None) is not getattr(HookBase, event):
                raise ConfigError(
                    f"HOOKS[{index}]: {name} listens to {event}, which comes in the middle of a step; with {key} the "
                    f"step is one unit. Remove the hook, or set {key} to False"
                )
