"""A whole step as one compiled graph: forward, backward and update."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...config import ConfigError
from ..data.microbatch import split_batch
from .whole_step import OptimizerStandIn, check_asked, check_whole_step, inside_of, note, noted

__all__ = ["CompiledStep"]

logger = logging.getLogger(__name__)

KEY = "SOLVER.COMPILE_STEP"

_UNREADY = "the update would make state of the optimizer"
# Steps in a row, of finite losses, before which the optimizer's state is not complete.
_MAX_UNREADY = 10


class _UnreadyError(Exception):
    """See ``_UNREADY``."""


class CompiledStep:
    """Runs the steps of a trainer as graphs that ``torch.compile`` makes of them: one for each shape of batch.

    The first step of a run, iteration 0, is an ordinary one: what optimizers and models make only then is there when
    a graph is made. So is each whose update would make state of the optimizer: of a loss that is not finite it could
    not be undone. A graph is made for a shape when it first comes, whatever came before; so a resumed run computes
    what the uninterrupted one does. If too many shapes come, those without a graph are run the ordinary way.

    Args:
        args: of ``torch.compile``.

    Raises:
        ConfigError: this torch is too old, or there is something wrong with the arguments.
    """

    def __init__(self, args: Mapping[str, Any] | None = None) -> None:
        import torch._dynamo  # takes a second, so only where steps are compiled

        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(f"{KEY}: torch {torch.__version__} cannot compile a backward pass; a newer one is needed")
        from ..modeling.inductor import exact_sums

        args = exact_sums(args or {})
        torch.compiler.assume_constant_result(note)  # called when a step is traced, and not part of the graph
        self._exceptions = torch._dynamo.exc
        tracing = {"trace_autograd_ops": True, "record_runtime_overhead": False}
        if args.get("dynamic", False) is False:
            # What dynamic=False means, which as an argument costs time in every step: a graph for each shape. Where
            # graphs take several, which of them a batch meets depends on the batches before it.
            args.pop("dynamic", None)
            tracing["automatic_dynamic_shapes"] = False
        self._tracing = torch._dynamo.config.patch(
            {name: value for name, value in tracing.items() if hasattr(torch._dynamo.config, name)}
        )
        try:
            # Graphs of other trainers in this process must not count as graphs of this one.
            self._compiled = torch.compile(_step, **{"isolate_recompiles": True, **args}, fullgraph=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{KEY}_ARGS: {error}") from error
        self._inside: type | None = None
        self._optimizer: Any = None
        self._stand_in: OptimizerStandIn
        self._asked = self._ran = self._warned = False
        self._unready = 0

    def check(self, trainer: Any) -> None:
        """Find what cannot be compiled.

        Raises:
            ConfigError: says what is in the way.
        """
        check_whole_step(trainer, KEY)
        if type(trainer).backward is not _own_backward(trainer):
            raise ConfigError(f"{KEY}: {type(trainer).__name__} overrides backward(), which would not be called")

    def check_asked(self, trainer: Any) -> None:
        """After the first step: whether it came here.

        Raises:
            ConfigError: it did not.
        """
        check_asked(trainer, KEY, self._asked)

    def run(self, trainer: Any, batch: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        """One step.

        Args:
            trainer: whose step it is.
            batch: to be learned from.

        Returns:
            The losses by name, and whether one of them, or a gradient, is NaN or infinite; None if the step has to be
            made in the ordinary way.

        Raises:
            ConfigError: torch cannot compile it.
        """
        self._asked = True
        if trainer.iter == 0:
            return None
        optimizer = trainer.optimizer
        if self._optimizer is not optimizer:
            self._start(trainer)
        grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            losses, found, puts = self._call(trainer, batch)
        except self._exceptions.FailOnRecompileLimitHit:
            self._warn_of_limit()
            return None
        except self._exceptions.TorchDynamoException as error:
            if not noted:
                raise ConfigError(_explained(error)) from error
            if noted != [_UNREADY]:
                raise ConfigError(noted[0]) from error
            self._count_unready(trainer)
            return None
        finally:
            torch._C._set_grad_enabled(grad_enabled)
        self._unready = 0
        optimizer._opt_called = True  # torch's schedulers want to know
        for name, value, smoothing_hint in puts:
            trainer.storage.put_scalar(name, value, smoothing_hint=smoothing_hint)
        return losses, found

    def _start(self, trainer: Any) -> None:
        optimizer = self._optimizer = trainer.optimizer
        self.check(trainer)
        device = optimizer.param_groups[0]["params"][0].device
        # Of the fused steps, compilers know nothing; capturable ones do not ask for the values of tensors.
        settings = {"fused": False, "foreach": device.type == "cuda", "capturable": True}
        for state in optimizer.state.values():  # a step count in the host's memory would have to be waited for
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.to(device)
        self._stand_in = OptimizerStandIn(optimizer, settings)
        self._inside = inside_of(trainer, _TracedBackward)

    def _call(self, trainer: Any, batch: Any) -> Any:
        """The compiled step; torch traces gradients only where it is told to, which takes longer than a small step."""
        args = self._inside, trainer, self._stand_in.ready(trainer.optimizer), batch
        if self._ran:
            try:
                return self._compiled(*args)
            except self._exceptions.Unsupported:  # a graph has to be made; nothing has been run yet
                pass
        for part, _ in split_batch(batch, trainer.accumulation_steps):
            trainer.adapter.prepare(trainer.model, part)
        noted.clear()
        with self._tracing:
            result = self._compiled(*args)
        self._ran = True
        return result

    def _count_unready(self, trainer: Any) -> None:
        """Find an optimizer whose state is never complete: each step would be traced, and run the ordinary way."""
        self._unready += 1
        if self._unready - trainer.nonfinite.steps > _MAX_UNREADY:
            raise ConfigError(
                f"{KEY}: {type(self._optimizer).__name__} makes new state in each step, so that none can be compiled: "
                f"use another optimizer, or set {KEY} to False"
            )

    def _warn_of_limit(self) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s: more than %d graphs would be needed: one for each shape of batch, each value of the optimizer's "
            "settings but the learning rate, and each value of something that changes in the model; other steps are "
            'run the ordinary way. The line of torch above, "last reason", tells which it is. If it is shapes, give '
            "batches fewer (DATALOADER.DROP_LAST, padding), set SOLVER.COMPILE_STEP_ARGS.dynamic, or raise its "
            "recompile_limit. If it is the optimizer's momentum or betas, leave their schedule out (of torch's "
            "CyclicLR and OneCycleLR: cycle_momentum=False)",
            KEY,
            torch._dynamo.config.recompile_limit,
        )


def _own_backward(trainer: Any) -> Any:
    """SimpleTrainer's; its module imports this one."""
    return next(vars(cls)["backward"] for cls in reversed(type(trainer).__mro__) if "backward" in vars(cls))


class _TracedBackward:
    """Gradients in the form that can be traced."""

    optimizer: Any

    def backward(self, losses: torch.Tensor) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(losses, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _step(inside: Any, trainer: Any, optimizer: Any, batch: Any) -> Any:
    """What is compiled: the trainer's own methods, one after the other, on stand-ins of trainer and optimizer."""
    this = inside(trainer, optimizer)
    optimizer.zero_grad()
    buffers = [] if trainer.nonfinite.policy == "raise" else list(trainer.model.buffers())
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    with torch.enable_grad():
        losses = this.accumulate(batch) if trainer.accumulation_steps > 1 else this.forward_backward(batch)
    losses = {name: loss.detach() for name, loss in losses.items()}
    before = [(tensor, tensor.clone()) for tensor in _updated_by(optimizer)]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    held = [_size_of_state(optimizer, parameter) for parameter in parameters]
    finite = sum(losses.values()).isfinite()
    for parameter in parameters:
        finite = finite & parameter.grad.isfinite().all()
    this.optimizer_step()
    if held != [_size_of_state(optimizer, parameter) for parameter in parameters]:
        note(_UNREADY)
        raise _UnreadyError  # decided when the step is traced: nothing has been run
    # An update by gradients that are not finite is undone before anybody can see it.
    for tensor, old in before + kept:
        tensor.copy_(torch.where(finite, tensor, old))
    if not trainer.zero_grad_before_forward:
        optimizer.zero_grad()
    return losses, ~finite, this.storage.values


def _size_of_state(optimizer: Any, parameter: torch.Tensor) -> int:
    if parameter not in optimizer.state:
        return 0
    return sum(value is not None for value in optimizer.state[parameter].values())


def _updated_by(optimizer: Any) -> list[torch.Tensor]:
    """The parameters that have a gradient, and what the optimizer holds of them."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            tensors.append(parameter)
            if parameter in optimizer.state:
                tensors += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return tensors


def _explained(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{KEY}: torch cannot make one graph of this step: {lines[0] if lines else type(error).__name__}. Set {KEY} to "
        "False, or change what is in the way (the traceback above, and TORCH_LOGS=graph_breaks, tell more)"
    )
