"""Records how a constructor fills its large tensors, and computes the values of one at a time later.

While a :class:`Recording` is active, large tensors have no memory: they are on torch's meta device, and each operation
that writes to one is noted as a step. :meth:`Recording.value` repeats the steps that a tensor depends on; random draws
start from the generator's state of that time. So the values are bit-identical to those of an ordinary construction.
Small tensors are built as usual. The constructor may read values, and sees all tensors on the CPU.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .steps import (
    CannotRecordError,
    Place,
    Step,
    in_state,
    is_meta,
    is_tensor,
    on_meta,
    places_in,
    takes,
    tensors_in,
    without_values,
    written_by,
)

__all__ = ["CannotRecordError", "Place", "Recording"]

SMALL = 1 << 16
"""Tensors of at most so many bytes are built as usual."""

# The values of the last tensors are kept while they are recorded: a constructor may read what it has just drawn.
_KEPT = 6

# In-place operations that do not read the tensor they write to.
_PLAIN_FILLS = {"fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
_FILLS = {"copy_", *_PLAIN_FILLS}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

_T = torch.Tensor
_READS = (_T.tolist, _T.numpy, _T.__array__)
_REFUSED = (_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.pin_memory)


class Recording(TorchDispatchMode):
    """Records what is built in its context.

    Args:
        own_state: state of another CPU generator, which makes the same draws; their results are not used.
        small: tensors of at most so many bytes are built as usual.

    Attributes:
        own_state: the state after these draws.
        problem: why the recording cannot be used; empty if it can.
    """

    def __init__(self, own_state: torch.Tensor | None = None, small: int | None = None) -> None:
        super().__init__()
        self.own_state = own_state
        self.problem = ""
        self._small = SMALL if small is None else small
        self._steps: list[Step] = []
        self._writers: dict[int, list[int]] = {}  # the steps that write to each storage
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that their numbers are unique
        self._kept: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # present values of some
        self._functions = _Functions(self)
        self.busy = False  # in the recording's own code

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper that imports torch._dynamo

    def __enter__(self) -> "Recording":
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        super().__exit__(*error)
        self._kept.clear()

    def refuse(self, problem: str) -> None:
        """Note why the construction cannot be recorded; the constructor may catch the error.

        Raises:
            CannotRecordError: always.
        """
        self.problem = problem
        raise CannotRecordError(problem)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the meta device and its values are recorded."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._storages

    def value(self, place: Place) -> torch.Tensor:
        """Compute a tensor."""
        with self._own_code():
            storage = self._kept.get(place.storage)
            return place.view(self._replay(place.storage) if storage is None else storage)

    # ------------------------------------------------------------------ while the model is built

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.busy:
            return func(*args, **(kwargs or {}))
        with self._own_code():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        tensors = tensors_in((args, kwargs))
        if not any(tensor.is_meta for tensor in tensors):
            if name == "lift_fresh":  # the data of torch.tensor() and torch.from_numpy()
                return args[0]
            device = torch.device(kwargs.get("device") or "cpu").type
            if device == "meta":  # of a tensor that seems to be on the CPU
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if tensors or device == "cuda" or not self._makes_large_tensor(func, args, kwargs):
                return self._call(func, args, kwargs)
        other_memory = name == "set_" and (len(tensors) < 2 or not all(map(is_meta, tensors)))
        if other_memory or name in ("resize_", "resize_as_"):
            self.refuse(f"it calls Tensor.{name}")
        if torch.Tag.inplace_view in func.tags:  # another view of the same storage, such as t_()
            return func(*args, **kwargs)
        if any(not tensor.is_meta for tensor in written_by(func, args, kwargs)):  # to a tensor that is built as usual
            places = tree_map(lambda leaf: Place.of(leaf) if is_meta(leaf) else leaf, (args, kwargs))
            return self._call(func, *self._given(places, self._present))
        return self._record(func, name, args, kwargs)

    def _makes_large_tensor(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not takes(func, "device"):
            return False
        try:
            made = func(*args, **on_meta(func, kwargs))
        except (NotImplementedError, RuntimeError):
            return False
        return isinstance(made, torch.Tensor) and made.nbytes > self._small

    def _record(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        before = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.is_meta}
        places, places_by_name = tree_map(self._place, (args, kwargs))
        step = Step(func, places, places_by_name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            step.draws = generator, generator.get_state()
        out, values = self._outputs(step, args, kwargs)
        made = tree_leaves(out)
        if not tensors_in(out):
            return out
        for tensor in tensors_in(out):
            self._storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        for leaf in made:
            place = Place.of(leaf) if isinstance(leaf, torch.Tensor) else None
            step.new.append(place if place and place.storage not in before else None)
        written = {tensor.untyped_storage()._cdata for tensor in written_by(func, args, kwargs)}
        changed = written | {place.storage for place in step.new if place}
        if name in _ALLOCATIONS or not changed:  # an allocation or a view
            return out
        if "device" in kwargs:
            step.kwargs["device"] = torch.device("cpu")
        if not tensors and takes(func, "dtype"):
            step.kwargs["dtype"] = made[0].dtype  # the default may be another one later
        self._note_reads(step, name)
        if values is None and (step.draws or step.reads <= self._kept.keys()):
            values = self._call(func, *self._given((step.args, step.kwargs), self._target(step)))
        for key in changed:
            self._writers.setdefault(key, []).append(len(self._steps))
        self._steps.append(step)
        if values is None:
            for key in written:
                self._kept.pop(key, None)
        else:
            self._store(step, values, self._kept)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return out

    def _outputs(self, step: Step, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return what an operation returns, on the meta device, and its values if they were computed for that.

        Many operations import sympy for seconds when they first run on the meta device.
        """
        func, name = step.function, step.function.overloadpacket.__name__
        if name in _PLAIN_FILLS:
            return args[0], None
        at_hand = all(place.storage in self._kept for place in places_in((step.args, step.kwargs)))
        in_place = name.endswith("_")
        makes_new = all(returned.alias_info is None for returned in func._schema.returns)
        if not at_hand or not (in_place or makes_new) or name in _ALLOCATIONS:
            with suppress(NotImplementedError, RuntimeError):  # it depends on values, or does not support meta
                args, kwargs = tree_map(lambda leaf: leaf.to("meta") if is_tensor(leaf) else leaf, (args, kwargs))
                return func(*args, **on_meta(func, kwargs)), None
        values = self._call(func, *self._given((step.args, step.kwargs), self._present))
        if in_place:
            return args[0], values
        return tree_map(lambda leaf: without_values(leaf) if is_tensor(leaf) else leaf, values), values

    def _note_reads(self, step: Step, name: str) -> None:
        step.reads = {place.storage for place in places_in((step.args, step.kwargs))}
        if name not in _FILLS:
            return
        target = step.args[0]
        others = {place.storage for place in places_in((step.args[1:], step.kwargs))}
        whole = torch.empty(0, dtype=target.dtype, device="meta").itemsize * target.size.numel()
        if target.storage not in others and whole == self._storages[target.storage].nbytes():
            step.reads, step.fills = others, target.storage

    def _place(self, leaf: Any) -> Any:
        """Return a tensor's place. Of a tensor that is built as usual, return a copy: it may change."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Place.of(leaf) if leaf.is_meta else leaf.detach().to("cpu", copy=True)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation on tensors with values. If it draws, the other generator draws as much."""
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if draws and self.own_state is not None:
            copies = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            with in_state(torch.default_generator, self.own_state):
                func(*copies[0], **copies[1])
                self.own_state = torch.default_generator.get_state()
            del copies
        return func(*args, **kwargs)

    # ------------------------------------------------------------------ values

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.busy = before

    def _given(self, arguments: Any, storage_of: Callable[[int], torch.UntypedStorage]) -> Any:
        """Return arguments with tensors in place of places."""
        return tree_map(
            lambda leaf: leaf.view(storage_of(leaf.storage)) if isinstance(leaf, Place) else leaf, arguments
        )

    def _target(self, step: Step) -> Callable[[int], torch.UntypedStorage]:
        """Return how a step finds its storages while the model is built."""
        if step.fills and step.fills not in self._kept:
            self._kept[step.fills] = self._empty(step.fills)
        return self._present

    def _present(self, key: int) -> torch.UntypedStorage:
        """Return a storage with the values that it has after all steps so far."""
        if key not in self._kept:
            self._kept[key] = self._replay(key)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _empty(self, key: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(self._storages[key].nbytes())

    def _store(self, step: Step, values: Any, storages: dict[int, torch.UntypedStorage]) -> None:
        """Put the new tensors that a step has computed into ``storages``."""
        for place, value in zip(step.new, tree_leaves(values), strict=True):
            if place is None:
                continue
            if (value.dtype, value.stride(), value.storage_offset()) == (place.dtype, place.stride, place.offset):
                storages[place.storage] = value.untyped_storage()
            else:  # the operation lays out its output differently on the meta device
                place.view(storages.setdefault(place.storage, self._empty(place.storage))).copy_(value)

    def _replay(self, key: int) -> torch.UntypedStorage:
        """Repeat the steps that the values of a storage depend on."""
        chosen = sorted(self._needed(key))
        last = {used: index for index in chosen for used in self._steps[index].uses()}
        live: dict[int, torch.UntypedStorage] = {}

        def storage_of(key: int) -> torch.UntypedStorage:
            return live[key] if key in live else live.setdefault(key, self._empty(key))

        for index in chosen:
            step = self._steps[index]
            args, kwargs = self._given((step.args, step.kwargs), storage_of)
            with in_state(*step.draws) if step.draws else nullcontext():
                self._store(step, step.function(*args, **kwargs), live)
            del args, kwargs
            for used in [used for used in live if last[used] <= index and used != key]:
                del live[used]
        return storage_of(key)

    def _needed(self, key: int) -> set[int]:
        """Return the steps that the values of a storage depend on."""
        chosen: set[int] = set()
        seen: set[tuple[int, int]] = set()  # storages, and steps that write to them
        todo = [(key, len(self._steps))]
        while todo:
            key, end = todo.pop()
            for index in reversed(self._writers.get(key, [])):
                if index >= end:
                    continue
                if (key, index) in seen:
                    break
                seen.add((key, index))
                step = self._steps[index]
                if index not in chosen:
                    chosen.add(index)
                    todo += [(read, index) for read in step.reads if read != key]
                if step.fills == key:
                    break
        return chosen


class _Functions(TorchFunctionMode):
    """Makes recorded tensors look as if they were on the CPU, and answers what reads their values."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if self._recording.busy or not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return func(*args, **kwargs)
        if func in _ON_CPU:
            return _ON_CPU[func]
        if func in _READS:
            result = func(self._recording.value(Place.of(tensor)).clone(), *args[1:], **kwargs)
            if func is not _T.tolist:
                result.flags.writeable = False  # the tensor would not change with the array
            return result
        if func in (_T.cpu, _T.cuda):  # values are moved when they are computed
            return tensor
        if func is _T.to:
            kwargs = {name: "meta" if name == "device" else value for name, value in kwargs.items()}
            return func(tensor, *(_on_no_device(value) for value in args[1:]), **kwargs)
        if func in _REFUSED:
            self._recording.refuse(f"it calls Tensor.{func.__name__}")
        return func(*args, **kwargs)


_ON_CPU: dict[Any, Any] = {
    _T.is_meta.__get__: False,  # type: ignore[attr-defined]
    _T.is_cpu.__get__: True,  # type: ignore[attr-defined]
    _T.device.__get__: torch.device("cpu"),
}


def _on_no_device(value: Any) -> Any:
    """Return an argument of ``Tensor.to`` without the device that it asks for."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return "meta" if isinstance(value, torch.device | str) or type(value) is int else value
