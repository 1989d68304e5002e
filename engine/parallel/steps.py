"""Steps that a recording notes: torch's operations, and which tensors they read and write."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = [
    "CannotRecordError",
    "Place",
    "Step",
    "in_state",
    "is_meta",
    "is_tensor",
    "on_meta",
    "places_in",
    "takes",
    "tensors_in",
    "without_values",
    "written_by",
]


class CannotRecordError(RuntimeError):
    """A constructor does what cannot be recorded."""


@dataclass(frozen=True)
class Place:
    """Which values a tensor has: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        """Return the place of a tensor on the meta device."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise CannotRecordError("it builds sparse or conjugated tensors")
        key = tensor.untyped_storage()._cdata
        return cls(key, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that the place describes in a storage with values."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class Step:
    """One operation, with places for the tensors in its arguments."""

    function: Any
    args: Any
    kwargs: Any
    new: list[Place | None] = field(default_factory=list)  # its outputs; None: not a new tensor
    reads: set[int] = field(default_factory=set)  # storages
    fills: int = 0  # the storage whose former values it overwrites
    draws: tuple[torch.Generator, torch.Tensor] | None = None  # from this generator in this state

    def uses(self) -> set[int]:
        """Return the storages that it needs while it runs."""
        return self.reads | {place.storage for place in self.new if place} | ({self.fills} if self.fills else set())


def on_meta(func: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments with which an operation makes its output on the meta device."""
    new = {"device": torch.device("meta")} if takes(func, "device") else {}
    return {**kwargs, **new, **({"pin_memory": False} if "pin_memory" in kwargs else {})}


def takes(func: Any, name: str) -> bool:
    """Return whether an operation has an argument of that name."""
    return any(argument.name == name for argument in func._schema.arguments)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def is_meta(value: Any) -> bool:
    """Return whether a value is a tensor on the meta device."""
    return isinstance(value, torch.Tensor) and value.is_meta


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def places_in(tree: Any) -> list[Place]:
    """Return the places in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Place)]


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments of an operation that it writes to."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout on the meta device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def in_state(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    """Set a generator's state for the block, and restore it."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
