"""``StepRecorder``: the hook that measures one step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...hooks.base import HookBase
from ...hooks.builtin.interruption import EXIT_RESUMABLE
from ...hooks.common import local_part, unwrap_model
from ..evaluation.evaluator import Batch, Outputs

Report = dict[str, Any]
"""What was recorded of a step, or of a part of it: plain data, by name."""


class StepRecorder(HookBase):
    """Records a step: samples, losses, the outputs and gradients of each module, and the updates of the weights.

    Register it when the step begins. Training stops after the step.

    Args:
        iteration: the step.

    Attributes:
        report: what was recorded, as plain data.
    """

    uses_outputs = True

    def __init__(self, iteration: int) -> None:
        self._handles: list[RemovableHandle] = []
        self._modules: dict[str, Report] = {}
        self._before: list[torch.Tensor] = []
        self.report: Report = {"iteration": iteration, "samples": [], "losses": {}, "modules": []}

    # ------------------------------------------------------------------ the step

    def before_train(self) -> None:
        for name, module in unwrap_model(self.trainer.model).named_modules():
            self._handles.append(module.register_forward_hook(self._watch(name or "(model)")))

    def after_fetch(self, batch: Batch) -> None:
        self._note_samples(batch)
        if tensors := [one for one in _tensors(batch) if one.numel()]:
            self.report["batch"] = statistics(tensors)

    def after_forward(self, batch: Batch, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, loss in outputs.items():
            self.report["losses"].setdefault(name, []).append(float(loss.detach()))

    def before_optimizer_step(self) -> None:
        self._before = [local_part(p.detach()).clone() for p in self._parameters()]

    def after_optimizer_step(self) -> None:
        updates = []
        names = {id(p): name for name, p in unwrap_model(self.trainer.model).named_parameters()}
        for parameter, before in zip(self._parameters(), self._before, strict=True):
            weight = float(before.float().norm())
            update = float((local_part(parameter.detach()).float() - before.float()).norm())
            name = names.get(id(parameter), "(not in the model)")
            ratio = update / weight if weight else (math.inf if update else 0.0)
            updates.append({"parameter": name, "weight": weight, "update": update, "ratio": ratio})
        self.report["updates"] = sorted(updates, key=lambda row: -row["ratio"])

    def after_step(self) -> None:
        self._end()
        self.trainer.request_stop("the step was replayed", exit_code=EXIT_RESUMABLE)

    def on_exception(self, error: BaseException) -> None:
        self.report["error"] = f"{type(error).__name__}: {error}"
        self.report["notes"] = list(getattr(error, "__notes__", ()))
        if not self.report["samples"]:
            self._note_samples(None)  # the batch could not be read
        self._end()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.report["modules"] = list(self._modules.values())
        self.report["first_nonfinite"] = self._first_nonfinite()

    # ------------------------------------------------------------------ parts

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.trainer.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _watch(self, name: str) -> Callable[[nn.Module, object, Outputs], None]:
        def see(module: nn.Module, inputs: object, output: Outputs) -> None:
            entry = self._modules.setdefault(name, {"module": name, "type": type(module).__name__})
            tensors = [one for one in _tensors(output) if one.is_floating_point()]
            if not tensors:
                return
            entry["output"] = statistics(tensors)
            for tensor in tensors[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: entry.update(gradient=statistics([gradient])))

        return see

    def _note_samples(self, batch: Batch) -> None:
        """Note the indices of the step, which each of its micro-batches has, and what a whole batch has of each."""
        trainer = self.trainer
        try:
            indices = list(trainer.sample_indices)
        except AttributeError as error:
            self.report["samples_unknown"] = str(error)
            return
        dataset = getattr(trainer.data_loader, "dataset", None)
        describe = getattr(dataset, "describe", None)
        self.report["samples"] = [
            {"index": index, **({"is": str(describe(index))} if describe else {})} for index in map(int, indices)
        ]
        for tensor in _tensors(batch):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(indices):  # not of a micro-batch
                for sample, values in zip(self.report["samples"], tensor, strict=True):
                    sample["sum"] = sample.get("sum", 0.0) + float(values.double().sum())
                    if bad := int((~values.isfinite()).sum()):
                        sample["nonfinite"] = bad

    def _first_nonfinite(self) -> dict[str, str] | None:
        """Return the first module, in the order of the forward pass, with a NaN or an infinity in its output; or, if
        there is none, the first in the backward pass with one in its gradient."""
        entries = [entry for entry in self._modules.values() if "output" in entry]
        for kind, order in (("output", entries), ("gradient", entries[::-1])):
            for entry in order:
                values = entry.get(kind)
                if values and values["nan"] + values["inf"]:
                    return {"module": entry["module"], "type": entry["type"], "what": kind}
        return None


def _tensors(value: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def statistics(tensors: Sequence[torch.Tensor]) -> Report:
    """Return shape, min, max, mean and norm of the finite values, the share of zeros, and the numbers of NaN and
    infinities.

    Args:
        tensors: their values count together, the shape is the first one's.
    """
    values = torch.cat([local_part(tensor.detach()).double().flatten() for tensor in tensors])
    finite = values[values.isfinite()]
    row: Report = {"shape": list(tensors[0].shape)}
    row |= dict.fromkeys(("min", "max", "mean", "norm", "zeros"))
    if finite.numel():
        row |= {name: float(getattr(finite, name)()) for name in ("min", "max", "mean", "norm")}
        row["zeros"] = float((finite == 0).double().mean())
    return row | {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
