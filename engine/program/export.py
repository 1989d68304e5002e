"""Exports a trained model: only its weights, or the whole model as a program of torch.export or ONNX."""

import argparse
import inspect
import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hookline

from ...config import CfgNode, ConfigError, get_cfg, name_of
from ...config.atomic import replace_file, replace_text
from ...config.errors import first_line, printable
from ...hooks.common import plain_name
from ...runs.reading import WRITTEN_BY, check_output
from ..checkpoint.find_checkpoint import find_checkpoint
from ..checkpoint.weights import choose_weights, read_checkpoint
from ..data import build_test_loader, build_train_loader
from ..data.loader import move_to_device
from ..evaluation.evaluator import Outputs
from ..modeling import ModelAdapter, build_adapter, build_model, resolve_device
from .inspection import part_of
from .predictor import load_weights

FORMATS = {
    "safetensors": (".safetensors",),
    "pth": (".pth", ".pt", ".bin"),
    "torch-export": (".pt2",),
    "onnx": (".onnx",),
}
"""Formats and their file extensions."""


@dataclass(frozen=True)
class Exported:
    """Describes an exported file; ``str()`` is a text about it.

    Attributes:
        path: the file.
        format: one of :data:`FORMATS`.
        weights: number of weights.
        bytes: size of the weights.
        metadata: the file's metadata about its origin; empty for a plain state dict. That of a program has the only
            ``batch_size`` that it takes, or "any".
    """

    path: str
    format: str
    weights: int
    bytes: int
    metadata: dict[str, str]

    def __str__(self) -> str:
        title = f"{self.path}: {self.weights} weights, {self.bytes / 1e6:.3g} MB, {self.format}"
        return "\n".join([title, *(f"  {name}: {value}" for name, value in self.metadata.items())])


def export(args: argparse.Namespace) -> Exported:
    """Export as the options of ``hookline export`` say.

    Raises:
        ConfigError: bad input, in which case nothing is written.
    """
    size = args.max_shard_size
    format = args.format or "safetensors" if size else check_format(args.output, args.format, args.checkpoint)
    if size or format not in ("torch-export", "onnx"):
        if args.config_file or args.trust_config or args.opts:
            raise ConfigError(
                f"--config-file, --trust-config and config keys are for whole programs, not for the format {format}"
            )
        return export_weights(args.checkpoint, args.output, weights=args.weights, format=format, max_shard_size=size)
    path = args.config_file or os.path.join(os.path.dirname(find_checkpoint(args.checkpoint)), "config.yaml")
    if not args.config_file and not (args.trust_config and os.path.isfile(path)):
        raise ConfigError(
            f"--format {format} runs the code that a config names. If there is a {path} and you trust it, add "
            "--trust-config; or name your own config with --config-file"
        )
    cfg = get_cfg()
    cfg.merge_from_file(path)
    cfg.merge_from_list([*args.opts, "MODEL.WEIGHTS", args.checkpoint, "MODEL.WEIGHTS_FROM", args.weights])
    return export_program(cfg, args.output, format)


def export_weights(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    weights: str = "auto",
    format: str = "",
    max_shard_size: str = "",
) -> Exported:
    """Write only the weights of a checkpoint to a file, atomically, or to a folder of files.

    Args:
        source: see :func:`~hookline.engine.checkpoint.find_checkpoint.find_checkpoint`.
        output: the file, in a folder that is created if it is missing. An existing one is replaced if an export wrote
            it.
        weights: which weights: see :func:`~hookline.engine.checkpoint.weights.choose_weights`.
        format: "safetensors", or "pth" for ``torch.save(model.state_dict())``; by default from the extension. A
            safetensors file stores shared weights once, with their other names in its metadata.
        max_shard_size: such as "5GB": ``output`` is a new or empty folder, which gets safetensors files of at most
            this size (larger for a larger weight), and then an index as that of Hugging Face. A sharded checkpoint is
            read file by file: twice the size is needed in memory.

    Raises:
        ConfigError: an argument is wrong, or the source cannot be read or written in that format.
        OSError: the file cannot be written.
    """
    output, path = os.fspath(output), find_checkpoint(os.fspath(source))
    limit = _check_shards(output, format, max_shard_size) if max_shard_size else 0
    format = "safetensors" if limit else check_format(output, format, path, choices=("safetensors", "pth"))
    checkpoint = read_checkpoint(path, mmap=True, like=_later if limit else None)
    tensors, what = choose_weights(checkpoint, weights, path)
    state = {plain_name(name): value for name, value in tensors.items()}
    metadata = {"format": "pt", "hookline": hookline.__version__, **origin(checkpoint), "weights": what}
    if "left_out" in checkpoint and what == "model":
        metadata["left_out"] = f"{len(checkpoint['left_out']['names'])} frozen weights"
    if format == "safetensors":
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"a safetensors file holds tensors only, and {name} (the extra state of a module) is not one; "
                    "use the format pth"
                )
    if limit:
        _write_shards(state, output, metadata, limit, path, checkpoint)
    elif format == "safetensors":
        _write_safetensors(state, output, metadata)
    else:
        marked = OrderedDict(state)
        marked.written_by = WRITTEN_BY  # type: ignore[attr-defined]
        _replace(output, lambda file: torch.save(marked, file))
        metadata = {}
    return _exported(output, format, state, metadata)


def _exported(output: str, format: str, state: Mapping[str, object], metadata: dict[str, str]) -> Exported:
    sizes = [value.nbytes for value in state.values() if isinstance(value, torch.Tensor)]
    return Exported(output, format, len(sizes), sum(sizes), metadata)


def check_format(output: str, format: str, source: str, choices: tuple[str, ...] = tuple(FORMATS)) -> str:
    """Return the format of an output file, and check that it can be written.

    Raises:
        ConfigError: the format is unknown or not given, or see
            :func:`~hookline.runs.reading.check_output`.
    """
    extension = os.path.splitext(output)[1]
    format = format or next((name for name, extensions in FORMATS.items() if extension in extensions), "")
    if format not in choices:
        problem = f"there is no format {format!r} for this" if format else "the extension names no format"
        known = ", ".join(f"{name} ({', '.join(FORMATS[name])})" for name in choices)
        raise ConfigError(f"{output}: {problem}; give one of: {known}")
    check_output(output, source)
    return format


def _replace(output: str, write: Callable[[IO[bytes]], object]) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: its folder cannot be created: {error.strerror}") from error
    replace_file(output, write)


def origin(checkpoint: Mapping[str, object]) -> dict[str, str]:
    """Return the model's name and the iteration of a checkpoint, as far as it holds them."""
    found: dict[str, str] = {}
    for iteration in (checkpoint.get("iteration"), part_of(checkpoint, "trainer", "iteration")):
        if isinstance(iteration, int):
            found["iteration"] = str(iteration)
    with suppress(ConfigError, AttributeError):  # a checkpoint without a config
        if name := part_of(CfgNode.load_cfg(part_of(checkpoint, "trainer", "run", "config")), "MODEL", "NAME"):
            found["model"] = printable(str(name))
    return found


def _check_shards(output: str, format: str, size: str) -> int:
    """Return the bytes of a size, and check that ``output`` can be a folder of shards."""
    found = re.fullmatch(r"(\d+)([KMGT])B", size, re.IGNORECASE)
    if not found or not int(found[1]):
        raise ConfigError(f"{size!r} is not the size of a shard; write, for example, 500MB or 5GB")
    if format not in ("", "safetensors"):
        raise ConfigError(f"only safetensors files are written in shards, not the format {format}")
    free = not os.path.lexists(output) or (os.path.isdir(output) and not os.listdir(output))
    if not free or os.path.splitext(output)[1] in sum(FORMATS.values(), ()):
        raise ConfigError(f"{output}: shards are written to a new or empty folder; give the name of one")
    return int(found[1]) * 1000 ** (" KMGT".index(found[2].upper()))


def _later(keys: tuple[str, ...], shape: torch.Size) -> torch.Tensor | None:
    """Say which sharded tensors are not read now: those that a checkpoint has under the keys of its folder."""
    later = (keys[0] == "model" and len(keys) > 1) or "averaged_model" in keys
    return torch.empty(shape, device="meta") if later else None


def _write_shards(
    state: Mapping[str, torch.Tensor], output: str, metadata: dict[str, str], limit: int, path: str, checkpoint: object
) -> None:
    from ..checkpoint.sharded import read_tensors, walk  # torch.distributed.checkpoint: half a second

    places = dict[int, tuple[str, ...]]()
    walk(checkpoint, lambda keys, value: places.setdefault(id(value), keys))
    shards, room = list[dict[str, torch.Tensor]](), 0
    for name, value in state.items():
        if not shards or value.nbytes > room:
            shards, room = [*shards, {}], limit
        shards[-1][name], room = value, room - value.nbytes
    files: dict[str, str] = {}
    written: list[str] = []
    try:
        for number, shard in enumerate(shards, 1):
            names = {places[id(value)]: name for name, value in shard.items() if value.is_meta}
            read = read_tensors(path, names.__contains__) if names else {}
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {**shard, **{names[place]: value for place, value in read.items()}}
            written.append(os.path.join(output, file))
            files |= dict.fromkeys(_write_safetensors(tensors, written[-1], dict(metadata)), file)
            del read, tensors  # before the next ones are read
        total = sum(value.nbytes for shard in shards for name, value in shard.items() if name in files)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        replace_text(os.path.join(output, "model.safetensors.index.json"), json.dumps(index, indent=1))
    except BaseException:  # the folder must be new or empty when the export is repeated
        for one in filter(os.path.lexists, written):
            os.remove(one)
        raise


def _write_safetensors(state: Mapping[str, torch.Tensor], output: str, metadata: dict[str, str]) -> Iterable[str]:
    """Write a file, and return the names of the weights that it stores."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError("the package safetensors is not installed: pip install safetensors") from None
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[tuple[object, ...], str] = {}
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

    def write(file: IO[bytes]) -> None:
        try:
            save_file(tensors, file.name, metadata)  # replaces the open file by one that only its owner may read
        except SafetensorError as error:
            raise OSError(f"{output} cannot be written: {error}") from error
        os.chmod(file.name, os.fstat(file.fileno()).st_mode)
        with open(file.name, "rb") as new:
            os.fsync(new.fileno())

    _replace(output, write)
    return tensors


# ---------------------------------------------------------------------------- programs


def export_program(cfg: CfgNode, output: str | os.PathLike[str], format: str = "torch-export") -> Exported:
    """Write a config's model, with the weights of MODEL.WEIGHTS, as a program of ``torch.export`` or ONNX.

    The model is traced in eval mode on MODEL.DEVICE with the first batch of the test set, or of the training set if
    there is none. The program takes batches of any size unless the model fixes it. Its outputs for that batch are
    compared with the model's before the file is written; those of ONNX are computed by onnxruntime.

    Args:
        cfg: the config of the run, with MODEL.WEIGHTS set.
        output: the file, usually ``.pt2`` or ``.onnx``; see :func:`export_weights`.
        format: "torch-export" or "onnx".

    Raises:
        ConfigError: the weights do not fit, the model cannot be traced, or the program's outputs differ; a package that
            ONNX needs is not installed.
    """
    output = os.fspath(output)
    check_format(output, format, cfg.MODEL.WEIGHTS, choices=("torch-export", "onnx"))
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if format == "onnx" and not find_spec(name)]:
        raise ConfigError(f"ONNX needs the package {missing[0]}: pip install 'hookline[onnx]'")
    cfg = cfg.thawed()
    # These only make training faster or smaller.
    cfg.MODEL.COMPILE.ENABLED = cfg.MODEL.CHANNELS_LAST = False
    cfg.MODEL.ACTIVATION_CHECKPOINTING = cfg.MODEL.ACTIVATION_CHECKPOINTING_KEEP = []
    model = build_model(cfg).eval()
    rest = load_weights(cfg, model)
    example = _example(cfg, model)
    program, size = _trace(model, example)
    metadata = {"hookline": hookline.__version__, "model": cfg.MODEL.NAME, **origin(rest), "batch_size": size}
    buffer = io.BytesIO()
    if format == "onnx":
        _write_onnx(program, buffer, example, metadata)
    else:
        torch.export.save(program, buffer, extra_files={"hookline.json": json.dumps(metadata)})
        buffer.seek(0)
        _check_same(torch.export.load(buffer).module(), example)
    _replace(output, lambda file: file.write(buffer.getbuffer()))
    return _exported(output, format, model.state_dict(), metadata)


class _Example(NamedTuple):
    """A call of a model, and its outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Outputs


def _write_onnx(
    program: torch.export.ExportedProgram, buffer: io.BytesIO, example: _Example, metadata: dict[str, str]
) -> None:
    try:
        converted: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        model = converted.model_proto
        for name, value in metadata.items():
            model.metadata_props.add(key=name, value=value)
        buffer.write(model.SerializeToString())
    except Exception as error:  # an operation without a translation, or more than 2 GB
        raise ConfigError(f"torch.onnx cannot convert the model: {first_line(error)}") from error
    # Other kernels than torch's, which round differently.
    _check_same(converted, example, rtol=1e-3, atol=1e-4)


def _example(cfg: CfgNode, model: nn.Module) -> _Example:
    """Return the model's call for a batch of the config's data."""
    names = cfg.DATASETS.TEST
    loader = build_test_loader(cfg, name_of(names[0])) if names else build_train_loader(cfg)
    batch = move_to_device(next(iter(loader)), resolve_device(cfg.MODEL.DEVICE))
    adapter, calls = build_adapter(cfg), list[_Example]()
    hook = model.register_forward_hook(
        lambda module, args, kwargs, outputs: calls.append(_Example(args, kwargs, outputs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            adapter.predict(model, batch)
    finally:
        hook.remove()
    if len(calls) != 1:
        raise ConfigError(
            f"{cfg.MODEL.NAME} calls its forward() {len(calls)} times for a batch; torch.export needs exactly one call"
        )
    return calls[0] if adapter.loss is not None else _without_target(model, adapter, calls[0])


def _without_target(model: nn.Module, adapter: ModelAdapter, example: _Example) -> _Example:
    """Leave out the target, which a model that computes its own loss receives, if the model works without it."""
    targets = adapter.inputs.target_names
    positions: list[object] = []
    named = {name: value for name, value in example.kwargs.items() if name not in targets}
    left_out = len(named) < len(example.kwargs)
    for name, value in zip(inspect.signature(model.forward).parameters, example.args, strict=False):
        if name in targets:
            left_out = True
        elif left_out:
            named[name] = value
        else:
            positions.append(value)
    if left_out:
        with suppress(Exception), torch.no_grad():  # a model can raise any error
            return _Example(tuple(positions), named, model(*positions, **named))
    return example


def _trace(model: nn.Module, example: _Example) -> tuple[torch.export.ExportedProgram, str]:
    """Return the program, and the only batch size that it takes, or "any"."""
    args, kwargs, _ = example
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        raise ConfigError("the model receives no tensors, so it cannot be traced")
    size = tensors[0].shape[0]

    def is_batch(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size

    shapes = pytree.tree_map(lambda value: {0: torch.export.Dim.AUTO} if is_batch(value) else None, (args, kwargs))
    half = pytree.tree_map(lambda value: value[: size // 2] if is_batch(value) else value, (args, kwargs))
    try:
        with torch.no_grad():
            model(*half[0], **half[1])
    except Exception:  # a model of one batch size can raise any error
        shapes = pytree.tree_map(lambda _: None, (args, kwargs))
    try:
        # torch.export takes sizes by the names of forward()'s arguments, positional ones too.
        sizes = dict(inspect.signature(model.forward).bind(*shapes[0], **shapes[1]).arguments)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=sizes)
    except Exception as error:
        raise ConfigError(f"torch.export cannot trace {type(model).__name__}: {first_line(error)}") from error
    inputs = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in inputs and "val" in node.meta]
    # Comparing a symbolic size with a number would fix it.
    fixed = any(len(shape) and isinstance(shape[0], int) and shape[0] == size for shape in shapes)
    return program, str(size) if fixed else "any"


def _check_same(program: Callable[..., Outputs], example: _Example, **tolerance: Any) -> None:
    try:
        with torch.no_grad():
            outputs = program(*example.args, **example.kwargs)
        # ONNX has no None, such as the loss of a model that returns (logits, None).
        leaves = [[leaf for leaf in pytree.tree_leaves(one) if leaf is not None] for one in (outputs, example.outputs)]
        for ours, theirs in zip(*leaves, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
    except Exception as error:
        raise ConfigError(f"the exported program's outputs differ from the model's: {error}") from error
