"""Builds models that no machine holds: sharded without values, which they get module by module."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...config.errors import ConfigError, first_line
from ...hooks.common import is_sharded, local_part, preserve_rng, shard_like, unwrap_model
from .. import comm

logger = logging.getLogger(__name__)


Places = dict[int, list[tuple[nn.Module, str, str]]]
"""Where each tensor of a model is, by its id: module, key and full name. A tied one has several places."""


def places_of(model: nn.Module) -> Places:
    """Return where each parameter and buffer of a model is."""
    places: Places = {}
    for prefix, module in model.named_modules():
        for _, key, tensor in _own_tensors(module):
            places.setdefault(id(tensor), []).append((module, key, f"{prefix}.{key}" if prefix else key))
    return places


def build_on_meta(build: Callable[[], nn.Module], strategy: Any, device: torch.device) -> nn.Module:
    """Build a model on torch's meta device, shard it, and have ``reset_parameters`` give it values.

    The arguments are those of ``build_wrapped``.

    Raises:
        ConfigError: a module cannot be built in this way.
    """
    try:
        with torch.device("meta"):
            model = build()
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            "PARALLEL.ARGS.init: the model cannot be built on torch's meta device, where tensors have no values: "
            f"{first_line(error)}. Move what needs values to reset_parameters(), or remove init"
        ) from error
    pending = [(name, one) for name, one in model.named_modules() if any(t.is_meta for _, _, t in _own_tensors(one))]
    for name, module in pending:
        if not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"PARALLEL.ARGS.init: {_label(name, module)} has parameters or buffers of its own and no method "
                "reset_parameters() that sets their values. Add one, or remove init"
            )
    tied = [places for places in places_of(model).values() if len(places) > 1]
    wrapped = strategy.wrap(model, device)
    model, device = unwrap_model(wrapped), torch.device("cpu") if getattr(strategy, "cpu_offload", False) else device
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.clone())
    for (first, key, _), *others in tied:
        for module, name, _ in others:  # torch keeps ties only of sharded tensors
            setattr(module, name, getattr(first, key))
    seed = comm.broadcast_object(torch.initial_seed() % 2**32)
    with preserve_rng(), torch.device(device):
        torch.manual_seed(seed)
        done: set[int] = set()
        for name, module in pending:
            _reset(name, module, device, done)
    logger.info("PARALLEL.ARGS.init: the values of %d modules are those of their reset_parameters()", len(pending))
    return wrapped


@torch.no_grad()
def _reset(name: str, module: Any, device: torch.device, done: set[int]) -> None:
    """Set the values of a module's own tensors, which are whole while it computes them.

    Args:
        name: the module's name.
        module: the module.
        device: where it computes.
        done: ids of the tensors that have values; of tied ones, the first module's values count.
    """
    tensors, unset = list(_own_tensors(module)), {}
    for store, key, tensor in tensors:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        store[key] = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
        unset[id(store), key] = store[key], store[key]._version
    module.reset_parameters()
    for store, key, tensor in tensors:
        whole, (before, version) = store[key].detach(), unset[id(store), key]
        if store[key] is before and before._version == version and whole.numel():
            raise ConfigError(
                f"PARALLEL.ARGS.init: reset_parameters() of {_label(name, module)} leaves {key} without values"
            )
        store[key] = tensor
        if id(tensor) not in done:
            local_part(tensor).copy_(local_part(shard_like(whole, tensor)) if is_sharded(tensor) else whole)
            done.add(id(tensor))


def _own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield a module's own parameters and buffers, each with the dict and the name that it is kept under."""
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                yield store, name, tensor


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"
