"""FLOPs per second and model FLOPs utilization (MFU)."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base import HOOK_REGISTRY, HookBase
from ..common.rng import gpus_of, preserve_rng
from ..event_storage import EventStorage
from .throughput import Window

__all__ = ["FlopsCounter", "known_peak"]

logger = logging.getLogger(__name__)

_PEAK_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("RTX A6000", 155e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Dense bfloat16 (V100, T4: float16) operations per second by words in a device's name, from NVIDIA's data sheets."""


@HOOK_REGISTRY.register()
class FlopsCounter(HookBase):
    """Puts the floating-point operations per second of this process, and their share of the device's peak (MFU).

    The operations of a step are counted once, in a forward pass of the first (micro-)batch, by torch's
    ``FlopCounterMode``: matrix products, convolutions and attention; a multiply-add is two operations. The backward
    pass counts as two forward passes, so frozen layers are overcounted. If the forward pass fails, nothing is counted.
    Recomputed activations do not count (Chowdhery et al., "PaLM", 2022, appendix B). All batches are assumed to have
    the shape of the first.

    The counting forward pass has no side effects: buffers, attributes, random states and metrics are restored.

    Acts in the first ``before_forward``, then when metrics are written. Puts ``flops_per_s`` (over wall-clock time,
    like :class:`Throughput`), ``total_flops`` (of all ranks since the run began, also after a resume) and, if the peak
    is known, ``mfu`` between 0 and 1. Saves the iteration of its last report, the total, and the operations of a step,
    which a resume counts again only if the length of an epoch or the number of ranks has changed.

    Args:
        peak_flops: peak operations per second of one device. None: the dense bfloat16 peak, known for common GPUs.
        period: minimum number of steps between two reports.

    Attributes:
        flops: operations per step of this process; None before the first step, or if they cannot be counted.
    """

    single = True

    def __init__(self, peak_flops: float | None = None, period: int = 20) -> None:
        self._given_peak = peak_flops
        self._window = Window(period)
        self._counted = False
        self._counted_for: list[int | None] = []  # iterations of an epoch, and ranks
        self.flops: float | None = None
        self._total = 0.0  # of all ranks, before iteration _since
        self._since: int | None = None  # None: no step has been counted since the total was loaded

    def before_train(self) -> None:
        trainer: Any = self.trainer
        self._peak = self._given_peak or known_peak(_device(trainer.model))
        self._window.begin(trainer.start_iter)
        setting = [trainer.iters_per_epoch, trainer.comm.get_data_size()]
        self._counted = self._counted and setting == self._counted_for
        self._counted_for = setting
        self._total, self._since = self._total_before(trainer.start_iter), trainer.start_iter

    def _total_before(self, iteration: int) -> float:
        if self.flops is None or self._since is None:
            return self._total
        return self._total + self.flops * self.trainer.comm.get_data_size() * max(iteration - self._since, 0)

    def before_forward(self, batch: Any) -> None:
        if self._counted:
            return
        self._counted = True
        trainer: Any = self.trainer
        forward = getattr(trainer, "forward", trainer.model)
        parts = getattr(trainer, "accumulation_steps", 1)
        with _restored(trainer.model), EventStorage(trainer.iter):
            count = _count_forward(lambda: forward(batch))
        self._window.start(trainer.iter)  # the window does not include the counting
        if count is None:
            return
        trained = any(parameter.requires_grad for parameter in trainer.model.parameters())
        self.flops = count * (3 if trained else 1) * parts
        peak = f"peak of the device: {self._peak:.3g}/s" if self._peak else "no MFU: give peak_flops"
        logger.info("One step takes %.4g FLOPs (%s)", self.flops, peak)

    def before_write(self) -> None:
        if self.flops is None:
            return
        steps, seconds = self._window.end(self.trainer)
        if not steps:
            return
        total = self._total_before(self.trainer.finished_iter + 1)
        values = {"flops_per_s": self.flops * steps / seconds, "total_flops": total}
        if self._peak:
            values["mfu"] = values["flops_per_s"] / self._peak
        self.trainer.storage.put_scalars(smoothing_hint=False, cur_iter=self.trainer.finished_iter, **values)

    def state_dict(self) -> dict[str, Any]:
        total = self._total if self._since is None else self._total_before(self.trainer.finished_iter + 1)
        counted = {"flops": self.flops, "counted_for": self._counted_for} if self._counted else {}
        return {**self._window.state_dict(), "total": total, **counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._window.load_state_dict(state_dict)
        self._total, self._since = state_dict.get("total", 0.0), None
        self._counted_for, self.flops = state_dict.get("counted_for", []), state_dict.get("flops")
        self._counted = bool(self._counted_for)

    def reset_state(self) -> None:
        self._total, self._since = 0.0, None


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def known_peak(device: torch.device) -> float | None:
    """Return the peak of a known GPU; None for other devices and for a part of a GPU (MIG)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\bMIG\b", name):
        return None
    return next((peak for words, peak in _PEAK_FLOPS if re.search(rf"\b{words}\b", name)), None)


def _count_forward(forward: Callable[[], Any]) -> int | None:
    """Return the operations of ``forward()``; None, with a warning, if it fails."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    missing = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    # No gradients: DDP would wait for a backward pass. No compiled code: it cannot be counted.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            with FlopCounterMode(display=False, custom_mapping=missing) as counter:
                forward()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            logger.warning("The model's FLOPs cannot be counted: %s: %s", type(error).__name__, reason)
            return None
    return counter.get_total_flops()


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and attributes, and all random states, after the context."""
    attributes = [(place, dict(place)) for module in model.modules() for place in (module.__dict__, module._buffers)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with preserve_rng(gpus_of(model)):
            yield
    finally:
        for place, before in attributes:
            place.clear()
            place.update(before)
        with torch.no_grad():
            for buffer, before_it in buffers:
                buffer.copy_(before_it)
