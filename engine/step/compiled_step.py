"""Steps whose forward and backward pass are one graph, compiled by torch."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...config import CfgNode, ConfigError
from ...config.signatures import bind
from ...hooks.hook_list import hook_name
from .. import comm
from .protocol import StepTrainer

# Methods of a trainer that a graph replaces, or that would not run it.
_REPLACED = ("run_step", "forward_backward", "forward", "backward")

_MICRO_BATCHES = "does not work with micro-batches: set SOLVER.ACCUMULATION_STEPS to 1"

Result = tuple[dict[str, Any], list[torch.Tensor | None]]
"""What a graph returns: the losses (perhaps with ``num_items``), and the gradient of each parameter."""


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says about compiled steps, before anything is built.

    Raises:
        ConfigError: an argument of the compiler is wrong.
    """
    args = cfg.SOLVER.COMPILE_STEP_ARGS
    bind(torch.compile, args, positional=(None,), key="SOLVER.COMPILE_STEP_ARGS", label="torch.compile")
    for name in {"fullgraph", "disable"} & args.keys():
        raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS.{name}: the step is always one graph; leave it out")
    if args.get("mode") in ("reduce-overhead", "max-autotune"):  # the outputs of their graphs are overwritten
        raise ConfigError(
            f"SOLVER.COMPILE_STEP_ARGS.mode: {args.mode} captures CUDA graphs, which is not supported for whole steps: "
            "set MODEL.COMPILE.ARGS.mode, with MODEL.COMPILE.ENABLED, and COMPILE_STEP False"
        )


class CompiledStep:
    """Runs forward and backward pass of each step as one graph made by ``torch.compile``: one for each shape of batch.

    A graph depends on the shape of its batch and not on earlier batches, so a resumed run computes what the
    uninterrupted one does. Torch's limit of graphs is an error.

    Args:
        args: arguments of ``torch.compile``.

    Raises:
        ConfigError: this torch is too old, or an argument is wrong.
    """

    def __init__(self, args: Mapping[str, Any]) -> None:
        import torch._dynamo  # takes a second, so only where steps are compiled

        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(
                f"SOLVER.COMPILE_STEP: torch {torch.__version__} cannot compile a backward pass; a newer one is needed"
            )
        # Graphs of other trainers in this process must not count as graphs of this one.
        args = {"isolate_recompiles": True, **args, "fullgraph": True}
        self._exceptions = torch._dynamo.exc
        tracing = {"trace_autograd_ops": True, "record_runtime_overhead": False}
        if args.get("dynamic", False) is False:
            # The meaning of dynamic=False, which as an argument costs time in every step: one graph for each shape. If
            # a graph took several shapes, which graph a batch met would depend on the batches before it.
            args.pop("dynamic", None)
            tracing["automatic_dynamic_shapes"] = False
        self._tracing = torch._dynamo.config.patch(tracing)
        try:
            self._compiled: Any = torch.compile(_forward_backward, **args)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS: {error}") from error
        self._ran = False

    def check(self, trainer: StepTrainer, usual: type) -> None:
        """Check that the trainer's steps can run as a graph.

        Args:
            trainer: the trainer.
            usual: the class that has the usual methods of a step.

        Raises:
            ConfigError: they cannot; the message says why, and what to do.
        """
        hooks, cls = trainer.hooks, type(trainer)
        events = [event for event in ("before_forward", "after_forward", "before_backward") if hooks.listeners[event]]
        inside = [f"the hook {hook_name(hooks.listeners[event][0][2])} listens to {event}" for event in events]
        inside += [f"the hook {hook_name(hook)} uses the model's outputs" for hook in hooks.hooks if hook.uses_outputs]
        for name in _REPLACED:
            if name in vars(trainer) or getattr(cls, name) is not getattr(usual, name):
                inside.append(f"{cls.__name__} overrides {name}()")
        problem = ""
        if inside:
            problem = f"{inside[0]}, which is inside of the graph: move that into the model, the loss or another event"
        elif trainer.grad_scaler is not None:
            problem = "does not work with float16: set SOLVER.AMP.DTYPE to bfloat16"
        elif trainer.accumulation_steps > 1:
            problem = _MICRO_BATCHES
        elif comm.get_world_size() > 1 or trainer.strategy.overridden("backward"):
            problem = "works in one process only, and not with a strategy that has a backward pass"
        if problem:
            raise ConfigError(f"SOLVER.COMPILE_STEP: {problem}; or set COMPILE_STEP to False")

    def run(self, trainer: StepTrainer, batch: object, data_time: float) -> None:
        """Run a step, except for reading its batch. Checks, clipping and update are those of any step.

        Raises:
            ConfigError: the step cannot run as a graph.
        """
        if trainer.accumulation_steps > 1:  # set by a hook
            raise ConfigError(f"SOLVER.COMPILE_STEP: {_MICRO_BATCHES}")
        parameters = [p for group in trainer.optimizer.param_groups for p in group["params"] if p.requires_grad]
        losses, gradients = self._compute(trainer, parameters, batch)
        if trainer.zero_grad_before_forward:
            trainer.zero_grad()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if "num_items" in losses:
            trainer.storage.put_scalar("num_items", losses.pop("num_items"), smoothing_hint=False)
        trainer.after_backward()
        trainer.record_losses(losses, data_time)
        trainer.optimizer_step()
        if not trainer.zero_grad_before_forward:
            trainer.zero_grad()

    def _compute(self, trainer: StepTrainer, parameters: list[nn.Parameter], batch: object) -> Result:
        called = trainer.adapter, trainer.model, trainer.precision
        if self._ran:
            try:
                return self._compiled(called, parameters, batch)
            except (self._exceptions.TorchDynamoException, self._exceptions.FailOnRecompileLimitHit):
                pass  # a new graph is needed; nothing has run yet
        trainer.adapter.call_for(trainer.model, batch, training=True)
        try:
            with self._tracing:  # slow, so not in every step
                result: Result = self._compiled(called, parameters, batch)
        except self._exceptions.FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"SOLVER.COMPILE_STEP: more than {torch._dynamo.config.recompile_limit} graphs would be needed. The "
                'line of torch above ("last reason") says what changed. For shapes of batches: use fewer '
                "(DATALOADER.DROP_LAST, padding), set SOLVER.COMPILE_STEP_ARGS.dynamic, or raise its recompile_limit"
            ) from error
        except self._exceptions.TorchDynamoException as error:
            raise ConfigError(
                "SOLVER.COMPILE_STEP: torch cannot make one graph of this step (see the traceback above, and "
                f"TORCH_LOGS=graph_breaks): {error}. Change the code that prevents it, or set COMPILE_STEP to False"
            ) from error
        self._ran = True
        return result


def _forward_backward(called: tuple[Any, nn.Module, torch.dtype | None], parameters: Any, batch: object) -> Result:
    adapter, model, precision = called
    device = parameters[0].device.type
    with torch.enable_grad():
        with nullcontext() if precision is None else torch.autocast(device, dtype=precision):
            losses = adapter.losses(model, batch)
        first, *others = (loss for name, loss in losses.items() if name != "num_items")
        found = torch.autograd.grad(sum(others, start=first), parameters, allow_unused=True)
    # Copies, with the parameters' memory formats: two parameters may have one gradient tensor together.
    gradients: list[torch.Tensor | None] = [
        None if gradient is None else torch.empty_like(parameter).copy_(gradient)
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    return {name: loss.detach() if isinstance(loss, torch.Tensor) else loss for name, loss in losses.items()}, gradients
