"""Builds models that are sharded, so that no rank holds all weights at any time."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config.errors import first_line
from ...hooks.common.models import unwrap_model
from ...hooks.common.rng import capture_rng, restore_rng
from ...hooks.common.tensors import is_sharded, shard_like
from .. import comm
from .base import Strategy, share_weights
from .recording import Place, Recording

__all__ = ["build_wrapped"]

logger = logging.getLogger(__name__)


def build_wrapped(build: Callable[[], nn.Module], strategy: Strategy, device: torch.device) -> nn.Module:
    """Build a model, with rank 0's weights on all ranks, and wrap it for training.

    If the strategy ``shards_weights``, the model is built on torch's meta device, and each rank computes one weight at
    a time and keeps its shard: it holds its shards and one whole weight. Values, and later random numbers, are those
    of an ordinary construction. A constructor that cannot be recorded (see :class:`Recording`) is repeated, and builds
    the whole model on each rank, with a warning. All ranks call this together.

    Args:
        build: builds the model.
        strategy: wraps it.
        device: the device of the wrapped model.
    """
    if strategy.shards_weights and comm.get_world_size() > 1:
        wrapped, problem = _build_deferred(build, strategy, device)
        if wrapped is not None:
            return wrapped
    else:
        problem = ""
    model = build()
    if problem:
        logger.warning(
            "Each rank built %s as a whole before it was sharded, which takes memory: %s", type(model).__name__, problem
        )
    share_weights(model)
    return strategy.wrap(model, device)


def _build_deferred(
    build: Callable[[], nn.Module], strategy: Strategy, device: torch.device
) -> tuple[nn.Module | None, str]:
    """Return the wrapped model, or why it could not be built in this way."""
    own = capture_rng()
    mains = comm.broadcast_object(own)
    seeds_differ = not torch.equal(own["torch"], mains["torch"])
    restore_rng(mains)
    recording = Recording(own["torch"] if seeds_differ else None)
    model, problem = None, ""
    try:
        with recording:
            model = build()
        places = _places(model, recording)
        problem = recording.problem or _unknown_tensor(model, recording)
    except Exception as error:
        problem = recording.problem or f"{type(error).__name__}: {first_line(error)}"
    problems = [f"on rank {rank}, {text}" for rank, text in enumerate(comm.all_gather(problem)) if text]
    if problems or model is None:
        restore_rng(own)
        return None, problems[0]
    if seeds_differ:  # Python's and NumPy's generators have drawn for rank 0 only
        restore_rng({**own, "torch": recording.own_state})
    wrapped = strategy.wrap(model, device)
    _fill(unwrap_model(wrapped), places, recording, strategy.weights_device(device))
    return wrapped, ""


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _places(model: nn.Module, recording: Recording) -> dict[str, Place]:
    """Return where the values of the tensors without values are."""
    return {name: Place.of(tensor) for name, tensor in _named_tensors(model) if recording.holds(tensor)}


def _unknown_tensor(model: nn.Module, recording: Recording) -> str:
    """Return what of a model would stay without values; empty if nothing would."""
    named = _named_tensors(model)
    for name, tensor in named:
        if is_lazy(tensor):
            return f"the shape of {name} is not known before the first batch"
        if tensor.is_meta and not recording.holds(tensor):
            return f"{name} is on torch's meta device"
    own = {id(tensor) for _, tensor in named}
    gc.collect()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and id(tensor) not in own and recording.holds(tensor):
            return f"a tensor of shape {tuple(tensor.shape)} is neither a parameter nor a buffer"
    return ""


@torch.no_grad()
def _fill(model: nn.Module, places: dict[str, Place], recording: Recording, device: torch.device) -> None:
    """Give a wrapped model its values, one whole tensor at a time."""
    tied: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model):
        tied.setdefault(id(tensor), []).append(name)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.clone())
    for first, *others in tied.values():
        for name in others:
            _set(model, name, _get(model, first))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in places:
            _copy_part(tensor, recording.value(places[name]))


def _get(model: nn.Module, name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(model.get_submodule(module), last)


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Tie a tensor again. Torch ties sharded tensors only, when it moves them from the meta device."""
    if _get(model, name) is not tensor:
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, tensor)


def _copy_part(tensor: Any, whole: torch.Tensor) -> None:
    if is_sharded(tensor):
        tensor, whole = tensor.to_local(), shard_like(whole, tensor).to_local()
    tensor.copy_(whole)
