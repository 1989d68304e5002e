"""Options of ``MODEL`` for a built model: batch norm, memory format, activation checkpointing, compilation."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...config import CfgNode, ConfigError
from ...config.errors import suggest
from ...config.signatures import bind
from ...hooks.common import describe_no_match, matches
from .. import comm

logger = logging.getLogger(__name__)

# Operations by the words of MODEL.ACTIVATION_CHECKPOINTING_KEEP. Not those in place: their results change later.
_KEPT = {
    "matmul": re.compile(r"aten\.(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm)\.default"),
    "attention": re.compile(r".*(attention|attn)"),  # torch's kernels, flex_attention, and those of flash_attn
}


def apply_model_options(cfg: CfgNode, model: nn.Module, device: torch.device) -> nn.Module:
    """Change a model as ``cfg.MODEL`` asks for it. Names of its weights stay.

    Raises:
        ConfigError: a pattern matches nothing, an argument is wrong, or the device cannot do it.
    """
    if cfg.MODEL.SYNC_BATCHNORM:
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            logger.warning("MODEL.SYNC_BATCHNORM does nothing: %s has no batch norms", type(model).__name__)
        elif comm.get_world_size() > 1:
            if device.type == "cpu":
                raise ConfigError("MODEL.SYNC_BATCHNORM: torch's SyncBatchNorm works on GPUs only, not on the CPU")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if cfg.MODEL.CHANNELS_LAST:
        if not any(parameter.dim() == 4 for parameter in model.parameters()):
            logger.warning("MODEL.CHANNELS_LAST does nothing: %s has no 2d convolutions", type(model).__name__)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    checkpoint_activations(
        model, cfg.MODEL.ACTIVATION_CHECKPOINTING, keep=tuple(cfg.MODEL.ACTIVATION_CHECKPOINTING_KEEP)
    )
    if cfg.MODEL.COMPILE.ENABLED:
        bind(torch.compile, cfg.MODEL.COMPILE.ARGS, positional=(None,), key="MODEL.COMPILE.ARGS", label="torch.compile")
        modules = outermost_matches(model, cfg.MODEL.COMPILE.MODULES, "MODEL.COMPILE.MODULES") or [model]
        try:
            for module in modules:
                module.compile(**cfg.MODEL.COMPILE.ARGS)  # in place: the module stays the same
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"MODEL.COMPILE.ARGS: {error}") from error
    return model


# ---------------------------------------------------------------------------- activation checkpointing


def checkpoint_activations(
    model: nn.Module,
    patterns: Sequence[str],
    key: str = "MODEL.ACTIVATION_CHECKPOINTING",
    keep: Sequence[str] = (),
) -> None:
    """Make submodules recompute their activations in the backward pass.

    Gradients are bitwise the same: random numbers are restored, and running statistics count a batch once. Classes and
    names in the state dict do not change. Copies of the model are checkpointed, too.

    Args:
        model: changed in place.
        patterns: names of submodules or classes; see :func:`outermost_matches`. Submodules of a checkpointed submodule
            are not checkpointed again.
        key: the config key of ``patterns``, for messages.
        keep: results that are kept and not computed again: "matmul" (matrix products), "attention" (fused attention,
            unless it has dropout, whose random numbers would be missing in the second run).

    Raises:
        ConfigError: a pattern matches nothing, or what it matches is never called; a word of ``keep`` is unknown, or
            there are no patterns for it.
    """
    for word in keep:
        if str(word) not in _KEPT:
            hint = suggest(str(word), _KEPT) or f"; use {' or '.join(map(repr, _KEPT))}"
            raise ConfigError(f"{key}_KEEP: there are no operations {word!r}{hint}")
    if keep and not patterns:
        raise ConfigError(f"{key}_KEEP does nothing: {key} names no submodules")
    for child in outermost_matches(model, patterns, key):
        # On the instance: the class stays. A partial and not a closure: its deep copy refers to the copied module.
        child.forward = partial(_checkpointed, child, vars(child).get("forward"), tuple(keep))


def outermost_matches(model: nn.Module, patterns: Sequence[str], key: str) -> list[nn.Module]:
    """Return the submodules that the patterns match, without those inside another one.

    Args:
        model: the model.
        patterns: names of submodules ("blocks.*") or classes ("*Block"); see
            :func:`~hookline.hooks.common.matches`.
        key: the config key of ``patterns``, for messages.

    Raises:
        ConfigError: a pattern matches nothing, or what it matches is never called.
    """
    chosen: dict[str, nn.Module] = {}
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, str):
            raise ConfigError(f"{key}[{index}]: {pattern!r} is not the name of a submodule or class")
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


def _checkpointed(module: nn.Module, other: Any, keep: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """The checkpointed ``forward`` of a module. ``other``: another wrapper's forward, or None."""
    forward = other or partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = {}
    if not torch.compiler.is_compiling():  # a compiled graph updates statistics once
        contexts = {"context_fn": partial(_contexts, module, keep)}
    elif keep:
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, partial(_policy, keep))}
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)


def _contexts(
    module: nn.Module, keep: tuple[str, ...]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of the first and the second run, whose statistics do not count."""
    statistics = copied_buffers([m for m in module.modules() if isinstance(m, _NormBase) and m.training])
    if not keep:
        return nullcontext(), statistics
    first, second = create_selective_checkpoint_contexts(partial(_policy, keep))
    return first, _both(statistics, second)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(keep: tuple[str, ...], _: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide for torch whether the result of an operation is kept."""
    if any(_KEPT[word].match(str(operation)) for word in keep):
        names = [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
        if not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"):
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def copied_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules change copies of their buffers within the block; at its end they have their buffers again."""
    saved = [(module._buffers, dict(module._buffers)) for module in modules]
    for buffers, _ in saved:
        buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
    try:
        yield
    finally:
        for buffers, before in saved:
            buffers.update(before)
