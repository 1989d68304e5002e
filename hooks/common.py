"""Small helpers that several rooms share: batches, sharded tensors, models, optimizers, random numbers.

Sharded tensors are torch's DTensor; ``torch.distributed.tensor`` is imported only where one is made.
"""

import copy
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import nn

from ..config import suggest
from ..config.errors import MismatchError, as_config_error
from .event_storage import EventStorage, get_event_storage
from .protocol import TrainerProtocol

# Parts of names that torch.compile, FSDP and activation checkpointing add.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class CurrentStorage:
    """``storage`` of a trainer that has none, because another trainer calls its ``run_step``: that of the run."""

    def __get__(self, trainer: object, owner: type | None = None) -> EventStorage:
        return get_event_storage()


# ---------------------------------------------------------------------------- batches and sharded tensors


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def has_shards(model: nn.Module) -> bool:
    """Return whether a model's parameters are sharded over the ranks."""
    return any(map(is_sharded, model.parameters()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, with the same storage; other tensors unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def shard_like(whole: torch.Tensor, one: Any) -> Any:
    """Return a tensor that is the same on all ranks with the shards of ``one``. Ranks exchange nothing."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(one.device_mesh.device_type)
    return distribute_tensor(whole, one.device_mesh, one.placements, src_data_rank=None)


def gathered(tensor: Any) -> Any:
    """Gather a sharded tensor on all ranks, which call this together; return anything else unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers in float64; on mps, which has none, in float32."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def class_names_of(dataset: object) -> list[str]:
    """Return ``classes`` of a data set, such as an ``ImageFolder``, also in a ``Subset`` or a loader; or []."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", ())
    return list(map(str, names)) if isinstance(names, Sequence) else []


# The batch that is being worked on, and the number of its samples, which its loader knows.
_in_hand: tuple[object, int | None] = (None, None)


@contextmanager
def sized(batch: object, number: int | None) -> Iterator[None]:
    """Have :func:`samples_in` return the number of samples that a loader has read for a batch, within the block."""
    global _in_hand
    before, _in_hand = _in_hand, (batch, number)
    try:
        yield
    finally:
        _in_hand = before


def samples_in(batch: object, read: int | None = None) -> int | None:
    """Return the number of samples in a batch.

    Args:
        batch: any. ``num_samples``, an attribute or an entry of a dict, states the number.
        read: how many samples its loader has read for it, if that is known.

    Returns:
        The stated number, or that of the loader. Otherwise the number in which all parts of the batch agree: the first
        dimension of each tensor and array, and the length of each list of samples, in any nesting of tuples, dicts and
        dataclasses. None if they do not agree, or there are none.

    Raises:
        MismatchError: ``num_samples`` is not an integer.
    """
    stated = batch.get("num_samples") if isinstance(batch, Mapping) else getattr(batch, "num_samples", None)
    if stated is not None:
        scalar = stated.item() if isinstance(stated, torch.Tensor | np.ndarray) and not stated.ndim else stated
        if isinstance(scalar, Integral) and not isinstance(scalar, bool):
            return int(scalar)
        raise MismatchError(
            f"num_samples of a batch is its number of samples, one integer, not {stated!r:.200}; if it is something "
            "else, rename it"
        )
    if read is None and batch is _in_hand[0]:
        read = _in_hand[1]
    if read is not None:
        return read
    found = set(_sizes(batch))
    return found.pop() if len(found) == 1 else None


def length_of(data: Any) -> int | None:
    """Return ``len(data)``; None for a generator, an iterable data set, an endless sampler, and a loader of these."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _sizes(part: object) -> Iterator[int]:
    """Yield the number of samples that each tensor, array and list of a batch stands for."""
    if isinstance(part, torch.Tensor | np.ndarray):
        if part.ndim:
            yield len(part)
        return
    if isinstance(part, list):
        if may_be_samples(part):
            yield len(part)
        if not any(isinstance(one, torch.Tensor) for one in part):
            return
    for child in _parts_of(part):
        yield from _sizes(child)


def may_be_samples(part: list[object]) -> bool:
    """Return whether a list may have one entry per sample.

    It has fields if there are tensors of several types or numbers of dimensions in it: torch collates tuples to lists.
    A list of tensors that are alike may be either.
    """
    kinds = {(one.ndim, one.dtype) if isinstance(one, torch.Tensor) else None for one in part}
    return len(kinds) < 2


def _parts_of(part: object) -> Iterable[object]:
    """Return the values in a tuple, list, dict or dataclass; nothing for another object."""
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, tuple | list):
        return part
    return fields_of(part).values()


def fields_of(part: object) -> dict[str, Any]:
    """Return the fields of a dataclass by name; an empty dict for another object."""
    if not is_dataclass(part) or isinstance(part, type):
        return {}
    return {field.name: getattr(part, field.name) for field in fields(part)}


def convert(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with other values.

    Args:
        batch: values in dicts, lists, tuples, named tuples and dataclasses.
        leaf: returns the new value for a tensor or another part; None: its parts are converted, or it is kept.
    """
    if (new := leaf(batch)) is not None:
        return new
    if isinstance(batch, tuple):
        items = [convert(item, leaf) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [convert(item, leaf) for item in batch]
    if isinstance(batch, Mapping):
        made = {key: convert(value, leaf) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return made
        changed = copy.copy(batch)  # keeps the type and other attributes
        for key, value in made.items():
            changed[key] = value
        return changed
    if is_dataclass(batch):
        copied: Any = copy.copy(batch)
        for name, value in fields_of(batch).items():
            object.__setattr__(copied, name, convert(value, leaf))  # it may be frozen
        return copied
    return batch


# ---------------------------------------------------------------------------- trainers, models and optimizers


def run_folder(trainer: TrainerProtocol) -> str | None:
    """Return the folder of a trainer's run, OUTPUT_DIR of its config; None if it has no config."""
    return getattr(getattr(trainer, "cfg", None), "OUTPUT_DIR", None)


def unwrap_model(model: Any) -> Any:
    """Return the user's model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def matches(pattern: str, name: str, module: nn.Module | None = None) -> bool:
    """Return whether a pattern matches a submodule or parameter.

    This is the one meaning of patterns in configs: ``*``, ``?`` and ``[]`` match within one part of a dotted name
    ("blocks.*" matches "blocks.0", not "blocks.0.norm"), or within the name of the module's class ("*Block").

    Args:
        pattern: a pattern or a plain name.
        name: the full dotted name.
        module: the submodule with that name, to match its class and base classes; None for a parameter.
    """
    classes = () if module is None else type(module).__mro__[:-1]
    if any(fnmatchcase(cls.__name__, pattern) for cls in classes if cls is not nn.Module):
        return True
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def describe_no_match(model: nn.Module, pattern: str, more: Sequence[str] = ()) -> str:
    """Return the error text for a pattern that matches nothing in a model, nor any of ``more`` names."""
    modules = {name: type(child).__name__ for name, child in model.named_modules() if name}
    classes, names = sorted(set(modules.values())), [name for name in modules if name.count(".") <= 1]
    return (
        f"{type(model).__name__} has no submodule and no class that matches {pattern!r}"
        f"{suggest(pattern, [*modules, *classes, *more]) or '.'} "
        f"Submodules: {_listed(names)}. Classes: {_listed(classes)}"
    )


def plain_name(name: str) -> str:
    """Return a weight's name in the model as the user wrote it, without names of wrappers."""
    return _WRAPPERS.sub("", name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return (", ".join(names[:20]) or "none") + more


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of an ``OptimizerList``; for any other optimizer a list of it alone."""
    optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])
    return optimizers


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return the schedules of a ``SchedulerList``; for any other schedule a list of it alone."""
    return list(scheduler) if hasattr(scheduler, "named") else [scheduler]  # a user's may have the schedulers it calls


def set_optimizer_mode(optimizer: Any, training: bool) -> list[Any]:
    """Call ``train()`` or ``eval()`` of optimizers that have both, as schedule-free ones, unless it was the last call.

    Returns:
        Those whose mode has changed. Before the first call they are in eval mode.
    """
    changed = []
    for one in optimizers_of(optimizer):
        switch = getattr(one, "train" if training else "eval", None)
        if callable(switch) and hasattr(one, "eval") and vars(one).get("in_train_mode", False) != training:
            switch()
            one.in_train_mode = training
            changed.append(one)
    return changed


@contextmanager
def optimizer_in_eval_mode(*optimizers: Any) -> Iterator[None]:
    """Evaluate or save with the weights that optimizers have for it; at the end they are back in train mode, if they
    were. All ranks must enter it at the same step: changing to and fro rounds the weights."""
    changed = []
    for optimizer in optimizers:
        changed += set_optimizer_mode(optimizer, False)
    try:
        yield
    finally:
        for one in changed:
            set_optimizer_mode(one, True)


def start_momentum(optimizer: Any) -> None:
    """Give fused SGD a momentum of zero, with which its first update is the same.

    By itself it leaves the momentum unset if the first update is skipped because of a NaN or an infinity, and fails if
    a parameter has its first gradient in a later step.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.detach()))


# ---------------------------------------------------------------------------- global random number generators


_KEPT: list[dict[str, Any]] = []  # the states of the open preserve_rng()s


def capture_rng(of_training: bool = False) -> dict[str, Any]:
    """Return the state of Python's, NumPy's, torch's and each GPU's generator, loadable with ``weights_only=True``.

    Args:
        of_training: within :func:`preserve_rng`, return the state that training continues with.
    """
    if of_training and _KEPT:
        return _KEPT[0]
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`capture_rng` returned."""
    with as_config_error("the state of the random generators in the checkpoint"):
        version, internal, gauss_next = state["python"]
        random.setstate((version, tuple(internal), gauss_next))
        name, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore all generators, GPUs' too, at the end of the block: what an evaluation draws does not change training."""
    state = capture_rng()
    _KEPT.append(state)
    try:
        yield
    finally:
        _KEPT.pop()
        restore_rng(state)
