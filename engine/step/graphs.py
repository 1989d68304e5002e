"""Steps that run as a whole: forward and backward pass as one graph, compiled by torch or captured as a CUDA graph."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...config import CfgNode, ConfigError
from ...hooks.hook_list import hook_name
from .. import comm
from ..modeling import check_compile
from ..parallel.base import overridden_method
from ..solver.several import OptimizerList

if TYPE_CHECKING:  # imported for several optimizers
    from .turns import Turns

__all__ = ["CompiledStep", "CudaGraphStep", "check_step_config", "whole_step"]

logger = logging.getLogger(__name__)

# Methods of a trainer that a graph takes the place of, or that would not run it.
_REPLACED = ("run_step", "forward_backward", "forward", "backward")

_MICRO_BATCHES = "does not work with micro-batches: set SOLVER.ACCUMULATION_STEPS to 1"

Result = tuple[dict[str, Any], list[torch.Tensor | None]]
"""What a graph returns: the losses (perhaps with ``num_items``), and the gradient of each parameter."""


def whole_step(compile_step: bool | Mapping[str, Any], cuda_graph: bool, trainer: Any) -> "GraphStep | Turns | None":
    """Return what runs a step as a graph or in turns; None if it is a usual one.

    Args:
        compile_step: whether the step is compiled; a dict has the arguments of ``torch.compile``.
        cuda_graph: whether the step is captured in a CUDA graph.
        trainer: has model, optimizer (perhaps an ``OptimizerList``), strategy and gradient scaler.

    Raises:
        ConfigError: both keys are set, or something does not work with one of them.
    """
    key = _key(compile_step is not False, cuda_graph)
    if isinstance(trainer.optimizer, OptimizerList):
        from .turns import Turns, takes_turns

        if takes_turns(trainer.model):
            if key:
                raise ConfigError(f"{key}: optimizers cannot take turns in a graph; set {key} to False")
            return Turns()
    if cuda_graph:
        return CudaGraphStep()
    return CompiledStep({} if isinstance(compile_step, bool) else compile_step) if key else None


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says about compiled and captured steps, before anything is built.

    Raises:
        ConfigError: both are asked for, or an argument of the compiler is wrong.
    """
    args = cfg.SOLVER.COMPILE_STEP_ARGS
    check_compile("SOLVER.COMPILE_STEP_ARGS", args)
    for name in {"fullgraph", "disable"} & args.keys():
        raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS.{name}: the step is always one graph; leave it out")
    if args.get("mode") in ("reduce-overhead", "max-autotune"):  # the outputs of their graphs are overwritten
        raise ConfigError(
            f"SOLVER.COMPILE_STEP_ARGS.mode: {args.mode} captures CUDA graphs by itself, which is not supported: use "
            "max-autotune-no-cudagraphs, or SOLVER.CUDA_GRAPH"
        )
    _key(cfg.SOLVER.COMPILE_STEP, cfg.SOLVER.CUDA_GRAPH)


def _key(compile_step: bool, cuda_graph: bool) -> str:
    if compile_step and cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    return "SOLVER.COMPILE_STEP" if compile_step else "SOLVER.CUDA_GRAPH" if cuda_graph else ""


class GraphStep:
    """Runs the forward and backward pass of each step as one graph. Checks, clipping and update are those of any step.

    Attributes:
        key: the config key that asks for such steps.
    """

    key: str

    def check(self, trainer: Any, usual: type) -> None:
        """Check that the trainer's steps can run as a graph.

        Args:
            trainer: the trainer.
            usual: the class that has the usual methods of a step.

        Raises:
            ConfigError: they cannot; the message says why, and what to do.
        """
        for problem in self._problems(trainer, usual):
            raise ConfigError(f"{self.key}: {problem}; or set {self.key} to False")

    def _problems(self, trainer: Any, usual: type) -> Iterator[str]:
        for event in ("before_forward", "after_forward", "before_backward"):
            if trainer.hooks.listeners[event]:
                hook = hook_name(trainer.hooks.listeners[event][0][2])
                yield f"the hook {hook} listens to {event}, in the middle of the graph: remove the hook"
        for hook in trainer.hooks.hooks:
            if hook.uses_outputs:
                yield f"the hook {hook_name(hook)} uses the model's outputs, which the graph does not return: remove it"
        for name in _REPLACED:
            if name in vars(trainer) or getattr(type(trainer), name) is not getattr(usual, name):
                yield (
                    f"{type(trainer).__name__} overrides {name}(), which would not be called: move what it does into "
                    "the model, the loss or a hook, and remove it"
                )
        if trainer.grad_scaler is not None:
            yield "does not work with float16: set SOLVER.AMP.DTYPE to bfloat16"
        if trainer.accumulation_steps > 1:
            yield _MICRO_BATCHES
        if comm.get_world_size() > 1 or overridden_method(trainer.strategy, "backward"):
            yield "works in one process only, without a backward pass of the strategy's own"

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        """Run a step, except for reading its batch.

        Returns:
            Whether the step has run; False if the trainer must run it without a graph.

        Raises:
            ConfigError: the step cannot run as a graph.
        """
        if trainer.accumulation_steps > 1:  # set by a hook
            raise ConfigError(f"{self.key}: {_MICRO_BATCHES}")
        parameters = [p for group in trainer.optimizer.param_groups for p in group["params"] if p.requires_grad]
        result = self._compute(trainer, parameters, batch)
        if result is None:
            return False
        losses, gradients = dict(result[0]), result[1]
        if trainer.zero_grad_before_forward:
            trainer.zero_grad()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if "num_items" in losses:
            trainer.storage.put_scalar("num_items", losses.pop("num_items"), smoothing_hint=False)
        trainer.after_backward()
        trainer.nonfinite.call_own_check(trainer, losses)
        trainer._write_metrics(losses, data_time)
        trainer.optimizer_step()
        if not trainer.zero_grad_before_forward:
            trainer.zero_grad()
        return True

    def _compute(self, trainer: Any, parameters: list[nn.Parameter], batch: Any) -> Result | None:
        """Return losses and gradients of a batch; None if the step must run without a graph."""
        raise NotImplementedError


def _forward_backward(parts: tuple[Any, nn.Module, torch.dtype | None], parameters: Any, batch: Any) -> Result:
    adapter, model, precision = parts
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


class CompiledStep(GraphStep):
    """Graphs made by ``torch.compile``, one for each shape of batch.

    A graph depends on the shape of its batch and not on earlier batches, so a resumed run computes what the
    uninterrupted one does. Torch's limit of graphs is an error.

    Args:
        args: arguments of ``torch.compile``.

    Raises:
        ConfigError: this torch is too old, or an argument is wrong.
    """

    key = "SOLVER.COMPILE_STEP"

    def __init__(self, args: Mapping[str, Any]) -> None:
        import torch._dynamo  # takes a second, so only where steps are compiled

        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(
                f"{self.key}: torch {torch.__version__} cannot compile a backward pass; a newer one is needed"
            )
        from ..modeling.inductor import use_exact_sums

        use_exact_sums(args)
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
            raise ConfigError(f"{self.key}_ARGS: {error}") from error
        self._ran = False

    def _compute(self, trainer: Any, parameters: list[nn.Parameter], batch: Any) -> Result:
        parts = trainer.adapter, trainer.model, trainer.precision
        if self._ran:
            try:
                return self._compiled(parts, parameters, batch)
            except (self._exceptions.TorchDynamoException, self._exceptions.FailOnRecompileLimitHit):
                pass  # a new graph is needed; nothing has run yet
        trainer.adapter.prepare(trainer.model, batch)
        try:
            with self._tracing:  # slow, so not in every step
                result: Result = self._compiled(parts, parameters, batch)
        except self._exceptions.FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"{self.key}: more than {torch._dynamo.config.recompile_limit} graphs would be needed. The line of "
                'torch above ("last reason") says what changed. For shapes of batches: use fewer '
                "(DATALOADER.DROP_LAST, padding), set SOLVER.COMPILE_STEP_ARGS.dynamic, or raise its recompile_limit"
            ) from error
        except self._exceptions.TorchDynamoException as error:
            raise ConfigError(
                f"{self.key}: torch cannot make one graph of this step (see the traceback above, and "
                f"TORCH_LOGS=graph_breaks): {error}. Change the code that prevents it, or set {self.key} to False"
            ) from error
        self._ran = True
        return result


class CudaGraphStep(GraphStep):
    """A CUDA graph, for batches of the first shape that has come three times in a row.

    Steps before that, and batches of other shapes, such as the last of an epoch, run without it. It is captured again
    when the trainer's parts, the addresses of weights and buffers, which of them are trained, or the modes of modules
    change. Anything else that Python decides in the forward pass is decided at capture.
    """

    WARM_UP = 3
    key = "SOLVER.CUDA_GRAPH"
    device_type = "cuda"

    def __init__(self) -> None:
        self._model: Any = None
        self._tensors: list[torch.Tensor] = []
        self._modules: list[nn.Module] = []
        self._last: Any = None  # what a graph for the last step would depend on
        self._in_a_row = 0  # steps with it
        self._captured: Any = None  # what the graph depends on
        self._inputs: list[Any] = []
        self._replay: Callable[[], Result]

    def _problems(self, trainer: Any, usual: type) -> Iterator[str]:
        device = trainer._device_type()
        if device != self.device_type:
            yield f"needs a CUDA device, and the model is on {device}: set MODEL.DEVICE to cuda"
        yield from super()._problems(trainer, usual)

    def _compute(self, trainer: Any, parameters: list[nn.Parameter], batch: Any) -> Result | None:
        parts = trainer.adapter, trainer.model, trainer.precision
        if trainer.model is not self._model:
            self._model = trainer.model
            self._tensors = [*self._model.parameters(), *self._model.buffers()]
            self._modules = list(self._model.modules())
        leaves, tree = pytree.tree_flatten(batch)
        state = (
            [(tensor.requires_grad, tensor.data_ptr()) for tensor in self._tensors],
            [module.training for module in self._modules],
        )
        depends_on = (parts, len(parameters), tree, list(map(_kind, leaves)), state)
        if depends_on != self._captured:
            self._in_a_row = self._in_a_row + 1 if depends_on == self._last else 1
            self._last = depends_on
            if self._in_a_row <= self.WARM_UP:
                return None
            self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            static = pytree.tree_unflatten(self._inputs, tree)
            try:
                self._replay = self._capture(lambda: _forward_backward(parts, parameters, static))
            except RuntimeError as error:
                raise ConfigError(
                    f"{self.key}: this step cannot be captured: {str(error).splitlines()[0]}. Something in it waits "
                    f"for the device or computes on the host; change it (see the traceback above), or set {self.key} "
                    "to False"
                ) from error
            self._captured = depends_on
            logger.info("Captured a CUDA graph of the step")
        for input, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                input.copy_(leaf, non_blocking=True)
        losses, gradients = self._replay()
        # The next replay overwrites the losses.
        copies = {name: loss.clone() if isinstance(loss, torch.Tensor) else loss for name, loss in losses.items()}
        return copies, gradients

    def _capture(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Capture a function's work without running it. The default generator advances with each replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


def _kind(leaf: Any) -> Any:
    """Return what a batch must share with the graph's: a tensor's shape, type and device, or another value itself."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
