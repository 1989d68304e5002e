"""``StepDigests``: the hook that takes digests of everything in some steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...hooks.base import HookBase
from ...hooks.common.batches import convert
from ...hooks.common.digest import digest, read_digests
from ...hooks.common.models import unwrap_model
from ...hooks.common.tensors import local_part
from ...hooks.control.interruption import EXIT_AGAIN
from ...hooks.writers.fingerprints import state_digests

__all__ = ["StepDigests"]


class StepDigests(HookBase):
    """Takes digests of some steps: of the batch, each module's output, the losses, each parameter's gradient, and the
    state after the step; and of the state before the first of these steps. Training stops after the last one.

    Args:
        first, last: iterations.
        keep: numbers of entries whose tensors are kept.

    Attributes:
        entries: (iteration, kind, name, digest) in the order of the steps. Kinds: "batch", "output", "loss",
            "gradient", "state".
        kept: the tensors of the entries in ``keep``, on the CPU.
        samples: the indices of the samples in each step's batch, by iteration, if the data has indices.
        error: the error of a step; empty: none.
    """

    def __init__(self, first: int, last: int, keep: Sequence[int] = ()) -> None:
        self._first, self._last, self._keep = first, last, set(keep)
        self._inside = False  # a step that is recorded, not an evaluation after it
        self._handles: list[Any] = []
        self._pending: list[tuple[int, str, str, torch.Tensor]] = []
        self.entries: list[tuple[int, str, str, str]] = []
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.samples: dict[int, list[int]] = {}
        self.error = ""

    def before_step(self) -> None:
        if self.trainer.iter != self._first:
            return
        for name, module in unwrap_model(self.trainer.model).named_modules():
            self._handles.append(
                module.register_forward_hook(self._watch(f"{name or 'model'} ({type(module).__name__})"))
            )
        self._add_state(self._first - 1)

    def after_fetch(self, batch: Any) -> None:
        self._inside = self._records()
        if self._inside:
            self._add("batch", "", batch)
            if self.uses_indices:
                self.samples[self.trainer.iter] = [int(index) for index in self.trainer.sample_indices]

    def after_forward(self, batch: Any, outputs: Any) -> None:
        if self._records():
            for name, loss in outputs.items():
                self._add("loss", name, loss)

    def before_optimizer_step(self) -> None:
        if self._records():  # in the order of the backward pass
            for name, parameter in reversed(list(unwrap_model(self.trainer.model).named_parameters())):
                if parameter.grad is not None:
                    self._add("gradient", name, parameter.grad)

    def after_step(self) -> None:
        self._inside = False
        if self._records():
            self._add_state(self.trainer.iter)
            self._read()
        if self.trainer.iter >= self._last:
            self.trainer.request_stop("the steps were replayed", exit_code=EXIT_AGAIN)

    def on_exception(self, error: BaseException) -> None:
        self.error = f"iteration {self.trainer.iter}: {type(error).__name__}: {error}"
        self._read()

    def after_train(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _records(self) -> bool:
        return self._first <= self.trainer.iter <= self._last

    def _watch(self, name: str) -> Any:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._inside:
                self._add("output", name, output)

        return see

    def _add_state(self, iteration: int) -> None:
        self._pending += [(iteration, "state", name, value) for name, value in state_digests(self.trainer).items()]

    def _add(self, kind: str, name: str, value: Any) -> None:
        number = len(self.entries) + len(self._pending)
        if number in self._keep:
            found: list[torch.Tensor] = []
            convert(value, lambda one: found.append(one) if isinstance(one, torch.Tensor) else None)
            self.kept[number] = [local_part(one.detach()).cpu().clone() for one in found]
        self._pending.append((self.trainer.iter, kind, name, digest(value)))

    def _read(self) -> None:
        values = read_digests([value for *_, value in self._pending])
        for (iteration, kind, name, _), value in zip(self._pending, values, strict=True):
            self.entries.append((iteration, kind, name, value))
        self._pending = []
