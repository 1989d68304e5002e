"""Strategies for training one model on several processes."""

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...config import CfgNode, ConfigError, Registry
from ...config.components import Slot
from ...hooks.common import has_shards, local_part, unwrap_model
from .. import comm

__all__ = ["DDP", "STRATEGY_REGISTRY", "Strategy", "build_strategy", "check_parallel"]

logger = logging.getLogger(__name__)

# Newer versions of torch renamed the argument.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _BUFFERS = "broadcast_buffers"


class Strategy:
    """How several processes train one model. This base class exchanges nothing.

    A subclass is registered with :data:`STRATEGY_REGISTRY`. ``data_rank``, ``data_size`` and
    ``same_state_on_all_ranks`` may be properties or plain attributes.

    Attributes:
        averages: whether each rank has the mean of all ranks' gradients after a backward pass. Losses are then
            weighted so that this mean is the gradient of the loss over the global batch.
        shards_weights: whether :meth:`wrap` shards parameters. ``build_model`` then leaves the model in host memory.
        init: "meta": a :class:`DefaultTrainer` builds the model on torch's meta device, :meth:`wrap` gets it without
            values, and the shards get those of ``reset_parameters``.
    """

    averages: bool = False
    shards_weights: bool = False
    init: str = "cpu"

    @property
    def data_rank(self) -> int:
        """Which share of each global batch this rank computes. By default the rank.

        Ranks with the same number share a batch. Samplers, evaluations and seeds use it. With tensor parallelism over
        all ranks it is 0 on each rank, with groups of n neighbouring ranks it is ``rank // n``.
        """
        return comm.get_rank()

    @property
    def data_size(self) -> int:
        """The number of shares of a global batch. By default the number of ranks."""
        return comm.get_world_size()

    @property
    def same_state_on_all_ranks(self) -> bool:
        """Whether all ranks have the same state, except for shards. Otherwise a checkpoint cannot be resumed.

        By default true if gradients are averaged or all ranks compute the same batch. With local SGD, for example,
        the weights of ranks differ between two averages.
        """
        return self.averages or self.data_size == 1

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return over how many ranks the model is copied, sharded, and split by layers; the product is ``ranks``.

        Raises ConfigError if the strategy cannot train on this number of ranks.
        """
        return ranks, 1, 1

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Wrap the model for training. The optimizer is built from the returned module.

        Args:
            model: the model, on its device, or in host memory if the strategy ``shards_weights``. In a
                :class:`DefaultTrainer` all ranks have rank 0's weights.
                ``engine.checkpoint.unwrap_model`` must find it in the returned module.
            device: the device.
        """
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not exchange gradients: for all micro-batches but the last.

        Args:
            model: the return value of :meth:`wrap`.
        """
        return nullcontext()

    def clip(
        self, clipper: Callable[[list[nn.Parameter]], torch.Tensor | None], parameters: list[nn.Parameter]
    ) -> torch.Tensor | None:
        """Clip gradients. If ranks hold shards of a parameter, the norm covers all shards.

        Args:
            clipper: clips the gradients of a single process; see ``engine.solver.build_grad_clipper``.
            parameters: the parameters of the optimizer.

        Returns:
            The norm of the gradients, the same on all ranks, or None, as the clipper returns it.
        """
        return clipper(parameters)

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of ``losses`` to the parameters', and exchange them unless in :meth:`no_sync`.

        Args:
            losses: the scalar to differentiate, for float16 multiplied by the gradient scaler's scale.
        """
        losses.backward()

    def step(self, optimizer: Any) -> None:
        """Update the weights. Gradients are checked and clipped. An overridden method cannot be used with float16."""
        optimizer.step()

    def before_evaluation(self, model: nn.Module) -> None:
        """Make values that differ between ranks equal, such as running means, before an evaluation."""

    def checking(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for the evaluation of a few batches before training, to check the model's outputs in."""
        return nullcontext()

    def before_save(self, model: nn.Module, optimizer: Any) -> None:
        """Make values that differ between ranks equal before a periodic or final checkpoint. Called on all ranks."""

    def explain(self, error: Exception, model: nn.Module) -> Exception | None:
        """Return a clearer error for one that ``model`` raised in training, or None."""
        return None


STRATEGY_REGISTRY = Registry("STRATEGY", Strategy)
"""Strategies for ``PARALLEL.NAME``: subclasses of :class:`Strategy`, built with ``PARALLEL.ARGS``."""

STRATEGY_SLOT = Slot(STRATEGY_REGISTRY, "PARALLEL.NAME")

STRATEGY_REGISTRY.register(Strategy, name="none")


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
        sync_batch_norm: compute batch norm statistics over all ranks (on GPUs only).
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: int | None = None
    compression: Literal["none", "fp16", "bf16"] = "none"
    sync_batch_norm: bool = False

    averages = True
    _graph_seen = False

    def __post_init__(self) -> None:
        if self.find_unused_parameters and self.static_graph:
            raise ConfigError("DDP: static_graph finds unused parameters itself; leave find_unused_parameters out")

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if comm.get_world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        if self.sync_batch_norm:
            if device.type == "cpu":
                raise ConfigError("PARALLEL.ARGS.sync_batch_norm: torch's SyncBatchNorm works on GPUs only")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
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

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
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

    def explain(self, error: Exception, model: nn.Module) -> Exception | None:
        if "Expected to have finished reduction" not in str(error):
            return None
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ?([\d ]+)", str(error))
        indices = [int(index) for index in found[1].split()] if found else []
        unused = [names[index].removeprefix("module.") for index in indices if index < len(names)]
        which = f"these parameters: {', '.join(unused)}" if unused else "all parameters"
        return RuntimeError(
            f"on rank {comm.get_rank()} the losses of the previous step did not depend on {which}. DDP exchanges the "
            "gradients of every parameter. If the parameters are always the same, freeze them "
            "(requires_grad_(False)) or set PARALLEL.ARGS.static_graph to True; if they differ from step to step, "
            "set PARALLEL.ARGS.find_unused_parameters to True"
        )


def check_strategy(strategy: Strategy, model: nn.Module, data_loader: Any, grad_scaler: Any) -> None:
    """Check that a strategy, its model and the loader agree on which ranks share a batch.

    Logs a warning if checkpoints of the strategy cannot be resumed.

    Raises:
        ConfigError: the gradient would not be that of the global batch, or a gradient scaler has no step to call.
    """
    name = type(strategy).__name__
    if grad_scaler is not None and overridden_method(strategy, "step"):
        raise ConfigError(
            f"SOLVER.AMP.DTYPE: float16's gradient scaler calls the optimizer's step(), and the strategy {name} has "
            "its own: use bfloat16"
        )
    if comm.get_world_size() == 1:
        return
    sharded = has_shards(model)
    if sharded and not strategy.averages and strategy.data_size > 1:
        raise ConfigError(
            f"PARALLEL.NAME: the model's parameters are sharded over ranks, and the strategy {name} neither averages "
            "gradients nor has ranks share a batch. If all ranks compute the same batch (tensor parallelism), set its "
            "data_rank = 0 and data_size = 1; if gradients are averaged, set averages = True. To SimpleTrainer, pass "
            "the strategy that wrapped the model"
        )
    parts = getattr(getattr(data_loader, "batch_sampler", None), "world_size", None)
    if isinstance(parts, int) and parts > strategy.data_size:
        raise ConfigError(
            f"the loader splits each batch into {parts} parts, and the data_size of the strategy {name} is "
            f"{strategy.data_size}: call comm.set_data_ranks(strategy.data_rank, strategy.data_size) before the loader "
            "is built"
        )
    if not strategy.same_state_on_all_ranks:
        logger.warning(
            "Strategy %s: each rank has its own weights, and a checkpoint holds rank 0's, so it cannot be resumed. "
            "If all ranks have the same weights, set same_state_on_all_ranks = True in the strategy",
            name,
        )


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
        own = tensor.contiguous()  # a copy for other memory formats
        group = comm.object_group() if own.device.type == "cpu" else None  # NCCL sends from GPUs only
        torch.distributed.broadcast(own.view(-1).view(torch.uint8), 0, group)  # gloo and NCCL do not support all dtypes
        if own is not tensor and not torch.equal(own, tensor):  # expanded tensors are read-only
            tensor.copy_(own)


def check_same_weights(strategy: Strategy, model: nn.Module, iteration: int) -> None:
    """Check that the ranks that have copies of weights (DDP; HSDP within each shard) have the same. All ranks call it.

    Buffers, frozen parameters and those that DDP ignores may differ. A strategy whose ranks have weights of their own,
    or that makes them equal before a save, is not checked.

    Raises:
        RuntimeError: they differ by more than rounding. All ranks raise it.
    """
    if not strategy.same_state_on_all_ranks or overridden_method(strategy, "before_save"):
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
def differing_copies(weights: Mapping[str, torch.Tensor], group: Any) -> list[str]:
    """Return which weights differ between the ranks of a group, which have copies of them. All ranks call it.

    Args:
        weights: the weights by name; of a sharded one, this rank's part is compared.
        group: the process group of this rank and its copies. All such groups compare their own at the same time.

    Returns:
        A text for each difference above 0.1 % of the weight's largest value, the same on all ranks.
    """
    source = torch.distributed.get_process_group_ranks(group)[0]
    differing = []
    for name, weight in weights.items():
        own = local_part(weight)
        first = own.contiguous().clone()
        torch.distributed.broadcast(first.view(-1).view(torch.uint8), src=source, group=group)
        most = (own - first).abs().max().item() if own.numel() else 0.0
        if most > 1e-3 * first.abs().max().item():
            differing.append(f"rank {comm.get_rank()} has another {name} than rank {source} (by up to {most:.3g})")
    return [text for texts in comm.all_gather(differing) for text in texts]


def overridden_method(strategy: Strategy, name: str) -> Callable[..., Any] | None:
    """Return a method if the strategy overrides it, otherwise None: a step calls torch directly, which is faster."""
    method: Callable[..., Any] = getattr(strategy, name)
    return None if getattr(method, "__func__", None) is getattr(Strategy, name) else method


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy that wrapped a model."""
    return DDP() if isinstance(model, DistributedDataParallel) else Strategy()


def build_wrapped(build: Callable[[], nn.Module], strategy: Strategy, device: torch.device) -> nn.Module:
    """Build a model, with the same weights on all ranks, and wrap it for training. All ranks call this together.

    All start with rank 0's weights. With the strategy's ``init`` "meta", no rank ever has the whole model: it is built
    on torch's meta device and sharded, and the ``reset_parameters`` of each module gives it values. These depend on
    rank 0's seed, but not on the number of ranks.

    Args:
        build: builds the model.
        strategy: wraps it.
        device: the device of the wrapped model.

    Raises:
        ConfigError: ``init`` is "meta", and a module cannot be built in this way.
    """
    if comm.get_world_size() == 1:
        return strategy.wrap(build(), device)
    if strategy.init == "meta" and strategy.shards_weights:
        from .meta_init import build_on_meta

        return build_on_meta(build, strategy, device)
    model = build()
    share_weights(model)
    return strategy.wrap(model, device)


def build_strategy(cfg: CfgNode) -> Strategy:
    """Build the strategy of ``PARALLEL``. "auto" is "ddp" with several processes, "none" with one.

    Raises:
        ConfigError: the name or the arguments are wrong.
    """
    if cfg.PARALLEL.NAME == "auto" and comm.get_world_size() == 1:
        return Strategy()
    strategy: Strategy = STRATEGY_SLOT.build(cfg)
    return strategy


def check_parallel(cfg: CfgNode) -> None:
    """Check the strategy's name and arguments.

    Raises:
        ConfigError: they are wrong.
    """
    cls = STRATEGY_REGISTRY.get(cfg.PARALLEL.NAME, STRATEGY_SLOT.key)
    STRATEGY_SLOT.check(cfg)
    if isinstance(cls, type) and cls.__module__.startswith("hookline."):
        STRATEGY_SLOT.try_build(cfg)
