"""An average of a model's weights, which can be swapped with them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ..common.models import unwrap_model

__all__ = ["WeightAverage", "has_shapes", "load_plain_weights"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass
class _Group:
    """Weights of one device and dtype, updated by one call.

    Weights are looked up in their modules at each use, since some code replaces buffers.
    """

    names: list[list[str]] = field(default_factory=list)  # of each weight; tied weights have several
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    averages: list[torch.Tensor] = field(default_factory=list)
    backup: list[torch.Tensor] | None = None
    # Target of a copy from a GPU to the host, and the event of its completion.
    staging: list[torch.Tensor] | None = None
    arrived: Any = None

    def weights(self) -> list[torch.Tensor]:
        return [owner[key] for owner, key in self.places]


class WeightAverage:
    """Averages the floating-point parameters of a model, and selected buffers.

    Averages of half-precision weights are float32, so that small updates are not lost. One call updates all weights of
    a device and dtype, and does not wait for a GPU.

    Args:
        model: the model; it may be wrapped for data-parallel training or compiled.
        device: the device of the averages; None: that of each weight. With weights on a GPU and averages on the CPU
            each update starts a copy into pinned memory, which the next update uses.
        averages_buffer: called with a module and a buffer's name; returns whether to average the buffer. Buffers that
            are not saved and integer buffers are never averaged.
        begin_with: initial values by plain name; None: the model's.

    Raises:
        ConfigError: ``begin_with`` does not fit the model, or there is a ``device`` and the model is sharded (FSDP2).
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        averages_buffer: Callable[[nn.Module, str], bool] | None = None,
        begin_with: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        self._device = None if device is None else torch.device(device)
        # FSDP2's modules. Importing their class takes a second, so they are recognized by their methods.
        self._sharded: list[Any] = [m for m in self.model.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]
        if self._sharded and device is not None:
            raise ConfigError(f"the average of sharded weights is on their device; remove device={str(device)!r}")
        self._reshard()
        self._groups = self._collect(averages_buffer or (lambda module, name: False))
        self._pending = 0.0
        for group in self._groups:
            values = group.weights() if begin_with is None else [_pick(begin_with, names) for names in group.names]
            for names, weight, value in zip(group.names, group.weights(), values, strict=True):
                if value.shape != weight.shape:
                    raise ConfigError(
                        f"the averaged {names[0]} has shape {tuple(value.shape)}, the model's {tuple(weight.shape)}: "
                        "it was saved with another model"
                    )
                group.averages.append(self._average_of(weight, value))

    def _collect(self, averages_buffer: Callable[[nn.Module, str], bool]) -> list[_Group]:
        groups: dict[Any, _Group] = {}
        seen: dict[int, list[str]] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set
            buffers = [key for key in module._buffers if key not in hidden and averages_buffer(module, key)]
            places: list[tuple[dict[str, Any], str]] = [(module._parameters, key) for key in module._parameters]
            places += [(module._buffers, key) for key in buffers]
            for owner, key in places:
                weight = owner[key]
                if weight is None or not (weight.is_floating_point() or weight.is_complex()):
                    continue
                name = _plain(f"{prefix}.{key}" if prefix else key)
                if id(weight) in seen:
                    seen[id(weight)].append(name)
                    continue
                names = seen[id(weight)] = [name]
                group = groups.setdefault((weight.device, weight.dtype), _Group())
                group.names.append(names)
                group.places.append((owner, key))
        return list(groups.values())

    def _reshard(self) -> None:
        """Reshard FSDP2 modules: after a forward pass they may hold gathered weights."""
        for module in self._sharded:
            module.reshard()

    def _average_of(self, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if weight.dtype in _HALF else weight.dtype
        average = torch.empty_like(weight, dtype=dtype, device=self._device or weight.device, requires_grad=False)
        with torch.no_grad():
            return average.copy_(value)

    # ------------------------------------------------------------------ updating

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Update the averages: ``average += share * (weight - average)``."""
        self.flush()
        self._reshard()
        for group in self._groups:
            weights, averages = group.weights(), group.averages
            if averages[0].device == weights[0].device:
                if averages[0].dtype != weights[0].dtype:
                    weights = [weight.to(averages[0].dtype) for weight in weights]
                torch._foreach_lerp_(averages, weights, share)
            elif weights[0].is_cuda:
                self._send(group, weights)
                self._pending = share
            else:
                torch._foreach_lerp_(averages, [weight.to(averages[0]) for weight in weights], share)

    def _send(self, group: _Group, weights: list[torch.Tensor]) -> None:
        if group.staging is None:
            group.staging = [torch.empty_like(w, device="cpu", pin_memory=True, requires_grad=False) for w in weights]
        torch._foreach_copy_(group.staging, weights, non_blocking=True)
        group.arrived = torch.cuda.Event()
        group.arrived.record(torch.cuda.current_stream(weights[0].device))

    @torch.no_grad()
    def flush(self) -> None:
        """Finish an update whose copy from a GPU is under way."""
        for group in self._groups:
            if group.arrived is not None and group.staging is not None:
                group.arrived.synchronize()
                group.arrived = None
                staged = [weight.to(group.averages[0].dtype) for weight in group.staging]
                torch._foreach_lerp_(group.averages, staged, self._pending)

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copy the model's buffers into their averages."""
        for group in self._groups:
            for average, (owner, key) in zip(group.averages, group.places, strict=True):
                if not isinstance(owner[key], nn.Parameter):
                    average.copy_(owner[key])

    # ------------------------------------------------------------------ swapping

    @property
    def is_in_use(self) -> bool:
        """Whether the model's tensors hold the averages."""
        return any(group.backup is not None for group in self._groups)

    @torch.no_grad()
    def put(self) -> None:
        """Copy the averages into the model's tensors, and keep a backup of its weights on the averages' device.

        The model's tensors stay the same objects, so optimizers, compiled code, CUDA graphs and views remain valid.
        The backup takes as much memory as the weights.
        """
        self.flush()
        self._reshard()
        for group in self._groups:
            weights = group.weights()
            if group.backup is None:
                device = group.averages[0].device
                group.backup = [weight.detach().to(device, copy=True) for weight in weights]
            _copy(weights, group.averages)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the weights that :meth:`put` backed up, even if it was interrupted."""
        if not self.is_in_use:
            return
        self._reshard()
        for group in self._groups:
            if group.backup is not None:
                _copy(group.weights(), group.backup)
                group.backup = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the model the averages within the context."""
        try:
            self.put()
            yield
        finally:
            self.restore()

    # ------------------------------------------------------------------ as a state dict

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with plain names and the averages. Tensors are not copied."""
        self.flush()
        return self._with([group.averages for group in self._groups])

    def own_state_dict(self) -> dict[str, Any]:
        """Return the same with the weights that :meth:`put` backed up."""
        return self._with([group.backup or group.weights() for group in self._groups])

    def _with(self, values: list[list[torch.Tensor]]) -> dict[str, Any]:
        held: dict[str, torch.Tensor] = {}
        for group, own in zip(self._groups, values, strict=True):
            for names, value in zip(group.names, own, strict=True):
                held.update(dict.fromkeys(names, value))
        weights = {_plain(name): value for name, value in self.model.state_dict().items()}
        return {name: held.get(name, value) for name, value in weights.items()}


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):  # _foreach_copy_ does not support sharded tensors
        target.copy_(source)


def has_shapes(model: nn.Module) -> bool:
    """Return whether all weights have a shape; those of lazy modules get it from the first batch."""
    return not any(is_lazy(weight) for weight in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def load_plain_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a state dict with plain names into a model that may be wrapped or partly compiled."""
    model = unwrap_model(model)
    model.load_state_dict({name: weights[_plain(name)] for name in model.state_dict()})


def _pick(values: Mapping[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    for name in names:
        if name in values:
            return values[name]
    raise ConfigError(f"the averaged weights have no {names[0]}: they were saved with another model")


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")
