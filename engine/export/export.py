"""Exports a trained model: only its weights, or the whole model as a torch.export program."""

import inspect
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hookline

from ...config import CfgNode, ConfigError, name_of, suggest
from ...config.errors import first_line, printable
from ...config.files.atomic import replace_file
from ...runs.reading import check_output
from ..checkpoint.checkpointer import unwrap_model
from ..checkpoint.matching import plain_name
from ..checkpoint.weights import choose_weights, find_checkpoint, read_checkpoint
from ..data import build_test_loader, build_train_loader
from ..data.batches import move_to_device
from ..modeling import build_adapter, resolve_device
from .inspection import part_of
from .predictor import load_trained

__all__ = ["FORMATS", "Exported", "export_program", "export_weights"]

FORMATS = {"safetensors": (".safetensors",), "pth": (".pth", ".pt", ".bin"), "torch-export": (".pt2",)}
"""Formats and their file extensions."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Exported:
    """Describes an exported file.

    Attributes:
        path: the file.
        format: one of :data:`FORMATS`.
        weights: number of weights.
        bytes: size of the weights.
        metadata: the file's metadata about its origin; empty for a plain state dict.
        batch_size: the only batch size that a program takes; 0 for any.
    """

    path: str
    format: str
    weights: int
    bytes: int
    metadata: dict[str, str] = field(default_factory=dict)
    batch_size: int = 0


def export_weights(
    source: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    weights: str = "auto",
    format: str = "",
    dtype: str = "",
) -> Exported:
    """Write only a model's weights to a file, atomically.

    Args:
        source: a model, or a path for :func:`~hookline.engine.checkpoint.weights.find_checkpoint`.
        output: the file; an existing one is replaced, but not the source or a file of a run.
        weights: which weights of a checkpoint: see :func:`~hookline.engine.checkpoint.weights.choose_weights`.
        format: "safetensors", or "pth" for ``torch.save(model.state_dict())``; by default from the extension. A
            safetensors file stores shared weights once, with their other names in its metadata.
        dtype: convert floating-point numbers to "float16", "bfloat16", "float32" or "float64".

    Raises:
        ConfigError: an argument is wrong, or the source cannot be read or written in that format.
        OSError: the file cannot be written.
    """
    output = os.fspath(output)
    path = "" if isinstance(source, nn.Module) else find_checkpoint(os.fspath(source))
    format = check_format(output, format, path, choices=("safetensors", "pth"))
    if dtype and dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}, not one of {', '.join(_DTYPES)}{suggest(dtype, _DTYPES)}")
    if isinstance(source, nn.Module):
        tensors: Mapping[str, Any] = unwrap_model(source).state_dict()
        metadata = {"model": type(unwrap_model(source)).__name__}
    else:
        checkpoint = read_checkpoint(path, mmap=True)
        try:
            tensors, what = choose_weights(checkpoint, weights)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        metadata = {**origin(checkpoint), "weights": what}
    state = {plain_name(name): _converted(name, value, dtype) for name, value in tensors.items()}
    metadata = {"format": "pt", "hookline": hookline.__version__, **metadata}
    if format == "safetensors":
        _write_safetensors(state, output, metadata)
    else:
        replace_file(output, lambda file: torch.save(state, file))
        metadata = {}
    held = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return Exported(output, format, len(held), sum(value.nbytes for value in held), metadata)


def check_format(output: str, format: str, source: str, choices: tuple[str, ...] = tuple(FORMATS)) -> str:
    """Return the format of an output file, and check that it can be written.

    Raises:
        ConfigError: the format is unknown or not given, there is no such folder, or see
            :func:`~hookline.runs.reading.check_output`.
    """
    if not format:
        extension = os.path.splitext(output)[1]
        format = next((name for name, extensions in FORMATS.items() if extension in extensions), "")
        if not format:
            known = ", ".join(extension for extensions in FORMATS.values() for extension in extensions)
            raise ConfigError(
                f"{output}: the extension names no format (known: {known}); give a format: {', '.join(choices)}"
            )
    if format not in choices:
        raise ConfigError(f"unknown format {format!r}, not one of {', '.join(choices)}{suggest(format, choices)}")
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{output}: there is no folder {folder}")
    check_output(output, source)
    return format


def origin(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's name and the iteration of a checkpoint, as far as it holds them."""
    found: dict[str, str] = {}
    for iteration in (checkpoint.get("iteration"), part_of(checkpoint, "trainer", "iteration")):
        if isinstance(iteration, int):
            found["iteration"] = str(iteration)
    with suppress(ConfigError, TypeError):
        if name := part_of(CfgNode.load_cfg(part_of(checkpoint, "trainer", "run", "config")), "MODEL", "NAME"):
            found["model"] = printable(str(name))
    return found


def _converted(name: str, value: Any, dtype: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if not dtype or not value.is_floating_point():
        return value
    converted = value.to(getattr(torch, dtype))
    if bool((converted.isinf() & ~value.isinf()).any()):
        raise ConfigError(f"{name} has values up to {value.abs().max():.4g}, which {dtype} cannot hold; use bfloat16")
    return converted


def _write_safetensors(state: Mapping[str, Any], output: str, metadata: dict[str, str]) -> None:
    try:
        from safetensors.torch import save
    except ImportError:
        raise ConfigError("the package safetensors is not installed: pip install safetensors") from None
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(
            f"a safetensors file holds tensors only, and {others[0]} (the extra state of a module) is not one; "
            "use the format pth"
        )
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, value in state.items():
        storage = value.untyped_storage().data_ptr()
        if storage and value.numel():
            same = kept.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
            if same != name:
                metadata[name] = same
                continue
        # Views of one larger tensor are written as separate tensors.
        tensors[name] = value.clone().contiguous() if storage in storages else value.contiguous()
        storages.add(storage)
    # Not save_file(), which would replace the temporary file that is flushed to disk.
    content = save(tensors, metadata)
    replace_file(output, lambda file: file.write(content))


# ---------------------------------------------------------------------------- programs


def export_program(cfg: CfgNode, output: str | os.PathLike[str]) -> Exported:
    """Write a config's model, with the weights of MODEL.WEIGHTS, as a ``torch.export`` program.

    The model is traced in eval mode on MODEL.DEVICE with the first batch of the test set, or of the training set if
    there is none. The program takes batches of any size unless the model fixes it. It is loaded again and compared
    with the model's outputs before the file is written.

    Args:
        cfg: the config of the run, with MODEL.WEIGHTS set.
        output: the file, usually ``.pt2``; an existing one is replaced.

    Raises:
        ConfigError: the weights do not fit, the model cannot be traced, or the program's outputs differ.
    """
    output = os.fspath(output)
    check_format(output, "torch-export", cfg.MODEL.WEIGHTS)
    cfg = cfg.clone()
    cfg.defrost()
    # These only make training faster or smaller.
    cfg.MODEL.COMPILE.ENABLED = cfg.MODEL.CHANNELS_LAST = False
    cfg.MODEL.ACTIVATION_CHECKPOINTING = []
    model, rest = load_trained(cfg)
    args, kwargs, outputs = _example(cfg, model)
    size = _batch_size(args, kwargs)
    cases = [(args, kwargs, outputs)]
    with suppress(Exception), torch.no_grad():  # a model of one batch size can raise any error
        half = pytree.tree_map(lambda value: value[: size // 2] if _is_batch(value, size) else value, (args, kwargs))
        cases.append((*half, model(*half[0], **half[1])))
    traced = _trace(model, args, kwargs, size if size > 1 and len(cases) > 1 else 0)
    fixed = _fixed_batch_size(traced, size)
    metadata = {"hookline": hookline.__version__, "model": cfg.MODEL.NAME, **origin(rest)}
    buffer = io.BytesIO()
    torch.export.save(traced, buffer, extra_files={"hookline.json": json.dumps(metadata)})
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    for args, kwargs, outputs in cases[:1] if fixed else cases:
        _check_same(program, args, kwargs, outputs)
    replace_file(output, lambda file: file.write(buffer.getbuffer()))
    state = model.state_dict().values()
    return Exported(output, "torch-export", len(state), sum(value.nbytes for value in state), metadata, fixed)


def _example(cfg: CfgNode, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments of the model's call for a batch of the config's data, and its outputs."""
    names = cfg.DATASETS.TEST
    loader = build_test_loader(cfg, name_of(names[0])) if names else build_train_loader(cfg)
    batch = move_to_device(next(iter(loader)), resolve_device(cfg.MODEL.DEVICE))
    calls: list[tuple[Any, Any, Any]] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, outputs: calls.append((args, kwargs, outputs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            build_adapter(cfg).predict(model, batch)
    finally:
        hook.remove()
    if len(calls) != 1:
        raise ConfigError(
            f"{cfg.MODEL.NAME} calls its forward() {len(calls)} times for a batch; torch.export needs exactly one call"
        )
    return calls[0]


def _batch_size(args: Any, kwargs: Any) -> int:
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        raise ConfigError("the model receives no tensors, so it cannot be traced")
    return tensors[0].shape[0]


def _is_batch(value: Any, size: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size


def _trace(model: nn.Module, args: Any, kwargs: Any, size: int) -> Any:
    """Return the program. With a ``size``, first dimensions of that size become dynamic where the model allows it."""

    def dynamic(value: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if size and _is_batch(value, size) else None

    shapes = pytree.tree_map(dynamic, (args, kwargs))
    try:
        # torch.export takes sizes by the names of forward()'s arguments, positional ones too.
        sizes = dict(inspect.signature(model.forward).bind(*shapes[0], **shapes[1]).arguments)
        return torch.export.export(model, args, kwargs, dynamic_shapes=sizes)
    except Exception as error:
        raise ConfigError(f"torch.export cannot trace {type(model).__name__}: {first_line(error)}") from error


def _fixed_batch_size(program: Any, size: int) -> int:
    """Return the only batch size that a program takes; 0 if it takes any."""
    inputs = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in inputs and "val" in node.meta]
    # Comparing a symbolic size with a number would fix it.
    return size if any(len(shape) and isinstance(shape[0], int) and shape[0] == size for shape in shapes) else 0


def _check_same(program: Any, args: Any, kwargs: Any, expected: Any) -> None:
    try:
        with torch.no_grad():
            outputs = program(*args, **kwargs)
        for ours, theirs in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(ours, theirs)
    except Exception as error:
        raise ConfigError(f"the exported program's outputs differ from the model's: {error}") from error
