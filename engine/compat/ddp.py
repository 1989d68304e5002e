"""A model over several processes, by detectron2's function."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import comm

__all__ = ["create_ddp_model"]


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
