"""The random number generators of all ranks in a checkpoint, and their restoration after a resume."""

from collections.abc import Mapping
from typing import Any

from ...hooks.common.rng import capture_rng, restore_rng
from .. import comm
from ..data.epoch_iterator import EpochIterator

__all__ = ["RandomState"]


class RandomState:
    """Saves and restores the state of the random number generators: Python's, NumPy's, torch's and each GPU's.

    Attributes:
        pending: a state to restore right before the next step, so that nothing in between draws from it; or None.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Any] | None = None
        self._gathered: tuple[int, list[dict[str, Any]]] = (-1, [])

    def gather(self, iteration: int) -> None:
        """Collect the states of all ranks, as they are after ``iteration``. All ranks call this."""
        self._gathered = iteration, comm.all_gather(capture_rng())

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return ``rng``, this rank's state; and ``rng_of_ranks`` if it was gathered after ``iteration``."""
        state: dict[str, Any] = {"rng": capture_rng()}
        gathered_at, of_ranks = self._gathered
        if of_ranks and gathered_at == iteration:
            state["rng_of_ranks"] = of_ranks
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Choose the state that this rank restores; a rank that the saved run did not have keeps its own seed."""
        of_ranks = state_dict.get("rng_of_ranks", [])
        # On another number of ranks the data rank decides, since ranks that share a batch must draw the same numbers.
        rank = comm.get_rank() if len(of_ranks) == comm.get_world_size() else comm.get_data_rank()
        if rank < len(of_ranks):
            self.pending = of_ranks[rank]
        else:
            self.pending = state_dict.get("rng") if rank == 0 else None

    def restore(self, batches: EpochIterator | None = None) -> None:
        """Restore the pending state.

        Args:
            batches: the data of the next step. In the middle of an epoch its iterator existed before the state was
                saved, so it is made first.
        """
        if self.pending is None:
            return
        if batches is not None and batches.begun:
            batches.prepare()
        restore_rng(self.pending)
        self.pending = None
