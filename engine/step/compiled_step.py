"""A step as one compiled graph: forward, backward and update."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import ConfigError
from ..data.batches import split_batch
from .fused_step import FusedStep, OptimizerStandIn, Outputs, Parts

__all__ = ["CompiledStep"]

logger = logging.getLogger(__name__)

KEY = "SOLVER.COMPILE_STEP"

_TOO_MANY = (
    '%s: more than %d graphs would be needed, so other steps run the ordinary way. The line of torch above ("last '
    'reason") says what changed. For shapes of batches: use fewer (DATALOADER.DROP_LAST, padding), set '
    "SOLVER.COMPILE_STEP_ARGS.dynamic, or raise its recompile_limit. For the optimizer's momentum or betas: remove "
    "their schedule (torch's CyclicLR and OneCycleLR: cycle_momentum=False)"
)

# After this many updates in a row that create state, the optimizer cannot be compiled: each step would be traced, and
# then run uncompiled.
_MAX_NEW_STATE = 10


class _NewStateError(Exception):
    """The update would create optimizer state. Raised while a step is traced, so nothing has run."""


class CompiledStep(FusedStep):
    """Runs the steps of a trainer as graphs made by ``torch.compile``, one for each shape of batch.

    A step whose update would create optimizer state is an ordinary one, since new state could not be undone if a loss
    or gradient were not finite. A graph depends on the shape of its batch and not on earlier batches, so a resumed run
    computes what the uninterrupted one does. Beyond the limit of graphs, steps run the ordinary way.

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
        from ..modeling.inductor import exact_sums

        # Graphs of other trainers in this process must not count as graphs of this one.
        args = {"isolate_recompiles": True, **exact_sums(dict(args or {})), "fullgraph": True}
        self._exceptions = torch._dynamo.exc
        tracing = {"trace_autograd_ops": True, "record_runtime_overhead": False}
        if args.get("dynamic", False) is False:
            # The meaning of dynamic=False, which as an argument costs time in every step: one graph for each shape. If
            # a graph took several shapes, which graph a batch met would depend on the batches before it.
            args.pop("dynamic", None)
            tracing["automatic_dynamic_shapes"] = False
        self._tracing = torch._dynamo.config.patch(tracing)
        torch.compiler.assume_constant_result(CompiledStep._note_new_state)  # called while tracing
        try:
            self._compiled: Any = torch.compile(_traced_body, **args)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{KEY}_ARGS: {error}") from error
        self._ran = self._warned = self._new_state = False
        self._sizes: set[int] = set()  # of the optimizer's state, in steps in a row that created some

    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> OptimizerStandIn:
        # Compilers cannot trace fused steps; capturable ones do not read values of tensors.
        settings = {"fused": False, "foreach": device.type == "cuda", "capturable": True}
        return OptimizerStandIn(optimizer, settings, torch.zeros((), dtype=torch.float64))

    def _run(self, parts: Parts, optimizer: Any, batch: Any) -> Outputs | None:
        self._new_state = False
        try:
            with torch.no_grad():
                outputs = self._call(parts, optimizer, batch)
        except self._exceptions.FailOnRecompileLimitHit:
            if not self._warned:
                logger.warning(_TOO_MANY, KEY, torch._dynamo.config.recompile_limit)
            self._warned = True
            return None
        except self._exceptions.TorchDynamoException as error:
            if not self._new_state:
                raise ConfigError(_explain(error)) from error
            self._sizes.add(sum(_sizes_of_state(optimizer)))
            if len(self._sizes) > _MAX_NEW_STATE:
                raise ConfigError(
                    f"{KEY}: {type(self._optimizer).__name__} makes new state in each step, so that none can be "
                    f"compiled: use another optimizer, or set {KEY} to False"
                ) from error
            return None
        self._sizes.clear()
        return outputs

    def _call(self, parts: Parts, optimizer: Any, batch: Any) -> Outputs:
        """Call the compiled step. Settings for tracing are patched only if it needs a graph, since that is slow."""
        args = self, parts, optimizer, batch
        if self._ran:
            try:
                return self._compiled(*args)
            except self._exceptions.Unsupported:  # a new graph is needed; nothing has run yet
                pass
        for piece, _ in split_batch(batch, parts.accumulation_steps):
            parts.adapter.prepare(parts.model, piece)
        with self._tracing:
            outputs: Outputs = self._compiled(*args)
        self._ran = True
        return outputs

    def _note_new_state(self) -> None:
        self._new_state = True

    def _backward(self, loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            if gradient is not None:  # cloned, since parameters whose sum is used have one gradient tensor together
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def _guard(
        self, optimizer: Any, policy: str, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        found = ~tensors[0].isfinite().all()
        for tensor in tensors[1:]:
            found = found | ~tensor.isfinite().all()
        changed = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter].values() if parameter in optimizer.state else ()
                    changed += [parameter, *(value for value in state if isinstance(value, torch.Tensor))]
        return found, [(tensor, tensor.clone()) for tensor in changed]


def _traced_body(step: CompiledStep, parts: Parts, optimizer: Any, batch: Any) -> Outputs:
    before = _sizes_of_state(optimizer)
    outputs = step._body(parts, optimizer, batch)
    if _sizes_of_state(optimizer) != before:
        step._note_new_state()
        raise _NewStateError
    return outputs


def _sizes_of_state(optimizer: Any) -> list[int]:
    return [sum(value is not None for value in state.values()) for state in optimizer.state.values()]


def _explain(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{KEY}: torch cannot make one graph of this step: {lines[0] if lines else type(error).__name__}. Set {KEY} to "
        "False, or change the code that prevents it (see the traceback above, and TORCH_LOGS=graph_breaks)"
    )
