"""A step as a CUDA graph, captured after a few steps and replayed."""

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
from .fast_path import backward
from .finite import find_nonfinite, skip_on_device
from .fused_step import FusedStep, OptimizerStandIn, Outputs, Parts

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


class GraphedStep(FusedStep):
    """Runs the steps of a trainer as a CUDA graph, for batches of the first shape that has come often enough.

    The first :attr:`WARM_UP` steps with a shape run on a side stream; then a graph is captured. Later batches of this
    shape are copied into the graph's inputs, and it is replayed. Batches of other shapes, such as the last of an epoch,
    run without it on the same parameters and state. Warm-up and capture begin again when the trainer's parts, the
    model's parameters, which of them are trained, its modes, or settings of the optimizer change. Learning rates may
    change in every step. Anything else that Python decides in a step is decided at capture.

    Args:
        graphs: captures and replays.
    """

    WARM_UP = 3
    key = KEY

    def __init__(self, graphs: Any = None) -> None:
        super().__init__()
        self._graphs = graphs or CudaGraphs()
        self._settings: Any = None  # what a graph depends on, besides the form of the batch
        self._seen: Counter[str] = Counter()  # forms of batches, with these settings
        self._without = 0  # steps since the start or the last graph
        self._form: Any = None  # of the graph's batch; None: there is no graph
        self._inputs: list[Any] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[torch.Tensor] = []
        self._replay: Callable[[], Outputs]

    def _problems(self, trainer: Any) -> Iterator[str]:
        device = trainer._device_type()
        if device != self._graphs.device_type:
            yield f"needs a CUDA device, and the model is on {device}: set MODEL.DEVICE to cuda"
        yield from super()._problems(trainer)
        if any(not group.get("fused") and "capturable" not in group for group in trainer.optimizer.param_groups):
            name = type(trainer.optimizer).__name__
            yield f"{name} can be captured only where it is fused: set SOLVER.OPTIMIZER.ARGS.fused, or use AdamW"

    def _prepare(self, trainer: Any) -> None:
        super()._prepare(trainer)
        self._modules = list(trainer.model.modules())
        self._tensors = [*trainer.model.parameters(), *trainer.model.buffers()]

    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> OptimizerStandIn:
        return OptimizerStandIn(optimizer, {"capturable": True}, torch.zeros((), device=device))

    def _run(self, parts: Parts, optimizer: Any, batch: Any) -> Outputs:
        settings = (
            parts,
            [{**group, "params": None, "lr": None, "initial_lr": None} for group in optimizer.param_groups],
            id(optimizer.state),
            list(map(_requires_grad, self._tensors)),
            list(map(_training, self._modules)),
            list(map(_address, self._tensors)),
        )
        if settings != self._settings:
            self._settings, self._form = settings, None
            self._seen.clear()
        leaves, tree = pytree.tree_flatten(batch)
        form = (tree, list(map(_kind, leaves)))
        if form != self._form:
            if self._form is not None or not self._is_warm(str(form)):
                return self._graphs.warm_up(lambda: self._body(parts, optimizer, batch))
            self._capture(parts, optimizer, leaves, tree)
            self._form, self._without = form, 0
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf, non_blocking=True)
        losses, found, metrics = self._replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        # The next replay overwrites its outputs.
        copied = [{name: _copy(value) for name, value in values.items()} for values in (losses, metrics)]
        return copied[0], found.clone(), copied[1]

    def _is_warm(self, form: str) -> bool:
        """Count a batch, and return whether steps with its form have been warmed up."""
        if len(self._seen) == 100:  # forget rare forms
            self._seen.clear()
        self._seen[form] += 1
        self._without += 1
        if self._without == 100:
            logger.warning(
                "%s does nothing so far: hardly two batches have the same shape, or settings of the step change too "
                "often. Pad batches to a few shapes",
                KEY,
            )
        return self._seen[form] > self.WARM_UP

    def _capture(self, parts: Parts, optimizer: Any, leaves: list[Any], tree: Any) -> None:
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        batch = pytree.tree_unflatten(self._inputs, tree)
        try:
            self._replay = self._graphs.capture(lambda: self._body(parts, optimizer, batch))
        except RuntimeError as error:
            raise ConfigError(
                f"{KEY}: this step cannot be captured: {str(error).splitlines()[0]}. Something in it waits for the "
                f"device or computes on the host; change it (see the traceback above), or set {KEY} to False"
            ) from error
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters] if parts.keep_gradients else []
        logger.info("Captured a CUDA graph of the step")

    def _backward(self, loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        backward(loss)

    def _guard(
        self, optimizer: Any, policy: str, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        found = find_nonfinite(tensors, torch.zeros((), device=tensors[-1].device))
        skip_on_device([optimizer], found, policy)  # fused optimizers skip their update themselves
        return found, []


def _kind(leaf: Any) -> Any:
    """Return what a batch must share with the graph's: a tensor's shape, type and device, or another value itself."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
