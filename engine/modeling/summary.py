"""A table of a model's layers: their parameters, and the shapes of their outputs."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from ...hooks.common import unwrap_model

logger = logging.getLogger(__name__)

_MAX_ROWS = 30  # of the table in log.txt
_MAX_SHOWN = 12  # of the table on the console


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model's layers by name, as deep as there are at most 12.

    A layer with own weights, and one of TorchScript, whose layers have no hooks, is not divided.
    """
    layers, deeper = list[tuple[str, nn.Module]](), list(model.named_children())
    while deeper != layers and len(deeper) <= _MAX_SHOWN:
        layers, deeper = deeper, []
        for name, layer in layers:
            if layer._parameters or not layer._modules or isinstance(layer, ScriptModule):
                deeper.append((name, layer))
                continue
            for part, child in layer.named_children():
                deeper.append((f"{name}.{part}", child))
    return layers or deeper


def model_summary(model: nn.Module, shapes: Mapping[str, str] | None = None) -> str:
    """Return a table of the model's layers with their numbers of parameters.

    The total counts shared parameters once.

    Args:
        model: the model.
        shapes: the shapes of the outputs of layers, for a column, by their names.
    """
    layers = _layers(model)
    rows = [("layer", "type", "" if shapes is None else "output", "parameters")]
    for name, layer in [*layers[:_MAX_ROWS], ("total", model)]:
        total = trained = 0
        for parameter in layer.parameters():
            total += parameter.numel()
            trained += parameter.numel() * parameter.requires_grad
        count = f"{total:,}" + f" ({trained:,} trained)" * (trained != total)
        rows.append((name, type(layer).__name__, (shapes or {}).get(name, ""), count))
    if len(layers) > _MAX_ROWS:
        rows.insert(-1, (f"... and {len(layers) - _MAX_ROWS} more", "", "", ""))
    a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, kind, shape, count in rows:
        output = f"{shape:<{c}}  " if c else ""
        lines.append(f"  {name:<{a}}  {kind:<{b}}  {output}{count:>{d}}".rstrip())
    return "\n".join(lines)


def logs_shapes(model: nn.Module, run: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls ``run``, and logs a table of the layers with the shapes of their outputs in it.

    Args:
        model: if it is no module, or has no layers, more than 12 or compiled ones, ``run`` itself is returned.
        run: calls the model. It computes what it does without the table.
    """
    layers = _layers(unwrap_model(model)) if isinstance(model, nn.Module) else []  # it may be any callable
    names, shapes = {id(layer): name for name, layer in layers}, dict[str, str]()
    if not 0 < len(names) <= _MAX_SHOWN or any(map(_is_compiled, model.modules())):
        return run

    def keep(layer: nn.Module, inputs: object, output: object) -> None:
        if id(layer) in names:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not leaf.is_nested]
            shapes[names[id(layer)]] = str(tuple(tensors[0].shape)) if tensors else ""

    def call(*args: object, **kwargs: object) -> object:
        # A hook of all modules: layers of torch compute some things in another way if they have one of their own.
        with register_module_forward_hook(keep):
            result = run(*args, **kwargs)
        if shapes:
            logger.info("Layers, with the shapes of their outputs:\n%s", model_summary(unwrap_model(model), shapes))
        return result

    return call


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch has compiled the module or a method of it: it would compile them once more without the hook."""
    values = (*vars(module).values(), *vars(type(module)).values())
    methods = (value for value in values if callable(value))
    return module._compiled_call_impl is not None or any(hasattr(one, "_torchdynamo_orig_callable") for one in methods)
