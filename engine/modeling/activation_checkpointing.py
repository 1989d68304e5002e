"""Activation checkpointing: submodules that recompute activations in the backward pass instead of keeping them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ...config import ConfigError
from ...hooks.common.models import describe_no_match, matches

__all__ = ["checkpoint_activations", "outermost_matches"]


def checkpoint_activations(
    model: nn.Module, patterns: Sequence[str], key: str = "MODEL.ACTIVATION_CHECKPOINTING"
) -> None:
    """Make submodules recompute their activations in the backward pass.

    Gradients are bitwise the same: random numbers are restored, and running statistics count a batch once. Classes and
    names in the state dict do not change. Copies of the model are checkpointed, too.

    Args:
        model: changed in place.
        patterns: names of submodules or classes; see :func:`outermost_matches`. Submodules of a checkpointed submodule
            are not checkpointed again.
        key: the config key of ``patterns``, for messages.

    Raises:
        ConfigError: a pattern matches nothing, or what it matches is never called.
    """
    for child in outermost_matches(model, patterns, key):
        child.forward = _Checkpointed(child)  # on the instance: the class stays


def outermost_matches(model: nn.Module, patterns: Sequence[str], key: str) -> list[nn.Module]:
    """Return the submodules that the patterns match, without those inside another one.

    Args:
        model: the model.
        patterns: names of submodules ("blocks.*") or classes ("*Block"); see
            :func:`~hookline.hooks.common.models.matches`.
        key: the config key of ``patterns``, for messages.

    Raises:
        ConfigError: a pattern matches nothing, or what it matches is never called.
    """
    chosen: dict[str, nn.Module] = {}
    for index, pattern in enumerate(patterns):
        found = {name: child for name, child in model.named_modules() if name and matches(pattern, name, child)}
        if not found:
            raise ConfigError(f"{key}[{index}]: {describe_no_match(model, pattern)}")
        for name, child in found.items():
            if type(child).forward is nn.ModuleList.forward:  # nn.Module's, which raises
                raise ConfigError(
                    f"{key}[{index}]: '{name}' is a {type(child).__name__}, which is never called itself; "
                    f"use its submodules: '{name}.*'"
                )
        chosen |= found
    return [child for name, child in chosen.items() if not any(name.startswith(f"{outer}.") for outer in chosen)]


class _Checkpointed:
    """The checkpointed ``forward`` of a module.

    An object and not a closure: its deep copy refers to the copied module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = module.__dict__.get("forward")  # another wrapper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph updates statistics once
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the first and the second run."""
        return nullcontext(), _preserve_statistics(self.module)


@contextmanager
def _preserve_statistics(module: nn.Module) -> Iterator[None]:
    """Let normalisation layers update copies of their running statistics inside the context."""
    layers = [m for m in module.modules() if isinstance(m, _NormBase) and m.training]
    saved = [dict(layer._buffers) for layer in layers]
    for layer in layers:
        layer._buffers.update({name: None if b is None else b.clone() for name, b in layer._buffers.items()})
    try:
        yield
    finally:
        for layer, buffers in zip(layers, saved, strict=True):
            layer._buffers.update(buffers)
