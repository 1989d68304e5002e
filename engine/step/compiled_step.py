"""A whole step as one compiled graph: forward, backward and update."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import ConfigError
from ..data.microbatch import split_batch
from .whole_step import OptimizerStandIn, Outputs, WholeStep

__all__ = ["CompiledStep"]

logger = logging.getLogger(__name__)

KEY = "SOLVER.COMPILE_STEP"

_NEW_STATE = "the update would create state in the optimizer"
# After this many steps in a row whose update creates state, the optimizer cannot be compiled.
_MAX_NEW_STATE = 10


class _NewStateError(Exception):
    """See ``_NEW_STATE``."""


class CompiledStep(WholeStep):
    """Runs the steps of a trainer as graphs made by ``torch.compile``, one for each shape of batch.

    Iteration 0 is an ordinary step, so that what optimizers and models create in their first step exists when a graph
    is made. A step whose update would create optimizer state is an ordinary one too, since new state could not be
    undone if a loss or gradient were not finite. A graph depends on the shape of its batch and not on earlier batches,
    so a resumed run computes what the uninterrupted one does. Beyond the limit of graphs, steps run the ordinary way.

    Args:
        args: arguments of ``torch.compile``.

    Raises:
        ConfigError: this torch is too old, or an argument is wrong.
    """

    key = KEY

    def __init__(self, args: Mapping[str, Any] | None = None) -> None:
        import torch._dynamo  # takes a second, so only where steps are compiled

        super().__init__()
        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(f"{KEY}: torch {torch.__version__} cannot compile a backward pass; a newer one is needed")
        from ..modeling.inductor import check_vectors, exact_sums

        self.view_bases = (_TracedBackward,)
        args = exact_sums(dict(args or {}))
        torch.compiler.assume_constant_result(WholeStep.note)  # called while tracing, and not part of the graph
        self._exceptions = torch._dynamo.exc
        self._check_vectors, self._inductor = check_vectors, args.get("backend", "inductor") == "inductor"
        tracing = {"trace_autograd_ops": True, "record_runtime_overhead": False}
        if args.get("dynamic", False) is False:
            # The meaning of dynamic=False, which as an argument costs time in every step: one graph for each shape. If
            # a graph took several shapes, which graph a batch met would depend on the batches before it.
            args.pop("dynamic", None)
            tracing["automatic_dynamic_shapes"] = False
        self._tracing = torch._dynamo.config.patch(
            {name: value for name, value in tracing.items() if hasattr(torch._dynamo.config, name)}
        )
        self._args = args
        self._compiled = self._compile(_run_body)
        self._ran = self._warned = False
        self._with_new_state = 0

    def _compile(self, function: Callable[..., Any]) -> Any:
        try:
            # Graphs of other trainers in this process must not count as graphs of this one.
            return torch.compile(function, **{"isolate_recompiles": True, **self._args}, fullgraph=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{KEY}_ARGS: {error}") from error

    def _problems(self, trainer: Any) -> Iterator[str]:
        yield from super()._problems(trainer)
        defined = [vars(cls)["backward"] for cls in type(trainer).__mro__ if "backward" in vars(cls)]
        if len(defined) > 1:  # the last is SimpleTrainer's
            yield f"{type(trainer).__name__} overrides backward(), which would not be called: remove it"

    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> OptimizerStandIn:
        # Compilers cannot trace fused steps; capturable ones do not read values of tensors.
        return OptimizerStandIn(optimizer, {"fused": False, "foreach": device.type == "cuda", "capturable": True})

    def _run(self, trainer: Any, batch: Any) -> Outputs | None:
        if trainer.iter == 0:
            return None
        self._prepare(trainer)
        grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            outputs = self._call(trainer, batch)
        except self._exceptions.FailOnRecompileLimitHit:
            self._warn_of_limit()
            return None
        except self._exceptions.TorchDynamoException as error:
            if not self.refusal:
                raise ConfigError(_explain(error)) from error
            if self.refusal != _NEW_STATE:
                raise ConfigError(self.refusal) from error
            self._count_new_state(trainer)
            return None
        finally:
            torch._C._set_grad_enabled(grad_enabled)
        self._with_new_state = 0
        return outputs

    def _call(self, trainer: Any, batch: Any) -> Outputs:
        """Call the compiled step. Settings for tracing are patched only if it needs a graph, since that is slow."""
        args = self, trainer, self._stand_in.update(trainer.optimizer), batch
        if self._ran:
            try:
                return self._compiled(*args)
            except self._exceptions.Unsupported:  # a new graph is needed; nothing has run yet
                pass
        outputs: Outputs = self._trace(trainer, [batch], self._compiled, args)
        self._ran = True
        return outputs

    def _trace(self, trainer: Any, batches: list[Any], compiled: Any, args: tuple[Any, ...]) -> Any:
        for batch in batches:
            for part, _ in split_batch(batch, trainer.accumulation_steps):
                trainer.adapter.prepare(trainer.model, part)
        self.refusal = ""
        if self._inductor and trainer.optimizer.param_groups[0]["params"][0].is_cpu:
            self._check_vectors()
        with self._tracing:
            return compiled(*args)

    def _count_new_state(self, trainer: Any) -> None:
        """Refuse an optimizer that creates state in every step: each step would be traced, and then run uncompiled."""
        self._with_new_state += 1
        if self._with_new_state - trainer.nonfinite.steps > _MAX_NEW_STATE:
            raise ConfigError(
                f"{KEY}: {type(self._optimizer).__name__} makes new state in each step, so that none can be compiled: "
                f"use another optimizer, or set {KEY} to False"
            )

    def _warn_of_limit(self) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s: more than %d graphs would be needed. Each shape of batch needs one, and each value of the optimizer's "
            "settings (except the learning rate) and of anything that changes in the model. Other steps run the "
            'ordinary way. The line of torch above ("last reason") says what changed. For shapes: use fewer '
            "(DATALOADER.DROP_LAST, padding), set SOLVER.COMPILE_STEP_ARGS.dynamic, or raise its recompile_limit. For "
            "the optimizer's momentum or betas: remove their schedule (torch's CyclicLR and OneCycleLR: "
            "cycle_momentum=False)",
            KEY,
            torch._dynamo.config.recompile_limit,
        )

    def _copy_buffers(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(buffer, buffer.clone()) for buffer in model.buffers()]

    def _guarded_update(
        self, view: Any, losses: dict[str, torch.Tensor], buffers: Any, earlier: torch.Tensor | None
    ) -> torch.Tensor:
        """Update, then restore what changed if something is not finite; nobody sees the values in between."""
        optimizer = view.optimizer
        before = [(tensor, tensor.clone()) for tensor in _updated_by(optimizer)]
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        sizes = [_size_of_state(optimizer, parameter) for parameter in parameters]
        total: Any = sum(losses.values())
        finite = total.isfinite()
        if earlier is not None:
            finite = finite & ~earlier
        for parameter in parameters:
            finite = finite & parameter.grad.isfinite().all()
        view.optimizer_step()
        if sizes != [_size_of_state(optimizer, parameter) for parameter in parameters]:
            self.note(_NEW_STATE)
            raise _NewStateError  # known while tracing: nothing has run
        for tensor, old in before + (buffers or []):
            tensor.copy_(torch.where(finite, tensor, old))
        return ~finite


def _run_body(whole: CompiledStep, trainer: Any, optimizer: Any, batch: Any) -> Outputs:
    return whole._body(trainer, optimizer, batch)


class _TracedBackward:
    """A backward pass that can be traced."""

    optimizer: Any

    def backward(self, losses: torch.Tensor) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(losses, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _size_of_state(optimizer: Any, parameter: torch.Tensor) -> int:
    if parameter not in optimizer.state:
        return 0
    return sum(value is not None for value in optimizer.state[parameter].values())


def _updated_by(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters that have a gradient, and the tensors of their optimizer state."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            tensors.append(parameter)
            if parameter in optimizer.state:
                tensors += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return tensors


def _explain(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{KEY}: torch cannot make one graph of this step: {lines[0] if lines else type(error).__name__}. Set {KEY} to "
        "False, or change the code that prevents it (see the traceback above, and TORCH_LOGS=graph_breaks)"
    )
