"""Reads weights in all supported formats, and chooses between a model's and averaged ones."""

import json
import os
import zipfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from ...config.atomic import replace_file
from ...config.errors import ConfigError, first_line, printable
from ...hooks.common import plain_name, unwrap_model
from .files import load_torch_file, verify_checkpoint, write_checkpoint
from .state import to_plain

if TYPE_CHECKING:
    from .dcp_reader import Like

# Keys of the model's weights: hookline, detectron2 and fvcore; Lightning; torch's tutorial; DeepSpeed.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")

# Keys of averaged weights in other projects' checkpoints.
_AVERAGED_KEYS = ("model_ema", "ema_state_dict", "state_dict_ema", "ema_model", "ema")


def read_checkpoint(
    path: str, *, mmap: bool = False, like: "Like | None" = None, verified: bool = False
) -> dict[str, Any]:
    """Read and verify a checkpoint or weights. No code in them runs.

    All loads use this function. It compares all checksums that there are, in files of ``torch.save`` and in sharded
    checkpoints.

    Formats: files of ``torch.save`` (checkpoints of hookline, detectron2, fvcore and Lightning, plain state dicts);
    safetensors; Hugging Face's folders; folders of ``torch.distributed.checkpoint``. All ranks read a folder of the
    last kind together. If it is not hookline's, only the weights are read.

    Args:
        path: what :func:`~hookline.engine.checkpoint.find_checkpoint.find_checkpoint` returned.
        mmap: map files into memory if the format allows it, so that only what is used is read. Sharded tensors other
            than weights are then not read; None is in their place.
        like: how tensors are sharded in this run; by default they are read whole.
        verified: whether the checksums were compared already.

    Returns:
        ``{"model": {name: tensor}}``, tensors on the CPU, and the file's other content.

    Raises:
        ConfigError: it is corrupt, or it holds no weights.
    """
    try:
        if os.path.isdir(path):
            checkpoint = _read_folder(path, mmap, like, verified)
        elif path.endswith(".index.json"):
            checkpoint = _read_shards(path, mmap)
        else:
            checkpoint = _read_file(path, mmap, verified)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    _check_names(path, checkpoint["model"])
    return checkpoint


def _read_folder(path: str, mmap: bool, like: "Like | None", verified: bool) -> dict[str, Any]:
    from .sharded import is_sharded_folder, read_folder

    if not is_sharded_folder(path):
        return _read_distributed(path, like)
    content = read_folder(path, like, _is_place_of_weights if mmap else None, verified)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{path} is not a checkpoint: it has no 'model'")
    return content


def _check_names(path: str, weights: Mapping[object, object]) -> None:
    """Refuse names with control characters, which could change the terminal when they are printed."""
    for name in weights:
        if not isinstance(name, str) or not name.isprintable():
            raise ConfigError(f"{path} is corrupt, or is not a checkpoint: a weight has the name {name!r}")


def choose_weights(
    checkpoint: Mapping[str, Any], source: str = "auto", path: str = "the file"
) -> tuple[Mapping[str, Any], str]:
    """Choose between a checkpoint's model and averaged weights.

    Args:
        checkpoint: what :func:`read_checkpoint` returned.
        source: "model", "averaged", or "auto": the averaged weights if the run evaluated them, so that its results
            are reproduced; else the model's.
        path: the file, for messages.

    Returns:
        The weights by name, and what they are: "model", or "averaged by ..." with the hook's name.

    Raises:
        ConfigError: there are no averaged weights.
    """
    found = None if source == "model" else find_averaged(checkpoint)
    if found is None and source == "averaged":
        raise ConfigError(f"{path} holds no averaged weights of the hooks EMA and SWA; take the model's")
    if found is not None and (source == "averaged" or found[2]):
        return found[1], f"averaged by {found[0]}"
    return checkpoint["model"], "model"


def find_averaged(checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Any], bool] | None:
    """Return the averaged weights (EMA, SWA) in what :func:`read_checkpoint` returned; None if there are none.

    Returns:
        The hook's name, the weights by name, and whether the run evaluated them.
    """
    trainer = checkpoint.get("trainer")
    hooks = trainer.get("hooks") if isinstance(trainer, Mapping) else None
    hooks = hooks if isinstance(hooks, Mapping) else {}
    found = [
        (str(key), dict(state["averaged_model"]), bool(state.get("evaluate", True)))
        for key, state in hooks.items()
        if isinstance(state, Mapping) and _is_state_dict(state.get("averaged_model")) and state["averaged_model"]
    ]
    found += [(key, dict(value), False) for key in _AVERAGED_KEYS if _is_state_dict(value := checkpoint.get(key))]
    for key, weights, _ in found:
        _check_names(f"the state of {printable(key)}", weights)
    return max(found, key=lambda one: one[2], default=None)  # evaluated ones first


# ---------------------------------------------------------------------------- one file


def _read_file(path: str, mmap: bool, verified: bool = False) -> dict[str, Any]:
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    if not verified and zipfile.is_zipfile(path):  # torch.save's old format has no checksums
        verify_checkpoint(path)
    content = load_torch_file(path, mmap=mmap)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a checkpoint: it holds a {type(content).__name__}, not a dict")
    for key in _MODEL_KEYS:
        if _is_state_dict(content.get(key)):
            content["model"] = content.pop(key)
            return content
    if _is_state_dict(content) and content:
        return {"model": content}
    if isinstance(content.get("model"), dict):
        return content
    there = printable(", ".join(map(str, list(content)[:10]))) or "nothing"
    raise ConfigError(f"{path} is not a checkpoint: it has no 'model', only {there}")


def _is_state_dict(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a state dict. Extra state of modules may be of any type."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and (isinstance(item, torch.Tensor) or key.endswith("_extra_state"))
        for key, item in value.items()
    )


def _read_safetensors(path: str) -> dict[str, Any]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError(
            f"{path} is a safetensors file, and the package safetensors is not installed: pip install safetensors"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it cannot be iterated)
            metadata = dict(file.metadata() or {})
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{path} is corrupt, or is not a safetensors file ({first_line(error)})") from error
    # Shared weights are stored once, with the other names in the metadata, as safetensors.torch.save_model() does.
    for name, kept in metadata.items():
        if name not in weights and kept in weights:
            weights[name] = weights[kept]
    return {"model": weights, "metadata": {name: text for name, text in metadata.items() if name not in weights}}


# ---------------------------------------------------------------------------- several files


def _read_shards(index: str, mmap: bool) -> dict[str, Any]:
    """Read the files that a Hugging Face index lists."""
    try:
        with open(index) as file:
            names = set(json.load(file)["weight_map"].values())
        if any(os.path.basename(name) != name for name in names):
            raise ValueError("it names files outside of its folder")
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{index} is corrupt, or is not an index of weights ({first_line(error)})") from error
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        weights.update(_read_file(os.path.join(os.path.dirname(index), name), mmap)["model"])
    return {"model": weights}


def _is_place_of_weights(keys: tuple[str, ...]) -> bool:
    """Return whether an entry with these keys is one of a model's weights or averaged weights."""
    return keys[0] in _MODEL_KEYS or "averaged_model" in keys


def _read_distributed(path: str, like: "Like | None") -> dict[str, Any]:
    """Read the weights and averaged weights in a folder of torch.distributed.checkpoint."""
    from .dcp_reader import nested, read_tensors

    try:
        content = nested(read_tensors(path, _is_place_of_weights, like))
    except (AttributeError, TypeError):
        raise ConfigError(f"{path} is corrupt (it has a tensor and a dict under one name)") from None
    for key in _MODEL_KEYS:
        if _is_state_dict(content.get(key)):
            content["model"] = content.pop(key)
            return content
    content = nested(read_tensors(path, lambda keys: len(keys) == 1, like))  # a plain state dict
    if not content:
        raise ConfigError(f"{path} is not a checkpoint of a model: it holds no tensors under 'model'")
    return {"model": content}


def save_weights(model: nn.Module, target: "str | os.PathLike[str] | IO[bytes]") -> None:
    """Save a model's weights without optimizer, hooks and the state of a run. ``MODEL.WEIGHTS`` reads the file.

    Args:
        model: the model, wrapped for several processes or not.
        target: a path, whose file appears when it is complete; or a file that is open for writing bytes.

    Raises:
        TypeError: the state has something that is neither a tensor nor plain data.
    """
    weights = to_plain(unwrap_model(model).state_dict(), "model")
    data: dict[str, Any] = {"model": {plain_name(name): value for name, value in weights.items()}}
    if isinstance(target, str | os.PathLike):
        replace_file(os.fspath(target), lambda file: write_checkpoint(file, data))
    else:
        torch.save(data, target)
