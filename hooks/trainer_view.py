"""What a hook may use of the trainer, as a typed protocol."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..config import Config
from .event_storage import EventStorage

__all__ = ["RanksView", "TrainerView"]


class RanksView(Protocol):
    """Rank numbers and collectives. All work in a single process too. Every rank must call a collective."""

    def get_rank(self) -> int:
        """Return this process's rank."""

    def get_world_size(self) -> int:
        """Return the number of ranks."""

    def get_data_size(self) -> int:
        """Return the number of ranks that read different batches."""

    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""

    def synchronize(self) -> None:
        """Collective. Wait for all ranks."""

    def all_gather(self, data: Any) -> list[Any]:
        """Collective. Return every rank's ``data``, in the order of ranks."""

    def gather(self, data: Any, dst: int = 0) -> list[Any]:
        """Collective. Return every rank's ``data`` on rank ``dst``, an empty list on the others."""

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Collective. Return rank ``src``'s object."""

    def reduce_dict(self, input_dict: Mapping[str, torch.Tensor], average: bool = True) -> dict[str, torch.Tensor]:
        """Collective. Return the mean (or sum) over ranks of each value, on rank 0."""

    def shared_random_seed(self) -> int:
        """Collective. Return a random number that is the same on all ranks."""


class TrainerView(Protocol):
    """The trainer as hooks see it."""

    iter: int
    """The current iteration. In ``after_train``: the number of finished iterations."""
    start_iter: int
    """The first iteration of this run; not 0 after a resume."""
    max_iter: int
    """The run ends before this iteration. May be changed."""
    storage: EventStorage
    """Where metrics are put."""
    model: nn.Module
    """The model, wrapped if a strategy (DDP) wraps it."""
    optimizer: Any
    """The optimizer, or an ``OptimizerList`` of several."""
    data_loader: Iterable[Any]
    """The training data."""
    batch: Any
    """The batch of the last forward pass (a micro-batch, if there are several), until all ``after_step`` are done. Only
    if a hook has ``uses_outputs = True``."""
    outputs: Any
    """What the model returned for ``batch``."""

    @property
    def sample_indices(self) -> Any:
        """The indices of the samples in the step's batch, on this rank, from ``after_fetch`` on. Only if a hook has
        ``uses_indices = True``."""

    @property
    def epoch(self) -> int:
        """The current pass over the data, from 0."""

    @property
    def iters_per_epoch(self) -> int | None:
        """Iterations of one epoch. None: the loader has no length."""

    @property
    def epoch_ended(self) -> bool:
        """Whether the current step is the last one of its epoch."""

    @property
    def finished_iter(self) -> int:
        """The last finished iteration. A checkpoint holds it; a resume starts one later."""

    @property
    def completed(self) -> bool:
        """Whether all iterations are done without an error."""

    @property
    def interrupted(self) -> bool:
        """Whether the run stops early and can be resumed: after a signal or at a time limit."""

    @property
    def stopped(self) -> bool:
        """Whether the run stops early on purpose, as early stopping does."""

    @property
    def stop_reason(self) -> str:
        """Why the run stops early: the argument of ``request_stop`` or ``StopTraining``. Empty if it does not."""

    @property
    def failed(self) -> bool:
        """Whether the run ends with an exception."""

    @property
    def ranks_in_sync(self) -> bool:
        """Whether several ranks train with the same hooks, so that a hook may call collectives."""

    @property
    def comm(self) -> RanksView:
        """Rank numbers and collectives."""

    def clock(self) -> float:
        """Return the seconds since training began; with several ranks the same on all."""

    def request_stop(self, reason: str = "", exit_code: int = 0, everywhere: bool = False) -> None:
        """Stop after the current step.

        Args:
            reason: logged, and returned by ``train()``.
            exit_code: not 0 if the run is interrupted and can be resumed.
            everywhere: all ranks make this request in this step, so they need not exchange it.
        """

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step."""

    def request_write(self, everywhere: bool = False, due: bool = False) -> None:
        """Write metrics at the end of the current step; ``due``: as for :meth:`request_save`."""

    def request_save(self, everywhere: bool = False, extra: bool = False, due: bool = False) -> None:
        """Save a checkpoint at the end of the current step.

        Args:
            everywhere: as for :meth:`request_stop`.
            extra: a rolling checkpoint.
            due: only the checkpointers whose period ends with this step save, unless there is another request.
        """

    @property
    def only_due(self) -> bool:
        """Whether ``on_write`` or ``on_save`` is called now only because periods of hooks have ended."""

    def replay_command(self, iteration: int) -> str:
        """Return the shell command that repeats a step, for messages; empty if there is none."""

    def skip_epoch(self) -> None:
        """End the epoch with the current step."""

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every hook that has it."""

    def listens(self, event: str) -> bool:
        """Return whether any hook has the method ``event``."""

    def gather(self, value: Any) -> Any:
        """Collective. Return the values of all ranks, concatenated: tensors, or dicts, lists and tuples of them."""

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""

    def find_hook(self, cls: type | str) -> Any:
        """Return the first hook of a class, given as a class or by name; None if there is none."""

    def find_hooks(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""

    def register_hooks(self, hooks: Iterable[Any]) -> None:
        """Add hooks. While training they start with the next step."""

    def remove_hook(self, hook: Any) -> list[Any]:
        """Remove a hook, or all hooks of a class. While training they leave before the next step."""

    def hook_costs(self) -> dict[str, tuple[float, int]]:
        """Return seconds and number of calls of each hook."""

    def eval_losses(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the losses of a batch of an evaluation, in ``after_eval_step(batch, outputs)``."""

    # DefaultTrainer only.

    @property
    def cfg(self) -> Config:
        """The config."""

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler."""

    @property
    def checkpointer(self) -> Any:
        """The checkpointer."""

    def evaluate(self, max_batches: int | None = None) -> Mapping[str, Any]:
        """Evaluate now and return the results."""
