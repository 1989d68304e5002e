"""Checks of what a config says about steps that run as one unit."""

from ...config import CfgNode, ConfigError, component
from ...hooks.base import HOOK_REGISTRY, STEP_EVENTS, HookBase
from .. import comm
from ..modeling import check_compile, resolve_device
from .queued_steps import EARLY_EVENTS, STEPS, STOP, check_steps, needs_each_step, problem_of_hook
from .whole_step import OUTSIDE_EVENTS

__all__ = ["check_step_config", "one_step_a_call"]


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says about steps that run as one unit, before anything is built.

    Raises:
        ConfigError: SOLVER.COMPILE_STEP or SOLVER.CUDA_GRAPH does not work with another setting.
    """
    solver = cfg.SOLVER
    args = solver.COMPILE_STEP_ARGS
    steps = check_steps(args)
    of_torch = CfgNode({name: value for name, value in args.items() if name != "steps"})
    check_compile("SOLVER.COMPILE_STEP_ARGS", of_torch, ask_for_backends=solver.COMPILE_STEP)
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
    waits = solver.COMPILE_STEP and steps not in (None, 1)
    if waits and solver.NONFINITE_LOSS == "stop":
        raise ConfigError(f"{STEPS}: {STOP}, or set steps to 1")
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
        # A class of a user may set needs_each_step in its __init__: the trainer checks its hook.
        for event in EARLY_EVENTS if waits and cls.__module__.startswith("hookline.") else ():
            if getattr(cls, event, None) is not getattr(HookBase, event) and needs_each_step(cls, event):
                raise ConfigError(f"HOOKS[{index}]: {problem_of_hook(name, event)}")
        for event in STEP_EVENTS:
            if event not in OUTSIDE_EVENTS and getattr(cls, event, None) is not getattr(HookBase, event):
                raise ConfigError(
                    f"HOOKS[{index}]: {name} listens to {event}, which comes in the middle of a step; with {key} the "
                    f"step is one unit. Remove the hook, or set {key} to False"
                )


def one_step_a_call(cfg: CfgNode) -> None:
    """Make the steps of a run compute one by one, for hooks that look at each."""
    if "steps" in cfg.SOLVER.COMPILE_STEP_ARGS:
        cfg.SOLVER.COMPILE_STEP_ARGS.steps = 1
