"""Functions of ``detectron2.engine.defaults``."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...hooks import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from .. import comm


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


def default_writers(output_dir: str, max_iter: int | None = None) -> Sequence[EventWriter]:
    """Return writers for the console, ``metrics.json`` and TensorBoard.

    Args:
        output_dir: folder of the files.
        max_iter: the total number of iterations, for the ETA.
    """
    return [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json")),
        TensorboardXWriter(output_dir=output_dir),
    ]


def _highlight(code: str, filename: str) -> str:
    """Return YAML or Python code for a terminal: unchanged, since hookline does not color it."""
    return code


def _try_get_key(cfg: object, *keys: str, default: object = None) -> Any:
    """Return the value of the first of some full keys, such as ``"train.seed"``, that a config of any kind has."""
    for key in keys:
        value = cfg
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else _MISSING
        if value is not _MISSING:
            return value
    return default


_MISSING = object()
