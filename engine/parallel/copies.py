"""Weights that all ranks, or some of them, have copies of: sharing those of rank 0, and comparing them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...hooks.common import local_part, unwrap_model
from .. import comm


def share_weights(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, except for those without values.

    Raises:
        ConfigError: the models of the ranks differ.
    """
    if comm.get_world_size() == 1:
        return
    named = [(name, one) for name, one in (*model.named_parameters(), *model.named_buffers()) if not is_lazy(one)]
    mine = {
        name: f"{tuple(one.shape)} {one.dtype}{'' if one.requires_grad else ' without gradient'}" for name, one in named
    }
    first = comm.broadcast_object(mine)
    differing = (name for name in {**first, **mine} if first.get(name) != mine.get(name))
    texts = (f"{name} is {mine.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}" for name in differing)
    for rank, text in enumerate(comm.all_gather(next(texts, ""))):
        if text:
            raise ConfigError(f"rank {rank} has built another model than rank 0: {text}. Build the same on all ranks")
    share_tensors(one for _, one in named if not one.is_meta)


@torch.no_grad()
def share_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's tensors, of any dtype and memory format, to all ranks."""
    for tensor in tensors:
        raw = tensor.contiguous()  # a copy for other memory formats
        group = comm.object_group() if raw.device.type == "cpu" else None  # NCCL sends from GPUs only
        dist.broadcast(raw.view(-1).view(torch.uint8), 0, group)  # gloo and NCCL do not support all dtypes
        if raw is not tensor and not torch.equal(raw, tensor):  # expanded tensors are read-only
            tensor.copy_(raw)


def check_same_weights(strategy: Any, model: nn.Module, iteration: int) -> None:
    """Check that the ranks that have copies of weights (DDP; HSDP within each shard) have the same. All ranks call it.

    Buffers, frozen parameters and those that DDP ignores may differ. A strategy whose ranks have weights of their own,
    or that makes them equal before a save, is not checked.

    Raises:
        RuntimeError: they differ by more than rounding. All ranks raise it.
    """
    if not strategy.same_state_on_all_ranks or strategy.overridden("before_save"):
        return
    inner = unwrap_model(model)
    ignored = getattr(inner, "_ddp_params_and_buffers_to_ignore", ())
    named = {name: one for name, one in inner.named_parameters() if not is_lazy(one)}
    mesh, group = getattr(next(iter(named.values()), None), "device_mesh", None), None
    if mesh is not None and "replicate" in (mesh.mesh_dim_names or ()):
        group = mesh.get_group("replicate")
    elif mesh is not None or not isinstance(model, DistributedDataParallel):
        return
    trained = {name: one for name, one in named.items() if one.requires_grad and name not in ignored}
    if differing := differing_copies(trained, group):
        raise RuntimeError(
            f"the ranks' weights have drifted apart: after iteration {iteration} {differing[0]}. Nothing is saved. "
            "Change weights, gradients and optimizer settings on all ranks in the same way. If ranks train weights of "
            "their own, set same_state_on_all_ranks to False in a strategy"
        )


@torch.no_grad()
def differing_copies(weights: Mapping[str, torch.Tensor], group: "dist.ProcessGroup | None") -> list[str]:
    """Return which weights differ between the ranks of a group, which have copies of them. All ranks call it.

    Args:
        weights: the weights by name; of a sharded one, this rank's part is compared.
        group: the process group of this rank and its copies. All such groups compare their own at the same time.

    Returns:
        A text for each difference above 0.1 % of the weight's largest value, the same on all ranks.
    """
    source = dist.get_process_group_ranks(group)[0]
    differing = []
    for name, weight in weights.items():
        local = local_part(weight)
        first = local.contiguous().clone()
        dist.broadcast(first.view(-1).view(torch.uint8), src=source, group=group)
        most = (local - first).abs().max().item() if local.numel() else 0.0
        if most > 1e-3 * first.abs().max().item():
            differing.append(f"rank {comm.get_rank()} has another {name} than rank {source} (by up to {most:.3g})")
    return [text for texts in comm.all_gather(differing) for text in texts]
