"""A table of a model's layers: parameters, and shapes and FLOPs of a forward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Pass", "model_summary", "watching_forward"]

_MAX_ROWS = 30
_WIDTH = 78
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass
class Pass:
    """What a forward pass did in a layer.

    Attributes:
        shape: of its output, or of the first tensor in it; None: it has none.
        flops: floating-point operations, those of the layers in it included.
    """

    shape: tuple[int, ...] | None
    flops: int


def model_summary(model: nn.Module, passes: Mapping[str, Pass] | None = None) -> str:
    """Return a table of the model's layers, and the layers in them, with their numbers of parameters.

    The total counts shared parameters once. A model with many layers is shown without the layers in them. If the table
    is too wide for 80 columns, types and then shapes are left out.

    Args:
        model: the model.
        passes: what :func:`watching_forward` has seen, to show it.
    """
    layers = _layers(model, 2)
    if len(layers) > _MAX_ROWS:
        layers = _layers(model, 1)
    hidden, layers = layers[_MAX_ROWS:], layers[:_MAX_ROWS]
    passes = passes or {}
    rows = [["layer", "type", "parameters", "output shape", "FLOPs"]]
    for name, layer in [*layers, ("", model)]:
        seen = passes.get(name)
        label = "  " * name.count(".") + name.rpartition(".")[2] if name else "total"
        shape = "" if seen is None or seen.shape is None else str(list(seen.shape))
        rows.append([label, type(layer).__name__, _count(layer), shape, _short(seen.flops) if seen else ""])
    if hidden:
        rows.insert(-1, [f"... and {len(hidden)} more", "", "", "", ""])
    columns = [0, 1, 2, *(column for column in (3, 4) if any(row[column] for row in rows[1:]))]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for least in (1, 3):
        if sum(widths[column] + 2 for column in columns) > _WIDTH and least in columns:
            columns.remove(least)
    right = (2, 4)
    lines = []
    for row in rows:
        cells = [f"{row[c]:>{widths[c]}}" if c in right else f"{row[c]:<{widths[c]}}" for c in columns]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _layers(model: nn.Module, depth: int) -> list[tuple[str, nn.Module]]:
    """Return the layers with their names, each followed by those in it."""
    return [(name, layer) for name, layer in model.named_modules() if name and name.count(".") < depth]


def _count(module: nn.Module) -> str:
    """Return the number of parameters, with a note if some are frozen."""
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{total:,}" if trained == total else f"{total:,} ({trained:,} trained)"


def _short(number: int) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


class _Counter(TorchDispatchMode):
    """Counts floating-point operations with torch's formulas, of matrix products, convolutions and attention.

    torch's own FlopCounterMode does the same, and imports torch._dynamo for seconds.
    """

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper that imports torch._dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=output))
        return output


@contextmanager
def watching_forward(model: nn.Module) -> Iterator[dict[str, Pass]]:
    """Note shapes and FLOPs of the layers in the model's first forward pass within the block.

    Yields:
        What each layer did, by name; the model itself is "". Empty until then, and for compiled models, which hooks
        would compile again.
    """
    passes: dict[str, Pass] = {}
    if any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in model.modules()):
        yield passes
        return
    counter = _Counter()
    handles: list[Any] = []
    counting: list[_Counter] = []  # the counter while it counts

    def end() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        while counting:
            counting.pop().__exit__(None, None, None)

    def watch(name: str, layer: nn.Module) -> None:
        before: list[int] = []

        def begin(*_: Any) -> None:
            if not name and not counting:
                counter.__enter__()
                counting.append(counter)
            if counting:
                before.append(counter.total)

        def note(layer: nn.Module, inputs: Any, output: Any) -> None:
            if before:
                flops = counter.total - before.pop()
                known = passes[name].flops if name in passes else 0  # a layer may be called several times
                passes[name] = Pass(_shape(output), known + flops)
            if not name:
                end()

        handles.append(layer.register_forward_pre_hook(begin))
        handles.append(layer.register_forward_hook(note))

    for name, layer in [("", model), *_layers(model, 2)]:
        watch(name, layer)
    try:
        yield passes
    finally:
        end()


def _shape(output: Any) -> tuple[int, ...] | None:
    if isinstance(output, torch.Tensor):
        return tuple(output.shape)
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return next((shape for value in values if (shape := _shape(value)) is not None), None)
