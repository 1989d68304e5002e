"""A whole step as one CUDA graph: forward, backward and update, captured once and replayed."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...config import ConfigError
from .finite import Buffers, find_nonfinite, skip_on_device
from .whole_step import OptimizerStandIn, Outputs, WholeStep

__all__ = ["CudaGraphs", "GraphedStep"]

logger = logging.getLogger(__name__)

KEY = "SOLVER.CUDA_GRAPH"

_requires_grad = attrgetter("requires_grad")
_training = attrgetter("training")
_address = methodcaller("data_ptr")


class CudaGraphs:
    """The part that needs a GPU: runs functions on a side stream, and captures them."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Call a function on a side stream, as CUDA requires before it is captured."""
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
        """Capture the function's work without running it. The default generator advances with each replay.

        Returns:
            A function that replays the work, and returns the same tensors each time.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class GraphedStep(WholeStep):
    """Runs the steps of a trainer as a CUDA graph, for batches of the most frequent shape.

    The first :attr:`WARM_UP` steps with a shape run on a side stream; then a graph is captured. Later batches of this
    shape are copied into the graph's inputs, and it is replayed. Batches of other shapes, such as the last of an epoch,
    run without it on the same parameters and state. The graph is captured again when the model's parameters, which of
    them are trained, its modes, or settings of the optimizer change. Learning rates may change in every step. Anything
    else that Python decides in a step is decided at capture.

    Args:
        graphs: captures and replays.
    """

    WARM_UP = 3
    key = KEY

    def __init__(self, graphs: Any = None) -> None:
        super().__init__()
        self._graphs = graphs or CudaGraphs()
        self._seen: Counter[Any] = Counter()
        self._captured: tuple[Any, Any] | None = None
        self._inputs: list[Any] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[torch.Tensor] = []
        self._replay: Callable[[], Outputs]
        self._warned = False

    def _problems(self, trainer: Any) -> Iterator[str]:
        device = trainer._device_type()
        if device != self._graphs.device_type:
            yield f"needs a CUDA device, and the model is on {device}: set MODEL.DEVICE to cuda"
        yield from super()._problems(trainer)
        for group in trainer.optimizer.param_groups:
            if not group.get("fused") and "capturable" not in group:
                yield (
                    f"{type(trainer.optimizer).__name__} can be captured only where it is fused: set "
                    "SOLVER.OPTIMIZER.ARGS.fused, or use AdamW"
                )

    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> OptimizerStandIn:
        return OptimizerStandIn(optimizer, {"capturable": True}, lr_dtype=torch.float32, lr_device=device)

    def _run(self, trainer: Any, batch: Any) -> Outputs:
        if self._prepare(trainer):
            self._captured = None
            self._modules = list(trainer.model.modules())
            self._tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
        optimizer = self._stand_in.update(trainer.optimizer)
        leaves, form = pytree.tree_flatten(batch)
        key = ((form, tuple(map(_kind, leaves))), self._state(trainer))
        if self._captured != key:
            hashable = ((repr(form), key[0][1]), key[1])  # torch 2.6 cannot hash a form
            if not self._is_due(hashable):
                step = self._graphs.warm_up if self._seen[hashable] <= self.WARM_UP else _call
                return step(lambda: self._body(trainer, optimizer, batch))
            self._capture(trainer, optimizer, leaves, form)
            self._captured = key
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf, non_blocking=True)
        return self._replayed()

    def _state(self, trainer: Any) -> Any:
        """Return the settings, besides the shape of the batch, that a graph depends on and that are cheap to read."""
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

    def _is_due(self, key: Any) -> bool:
        """Count a batch, and return whether to capture a graph for its shape."""
        self._seen[key] += 1
        if len(self._seen) > 100:  # forget rare shapes
            self._seen = Counter(dict(self._seen.most_common(10)))
            if self._captured is None and not self._warned:
                self._warned = True
                logger.warning(
                    "%s does nothing so far: hardly two batches have the same shape. Pad them to a few shapes", KEY
                )
        if self._seen[key] <= self.WARM_UP:
            return False
        # One graph, for the first frequent shape. It is replaced only if it can no longer be used.
        return self._captured is None or self._captured[1] != key[1]

    def _capture(self, trainer: Any, optimizer: Any, leaves: list[Any], form: Any) -> None:
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        batch = pytree.tree_unflatten(self._inputs, form)
        try:
            self._replay = self._graphs.capture(lambda: self._body(trainer, optimizer, batch))
        except RuntimeError as error:
            raise ConfigError(
                f"{KEY}: this step cannot be captured: {str(error).splitlines()[0]}. Something in it waits for the "
                f"device or computes on the host; change it (see the traceback above), or set {KEY} to False"
            ) from error
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters] if trainer.zero_grad_before_forward else []
        logger.info("Captured a CUDA graph of the step")

    def _replayed(self) -> Outputs:
        """Replay the graph, and copy its outputs, since the next replay overwrites them."""
        losses, found, puts = self._replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        copied = {name: loss.clone() for name, loss in losses.items()}
        return copied, found.clone(), [(name, _copy(value), hint) for name, value, hint in puts]

    def _copy_buffers(self, model: nn.Module) -> Buffers:
        buffers = Buffers(model)
        buffers.keep()
        return buffers

    def _guarded_update(
        self, view: Any, losses: dict[str, torch.Tensor], buffers: Buffers | None, earlier: torch.Tensor | None
    ) -> torch.Tensor:
        optimizer = view.optimizer
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = gradients[0].device if gradients else next(iter(losses.values())).device
        found = find_nonfinite([*gradients, *losses.values()], torch.zeros((), device=device))
        skip_on_device([optimizer], found, view.nonfinite.policy)
        if buffers is not None:
            buffers.restore(found)
        with torch.no_grad():
            view.optimizer_step()
        return found


class _Settings:
    """Values that are compared one by one. Their hash is constant: not all can be hashed, and few ever differ."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self.values == other.values

    def __hash__(self) -> int:
        return 0


def _kind(leaf: Any) -> Any:
    """Return what a batch must share with the graph's: a tensor's shape, type and device, or another value itself."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _call(function: Callable[[], Any]) -> Any:
    return function()
