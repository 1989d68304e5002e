"""FLOPs per second and model FLOPs utilization (MFU)."""

import logging
import re
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..base import HOOK_REGISTRY, HookBase

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


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


_MISSING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


@HOOK_REGISTRY.register()
class FlopsCounter(HookBase):
    """Puts the floating-point operations per second of this process, and their share of the device's peak (MFU).

    The operations of a step are counted once in a run, in the forward pass of the first (micro-)batch, by torch's
    ``FlopCounterMode``: matrix products, convolutions and attention; a multiply-add is two operations. A compiled model
    runs this pass without its compiled code. The backward pass counts as two forward passes, so frozen layers are
    overcounted. Recomputed activations do not count (Chowdhery et al., "PaLM", 2022, appendix B). All batches are
    assumed to have the shape of the first.

    Acts around the first forward pass, then when metrics are written. Puts ``flops_per_s`` (over wall-clock time,
    like :class:`Throughput`), ``total_flops`` (of all ranks since the run began, also after a resume) and, if the peak
    is known, ``mfu`` between 0 and 1. Saves the total and the count, which a resume makes again only if the length of
    an epoch or the number of ranks has changed.

    Args:
        peak_flops: peak operations per second of one device. None: the dense bfloat16 peak, known for common GPUs.

    Attributes:
        flops: operations per step of this process; None before the first step, or if they cannot be counted.
    """

    single = True

    def __init__(self, peak_flops: float | None = None) -> None:
        self._given_peak = peak_flops
        self._counted = False
        self._counting = ExitStack()
        self.flops: float | None = None
        self._counted_for: list[int | None] = []  # iterations of an epoch, and ranks
        self._before = 0.0  # the total of all ranks before iteration _since
        self._since: int | None = None

    def before_train(self) -> None:
        trainer = self.trainer
        parameter = next(trainer.model.parameters(), None)
        self._peak = self._given_peak or known_peak(torch.device("cpu") if parameter is None else parameter.device)
        setting = [trainer.iters_per_epoch, trainer.comm.get_data_size()]
        self._counted = self.flops is not None and setting == self._counted_for
        self.flops, self._counted_for = self.flops if self._counted else None, setting
        self._first = self._since = trainer.start_iter
        self._start = time.perf_counter()

    def before_forward(self, batch: object) -> None:
        if self._counted:
            return
        # Compiled code cannot be counted.
        self._counting.enter_context(torch.compiler.set_stance("force_eager"))
        self._counter = self._counting.enter_context(FlopCounterMode(display=False, custom_mapping=_MISSING))

    def after_forward(self, batch: object, outputs: object) -> None:
        if self._counted:
            return
        self._counting.close()
        self._counted = True
        trainer = self.trainer
        self._first, self._start = trainer.iter, time.perf_counter()
        trained = any(parameter.requires_grad for parameter in trainer.model.parameters())
        count = self._counter.get_total_flops()
        self.flops = count * (3 if trained else 1) * getattr(trainer, "accumulation_steps", 1)
        peak = f"peak of the device: {self._peak:.3g}/s" if self._peak else "no MFU: give peak_flops"
        logger.info("One step takes %.4g FLOPs (%s)", self.flops, peak)

    def after_train(self) -> None:
        self._counting.close()  # if the forward pass failed

    def before_write(self) -> None:
        done = self.trainer.finished_iter + 1
        if self.flops is None or done <= self._first:
            return
        now = time.perf_counter()
        rate = self.flops * (done - self._first) / max(now - self._start, 1e-9)
        self._first, self._start = done, now
        values = {"flops_per_s": rate, "total_flops": self._total()}
        if self._peak:
            values["mfu"] = rate / self._peak
        self.trainer.storage.put_scalars(smoothing_hint=False, cur_iter=done - 1, **values)

    def _total(self) -> float:
        if self.flops is None or self._since is None:
            return self._before
        steps = max(self.trainer.finished_iter + 1 - self._since, 0)
        return self._before + self.flops * steps * self.trainer.comm.get_data_size()

    def after_run(self) -> None:
        self._before, self._since = self._total(), self.trainer.finished_iter + 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self._total(), "flops": self.flops, "counted_for": self._counted_for}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before, self._since = state_dict["total"], None
        self.flops, self._counted_for = state_dict.get("flops"), state_dict.get("counted_for", [])

    def reset_state(self) -> None:
        self._before, self.flops = 0.0, None


def known_peak(device: torch.device) -> float | None:
    """Return the peak of a known GPU; None for other devices and for a part of a GPU (MIG)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\bMIG\b", name):
        return None
    return next((peak for words, peak in _PEAK_FLOPS if re.search(rf"\b{words}\b", name)), None)
