"""The strategy that shards a model over ranks: torch's FSDP2."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ...config import ConfigError
from ...hooks.common import describe_no_match, gathered, is_sharded, matches
from .. import comm
from .base import STRATEGY_REGISTRY, Strategy
from .copies import share_tensors, share_weights
from .meta_init import Places, places_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_Dtype = Literal["", "float32", "bfloat16", "float16"]


@dataclass(eq=False, kw_only=True)
@STRATEGY_REGISTRY.register(name="fsdp2")
class FSDP2(Strategy):
    """Each rank has a shard of each parameter, its gradient and its optimizer state (torch's ``fully_shard``).

    The model is split into units. The parameters of a unit are gathered before it is computed and freed afterwards, so
    a rank holds its shards and one or two whole units. The rest of the model is one more unit. Tied parameters stay
    tied: a submodule that shares a parameter with a module outside of it is not a unit; its parameters belong to the
    unit around it. Parameters are sharded in row-major order, so ``MODEL.CHANNELS_LAST`` has no effect.

    Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277.

    Args:
        modules: the submodules that are units, by name ("blocks.*") or class ("TransformerBlock"). Empty: innermost
            submodules with at least ``min_params`` parameters.
        min_params: see ``modules``. Small units send many small messages; large units save less memory.
        param_dtype: "bfloat16" or "float16": gather and compute in this dtype; the optimizer keeps full precision.
            Empty: the dtype of the parameters.
        reduce_dtype: sum gradients in this dtype. Empty: ``param_dtype``.
        reshard_after_forward: free a unit's parameters after the forward pass, and gather them again for the backward
            pass. The last unit, the rest of the model, keeps its parameters: the backward pass begins with it. False:
            all keep them (more memory, less traffic). A number: keep them sharded over this number of ranks only.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        init: "cpu": each rank builds the model in host memory, and weights are those of one process. "meta": for models
            that no machine holds; shards get the values of each module's ``reset_parameters()``.
    """

    modules: Sequence[str] = ()
    min_params: int = 100_000
    param_dtype: _Dtype = ""
    reduce_dtype: _Dtype = ""
    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    init: Literal["cpu", "meta"] = "cpu"

    averages = True
    shards_weights = True

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        return 1, ranks, 1

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if comm.get_world_size() == 1:
            logger.info("PARALLEL.NAME: fsdp2 does not shard the model, as there is a single process")
            return model
        from torch.distributed.device_mesh import DeviceMesh

        group = dist.group.WORLD
        assert group is not None  # there are several ranks
        share_weights(model)
        # init_device_mesh() may create another group, with torch's timeout.
        return self._shard(model, DeviceMesh.from_group(group, device.type), device)

    def _shard(self, model: nn.Module, mesh: "DeviceMesh", device: torch.device) -> nn.Module:
        """Shard a model, the same on all ranks, over a mesh: (shard) or (replicate, shard)."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        units = self._units(model)
        others = [parameter for parameter in model.parameters() if not parameter.is_contiguous()]
        if others:
            logger.warning("PARALLEL.NAME: fsdp2 shards in row-major order: MODEL.CHANNELS_LAST has no effect")
        for parameter in others:
            parameter.data = parameter.data.contiguous()
        param_dtype = getattr(torch, self.param_dtype) if self.param_dtype else None
        reduce_dtype = getattr(torch, self.reduce_dtype) if self.reduce_dtype else None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype)}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        reshard = self.reshard_after_forward
        for unit in units:
            fully_shard(unit, reshard_after_forward=reshard, **options)
        fully_shard(model, reshard_after_forward=False if reshard is True else reshard, **options)
        for unit in (*units, model):
            unit.register_forward_hook(_reshard_without_backward)
        return model

    @property
    def _needs_shards(self) -> bool:
        """Whether there are options that only sharded models have."""
        return any((self.param_dtype, self.reduce_dtype, self.cpu_offload, self.init == "meta"))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        if not isinstance(model, FSDPModule):
            yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(
        self, clipper: Callable[[list[nn.Parameter]], torch.Tensor | None], parameters: list[nn.Parameter]
    ) -> torch.Tensor | None:
        norm: torch.Tensor | None = gathered(clipper(parameters))  # without synchronizing with the device
        return norm

    def before_evaluation(self, model: nn.Module) -> None:
        if comm.get_world_size() > 1:
            # Checkpoints have rank 0's buffers as well.
            share_tensors(buffer for buffer in model.buffers() if not is_sharded(buffer))

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Return the submodules that are units, inner ones first."""
        places, found = places_of(model), []
        unused, taken = set(self.modules), set[int]()
        for name, module in reversed(list(model.named_modules())[1:]):
            fitting = {pattern for pattern in self.modules if matches(pattern, name, module)}
            unused -= fitting
            sizes = {id(one): one.numel() for one in module.parameters() if id(one) not in taken}
            # A unit's parameters are gathered in its forward pass, and a list of modules has none.
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
            if not (fitting if self.modules else sum(sizes.values()) >= self.min_params and not is_list):
                continue
            if not _splits_tie(module, places):
                found.append(module)
                taken.update(sizes)
            elif fitting:
                logger.warning("PARALLEL.ARGS.modules: %s is no unit: it shares a parameter with another module", name)
        if unused:
            raise ConfigError(f"PARALLEL.ARGS.modules: {describe_no_match(model, min(unused))}")
        return found


def _reshard_without_backward(unit: nn.Module, inputs: object, output: object) -> None:
    """Free a unit's parameters after an evaluation. Otherwise the next forward pass would use them again, although the
    shards may have changed: averaged weights, for example, are put there for an evaluation only."""
    if not torch.is_grad_enabled():
        unit.reshard()  # type: ignore[operator]


def _splits_tie(unit: nn.Module, places: Places) -> bool:
    """Whether a parameter in ``unit`` is tied to one outside of it; ``fully_shard`` would break the tie."""
    inside = {id(module) for module in unit.modules()}
    return any(id(module) not in inside for one in unit.parameters() for module, _, _ in places[id(one)])
