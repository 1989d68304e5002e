"""What a strategy is: :class:`Strategy` has everything that one may define, and how it is built and checked."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError, Registry
from ...config.components import ComponentKey
from ...hooks.common import has_shards
from .. import comm
from .copies import share_weights

logger = logging.getLogger(__name__)


class Strategy:
    """How several processes train one model. This base class exchanges nothing.

    A config names a subclass that is registered with :data:`STRATEGY_REGISTRY`, or any as ``module:Class``.
    ``data_rank``, ``data_size`` and ``same_state_on_all_ranks`` may be properties or plain attributes.

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

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
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

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights. Gradients are checked and clipped. An overridden method cannot be used with float16."""
        optimizer.step()

    def before_evaluation(self, model: nn.Module) -> None:
        """Make values that differ between ranks equal, such as running means, before an evaluation."""

    def before_save(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make values that differ between ranks equal before a periodic or final checkpoint. Called on all ranks."""

    def overridden(self, name: str) -> Callable[..., Any] | None:
        """Return a method that a subclass overrides, otherwise None: a step calls torch directly, which is faster."""
        method: Callable[..., Any] = getattr(self, name)
        return None if getattr(method, "__func__", None) is getattr(Strategy, name) else method


STRATEGY_REGISTRY = Registry("STRATEGY", Strategy)
"""Strategies for ``PARALLEL.NAME``: subclasses of :class:`Strategy`, built with ``PARALLEL.ARGS``."""

STRATEGY_KEY = ComponentKey(STRATEGY_REGISTRY, "PARALLEL.NAME")

STRATEGY_REGISTRY.register(Strategy, name="none")


def check_strategy(strategy: Strategy, model: nn.Module, data_loader: object, grad_scaler: object) -> None:
    """Check that a strategy, its model and the loader agree on which ranks share a batch.

    Logs a warning if checkpoints of the strategy cannot be resumed.

    Raises:
        ConfigError: the gradient would not be that of the global batch, or a gradient scaler has no step to call.
    """
    name = type(strategy).__name__
    if grad_scaler is not None and strategy.overridden("step"):
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
    strategy: Strategy = STRATEGY_KEY.build(cfg)
    return strategy
