"""A whole step as one CUDA graph: forward, backward and update, captured once and replayed."""

import logging
from collections import Counter
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...config import ConfigError
from .nonfinite import Buffers, find_nonfinite, skip_on_device
from .whole_step import OptimizerStandIn, check_asked, check_whole_step, inside_of

__all__ = ["CudaGraphs", "GraphedStep"]

logger = logging.getLogger(__name__)

KEY = "SOLVER.CUDA_GRAPH"

# The losses, whether something was NaN or infinite, and the metrics that were put.
Outputs = tuple[dict[str, torch.Tensor], torch.Tensor, list[tuple[str, Any, bool]]]

_requires_grad = attrgetter("requires_grad")
_training = attrgetter("training")
_address = methodcaller("data_ptr")


class CudaGraphs:
    """The part that needs a GPU: running on a stream beside the usual one, and capturing."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Call it on a side stream, as what is to be captured must have been."""
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(current)
        return result

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Capture what it does, without doing it. The default generator's random numbers go on with each replay.

        Returns:
            A function that does it, and returns the tensors it fills each time.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class GraphedStep:
    """Runs the steps of a trainer as a CUDA graph, for batches of the shape that most have.

    The first :attr:`WARM_UP` steps with batches of a shape are run on a side stream, then a graph is captured. From
    then on batches of this shape are copied into its inputs, and it is replayed; others, such as the last one of an
    epoch, are run without it, on the same parameters and state. When the model's parameters, which of them are
    trained, its modes, or settings of the optimizer change, the graph is captured anew. Learning rates may change in
    every step. What else Python decides in a step is decided once: when it is captured.

    Args:
        graphs: captures and replays.
    """

    WARM_UP = 3

    def __init__(self, graphs: Any = None) -> None:
        self._graphs = graphs or CudaGraphs()
        self._optimizer: Any = None
        self._stand_in: OptimizerStandIn
        self._inside: type
        self._model: Any = None
        self._seen: Counter[Any] = Counter()
        self._captured: tuple[Any, Any] | None = None
        self._inputs: list[Any] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._replay: Callable[[], Outputs]
        self._asked = self._warned = False

    def check(self, trainer: Any) -> None:
        """Find what cannot be captured.

        Raises:
            ConfigError: says what is in the way.
        """
        device = trainer._device_type()
        if device != self._graphs.device_type:
            raise ConfigError(
                f"{KEY}: needs a CUDA device, and the model is on {device}: set MODEL.DEVICE to cuda, or {KEY} to False"
            )
        check_whole_step(trainer, KEY)
        for group in trainer.optimizer.param_groups:
            if not group.get("fused") and "capturable" not in group:
                raise ConfigError(
                    f"{KEY}: {type(trainer.optimizer).__name__} can be captured only where it is fused: set "
                    f"SOLVER.OPTIMIZER.ARGS.fused, use AdamW, or set {KEY} to False"
                )

    def check_asked(self, trainer: Any) -> None:
        """After the first step: whether it came here.

        Raises:
            ConfigError: it did not.
        """
        check_asked(trainer, KEY, self._asked)

    def run(self, trainer: Any, batch: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """One step.

        Args:
            trainer: whose step it is.
            batch: to be learned from; its tensors are on the device.

        Returns:
            The losses by name; and 1 if one of them, or a gradient, is NaN or infinite, else 0.

        Raises:
            ConfigError: it cannot be captured.
        """
        self._asked = True
        if self._optimizer is not trainer.optimizer or self._model is not trainer.model:
            self._start(trainer)
        optimizer = self._stand_in.ready(trainer.optimizer)
        leaves, form = pytree.tree_flatten(batch)
        key = ((form, tuple(map(_kind, leaves))), self._state(trainer))
        if self._captured != key and not self._due(key):
            step = self._graphs.warm_up if self._seen[key] <= self.WARM_UP else _call
            losses, found, puts = step(lambda: self._step(trainer, optimizer, batch))
        else:
            if self._captured != key:
                self._capture(trainer, optimizer, leaves, form)
                self._captured = key
            for static, leaf in zip(self._inputs, leaves, strict=True):
                if isinstance(leaf, torch.Tensor):
                    static.copy_(leaf, non_blocking=True)
            losses, found, puts = self._replayed()
        trainer.optimizer._opt_called = True  # torch's schedulers want to know
        for name, value, smoothing_hint in puts:
            trainer.storage.put_scalar(name, value, smoothing_hint=smoothing_hint)
        return losses, found

    def _start(self, trainer: Any) -> None:
        self.check(trainer)
        self._optimizer, self._model, self._captured = trainer.optimizer, trainer.model, None
        device = next(trainer.model.parameters()).device
        # A step count in the host's memory cannot be captured.
        for state in trainer.optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.to(device)
        self._stand_in = OptimizerStandIn(
            trainer.optimizer, {"capturable": True}, lr_dtype=torch.float32, lr_device=device
        )
        self._inside = inside_of(trainer)
        self._modules = list(trainer.model.modules())
        self._tensors = [*trainer.model.parameters(), *trainer.model.buffers()]

    def _state(self, trainer: Any) -> Any:
        """All that a graph holds fast, as far as it can be told cheaply."""
        groups = [
            {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for group in trainer.optimizer.param_groups
        ]
        return _Settings(
            groups,
            trainer.accumulation_steps,
            trainer.precision,
            id(trainer.adapter),
            id(trainer.optimizer.state),
            list(map(_requires_grad, self._tensors)),
            list(map(_training, self._modules)),
            list(map(_address, self._tensors)),
        )

    def _due(self, key: Any) -> bool:
        """Whether a graph is to be captured for such batches."""
        self._seen[key] += 1
        if len(self._seen) > 100:  # shapes that never come again
            self._seen = Counter(dict(self._seen.most_common(10)))
            if self._captured is None and not self._warned:
                self._warned = True
                logger.warning(
                    "%s does nothing so far: hardly two batches have the same shape. Pad them to a few shapes", KEY
                )
        if self._seen[key] <= self.WARM_UP:
            return False
        # One graph, for the shape that came often enough first; another one if that cannot be used any more.
        return self._captured is None or self._captured[1] != key[1]

    def _capture(self, trainer: Any, optimizer: Any, leaves: list[Any], form: Any) -> None:
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        batch = pytree.tree_unflatten(self._inputs, form)
        try:
            self._replay = self._graphs.capture(lambda: self._step(trainer, optimizer, batch))
        except RuntimeError as error:
            raise ConfigError(
                f"{KEY}: this step cannot be captured: {str(error).splitlines()[0]}. Something in it waits for the "
                f"device or computes on the host; set {KEY} to False, or change it (the traceback above tells more)"
            ) from error
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters] if trainer.zero_grad_before_forward else []
        logger.info("Captured a CUDA graph of the step")

    def _replayed(self) -> Outputs:
        """Replay; what comes back is copied, since the next replay fills the same tensors."""
        losses, found, puts = self._replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        copied = {name: loss.clone() for name, loss in losses.items()}
        return copied, found.clone(), [(name, _copy(value), hint) for name, value, hint in puts]

    def _step(self, trainer: Any, optimizer: Any, batch: Any) -> Outputs:
        """What is captured: the trainer's own methods, one after the other, on stand-ins of trainer and optimizer."""
        this = self._inside(trainer, optimizer)
        optimizer.zero_grad()
        buffers = Buffers(trainer.model)
        if trainer.nonfinite.policy != "raise":
            buffers.keep()
        losses = this.accumulate(batch) if trainer.accumulation_steps > 1 else this.forward_backward(batch)
        losses = {name: loss.detach() for name, loss in losses.items()}
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = gradients[0].device if gradients else next(iter(losses.values())).device
        found = find_nonfinite([*gradients, *losses.values()], torch.zeros((), device=device))
        skip_on_device([optimizer], found, trainer.nonfinite.policy)
        buffers.restore(found)
        with torch.no_grad():
            this.optimizer_step()
        if not trainer.zero_grad_before_forward:
            optimizer.zero_grad()
        return losses, found, this.storage.values


class _Settings:
    """Values compared one by one; hashed by none of them, since few ever differ."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self.values == other.values

    def __hash__(self) -> int:
        return 0


def _kind(leaf: Any) -> Any:
    """What must be the same for a graph to be used: of a tensor its shape and type, of anything else its value."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _call(function: Callable[[], Any]) -> Any:
    return function()
