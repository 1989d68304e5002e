"""The strategy that copies a model to each rank: torch's DistributedDataParallel."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import comm
from .base import STRATEGY_REGISTRY, Strategy
from .copies import share_tensors

# Newer versions of torch renamed the argument.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _BUFFERS = "broadcast_buffers"


@dataclass(eq=False)
@STRATEGY_REGISTRY.register(name="auto")  # with one process, build_strategy() uses "none"
@STRATEGY_REGISTRY.register(name="ddp")
class DDP(Strategy):
    """Every rank has the whole model; gradients are averaged (torch's DistributedDataParallel).

    Args:
        find_unused_parameters: find parameters that the losses do not depend on, in every step. It takes time, and is
            needed only if these parameters differ from step to step.
        static_graph: every step uses the same parameters in the same order. DDP then finds unused parameters in the
            first step, and all forms of activation checkpointing work.
        broadcast_buffers: copy rank 0's buffers, such as running means, to all ranks before each forward pass.
        gradient_as_bucket_view: gradients are views of the communication buckets, which saves memory.
        bucket_cap_mb: size of a bucket; None: torch's default.
        compression: send gradients as float16 or bfloat16, which halves the traffic and lowers the precision.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: int | None = None
    compression: Literal["none", "fp16", "bf16"] = "none"

    averages = True
    _graph_seen = False

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if comm.get_world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options: dict[str, Any] = {_BUFFERS: self.broadcast_buffers}
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            **options,
        )
        if self.compression != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook: Any = getattr(default_hooks, f"{self.compression}_compress_hook")
            # DDP refuses torch's bfloat16 hook without NCCL, although gloo supports it; not a lambda around it.
            wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if self.static_graph and not self._graph_seen:
            # DDP learns the graph in a pass with an exchange. Averaging the same gradients twice does not change them.
            self._graph_seen = True
            return nullcontext()
        return model.no_sync()

    def before_evaluation(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            share_tensors(model.module.buffers())  # a checkpoint has rank 0's buffers


def create_ddp_model(model: nn.Module, *, fp16_compression: bool = False, **kwargs: Any) -> nn.Module:
    """Wrap a model for several processes, for training loops of one's own. DefaultTrainer does it by itself.

    Args:
        model: the model, on this rank's device.
        fp16_compression: send gradients as float16.
        **kwargs: other arguments of DistributedDataParallel.

    Returns:
        The model itself in a single process, otherwise a DistributedDataParallel.
    """
    if comm.get_world_size() == 1:
        return model
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "cuda":
        kwargs.setdefault("device_ids", [device.index])
    wrapped = DistributedDataParallel(model, **kwargs)
    if fp16_compression:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped
