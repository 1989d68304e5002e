"""What a trainer's state must have to be resumed, what of it is a rank's, and an optimizer's state for a new run."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...config import ConfigError
from ...hooks.common import capture_rng, has_shards, optimizers_of
from .. import comm
from ..data.epoch_iterator import EpochIterator
from ..data.stream import SplitLoader
from .weights import read_checkpoint

logger = logging.getLogger(__name__)

START_ANEW = "To start from its weights alone, set MODEL.WEIGHTS instead of resuming"


def check_complete(state: Mapping[str, object]) -> None:
    """Check that a trainer's state is that of all ranks, and of this library.

    Raises:
        ConfigError: it is not; the message says what to do.
    """
    if not state.get("same_state_on_all_ranks", True):
        raise ConfigError(
            "the checkpoint cannot be resumed: its run held other weights or optimizer state on each rank, and the "
            f"checkpoint holds rank 0's. {START_ANEW}"
        )
    if "optimizer" not in state:
        raise ConfigError(
            "the checkpoint cannot be resumed: it has no optimizer state where hookline saves it. Was it "
            f"saved by detectron2? {START_ANEW}"
        )


def states_of_ranks(batches: EpochIterator) -> dict[str, Any]:
    """Collective. Return what a checkpoint holds of each rank: random generators, and its loader's own state, if any.

    Args:
        batches: this rank's.
    """
    needed = batches.differs_by_rank and comm.is_first_of_data_rank()
    ranks = comm.all_gather((capture_rng(of_training=True), batches.state_dict() if needed else None))
    states: dict[str, Any] = {"rng_of_ranks": [rng for rng, _ in ranks]}
    if data := [one for _, one in ranks if one is not None]:
        states["data_of_ranks"] = data
    return states


def rng_of_this_rank(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the states of this rank's random generators; None for a rank that the saved run did not have."""
    of_ranks: list[dict[str, Any]] = state.get("rng_of_ranks", [])
    # On another number of ranks the data rank decides, since ranks that share a batch must draw the same numbers.
    rank = comm.get_rank() if len(of_ranks) == comm.get_world_size() else comm.get_data_rank()
    if rank < len(of_ranks):
        return of_ranks[rank]
    return state.get("rng") if rank == 0 else None  # a rank that the saved run did not have keeps its seed


def data_of_this_rank(state: Mapping[str, Any], batches: EpochIterator) -> dict[str, Any]:
    """Return the position in the data of this rank.

    Args:
        state: the trainer's state.
        batches: what is positioned. The position is the same on all ranks unless the loader has a state of its own.

    Raises:
        ConfigError: it has, and the state has not one for each of the data ranks.
    """
    data: dict[str, Any] = state["data"]
    if not batches.differs_by_rank or "loader" not in data:
        return data
    of_ranks: list[dict[str, Any]] = state.get("data_of_ranks", [data])
    size = comm.get_data_size()
    if len(of_ranks) == size:
        return of_ranks[comm.get_data_rank()]
    if isinstance(batches.loader, SplitLoader):  # it starts the epoch again
        return data
    raise ConfigError(
        f"the checkpoint cannot be resumed on {size} data rank(s): it has the states of {len(of_ranks)} loader(s) of "
        f"{type(batches.loader).__name__}. Resume on as many, from a checkpoint that all ranks have saved together. "
        f"{START_ANEW}"
    )


def load_optimizer(optimizer: Any, model: Any, path: str) -> None:
    """Load an optimizer's state, such as momentum, from a checkpoint. Learning rates and other settings stay.

    Args:
        optimizer: the optimizer, or an OptimizerList.
        model: its model.
        path: a local checkpoint of a trainer.

    Raises:
        ConfigError: the file has no state of an optimizer, or one that does not fit.
    """
    key = "MODEL.WEIGHTS_OPTIMIZER"
    if has_shards(model):
        raise ConfigError(f"{key}: is not supported for sharded models")
    state = read_checkpoint(path).get("trainer", {}).get("optimizer")
    if state is None:
        raise ConfigError(f"{key}: {path} has weights only, and no state of an optimizer")
    present, saved = optimizers_of(optimizer), state.get("optimizers", [state])
    if len(present) != len(saved):
        raise ConfigError(f"{key}: {path} has {len(saved)} optimizers, and this run {len(present)}")
    for one, other in zip(present, saved, strict=True):
        settings = [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
        try:
            one.load_state_dict(other)
            for parameter, values in one.state.items():
                shapes = {tuple(value.shape) for value in values.values() if isinstance(value, torch.Tensor)}
                if shapes - {(), tuple(parameter.shape)}:
                    raise ValueError(f"it has {shapes} for a parameter of {tuple(parameter.shape)}")
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{key}: the optimizer in {path} does not fit {type(one).__name__}: {error}") from error
        for group, values in zip(one.param_groups, settings, strict=True):
            group.update(values)
    logger.info("Loaded the optimizer's state from %s", path)
