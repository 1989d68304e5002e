"""``RankSync``: all ranks stop, evaluate, write and save at the same step, and combine their metrics."""

import itertools
import logging
import time
import zlib
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...hooks.event_storage import EventStorage
from ...hooks.history_buffer import combine
from ...hooks.hook_list import hook_name
from .. import comm
from ..run_end import StopRequest

logger = logging.getLogger(__name__)

# Seconds between exchanges. One exchange takes about 0.4 ms.
_PERIOD = 1.0
_REQUESTS = ("eval", "write", "save")
# Seconds to wait for the other ranks at a place that some of them may never reach.
_WAIT = 10.0
# All ranks create these objects in the same order, so one has the same number on all of them.
_numbers = itertools.count()


class _Trainer(Protocol):
    iter: int
    start_iter: int
    finished_iter: int
    requests: set[Any]
    hooks: Any
    storage: EventStorage

    @property
    def failed(self) -> bool: ...
    def stop(self, reason: str, exit_code: int = 0) -> None: ...


class RankSync:
    """Ranks exchange what a hook on one of them has asked for: a signal, a time limit or a user's hook may act on one
    rank alone, but a collective needs all ranks.

    They exchange about once a second, and a step after each evaluation, write or save. Rank 0 measures the time of a
    step, chooses how many steps to take until the next exchange, and sends that number with each exchange.

    Args:
        trainer: this rank's trainer, before its first step. The first exchange is at the end of that step.

    Attributes:
        same_hooks: whether all ranks have the same hooks. If not, for example if rank 0 alone has a writer and a
            checkpointer (detectron2's way), each rank writes and saves by itself.
        requests, stop: what this rank has asked for since the last exchange.
        next_iter: the step of the next exchange, the same on all ranks.
        clock: seconds since training began, on rank 0, at the last exchange. It is the same on all ranks.
    """

    def __init__(self, trainer: _Trainer) -> None:
        self.requests: set[str] = set()
        self.stop: StopRequest | None = None
        self.clock = 0.0
        self.next_iter = trainer.start_iter
        self._began = self._last = time.monotonic()
        self._last_iter = trainer.start_iter - 1
        self._steps = 1
        self._group = comm.object_group()
        self._number = next(_numbers)
        names = comm.all_gather(tuple(map(hook_name, trainer.hooks.hooks)))
        self.same_hooks = len(set(names)) == 1
        if not self.same_hooks:
            logger.info("Ranks have different hooks, so each rank writes and saves by itself: %s", names)

    def end_step(self, trainer: _Trainer) -> None:
        """Exchange requests at the end of a step, if it is time: all ranks then have the same."""
        if trainer.iter < self.next_iter:
            return
        now = time.monotonic()
        steps, rates = self._choose_steps(trainer.iter, now), _rates(trainer)
        # All ranks get the maximum of each number. Only rank 0 sends a clock and a number of steps. The maxima of a
        # checksum and of its negative are of equal size only if all ranks have the same checksum.
        sums = [float(zlib.crc32(repr(one).encode())) for one in (rates, _order(trainer))]
        ours = [float(request in self.requests) for request in _REQUESTS]
        ours += [float(self.stop is not None), *sums, *(-one for one in sums)]
        ours += [now - self._began, float(trainer.iter + steps)] if comm.is_main_process() else [0.0, 0.0]
        numbers = torch.tensor(ours, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        *asked, stop, max_rates, max_order, min_rates, min_order, self.clock, next_iter = numbers.tolist()
        self.next_iter = int(next_iter)
        self.requests.clear()
        if max_rates != -min_rates:
            self._compare_rates(trainer.iter, rates)
        if max_order != -min_order:
            raise RuntimeError(
                "the ranks read the samples of the training data in different orders: the sampler draws numbers that "
                "are not the same on all ranks. They are seeded if it draws them from the global generators of Python, "
                "NumPy and torch (CPU), or from a generator of these that is its attribute"
            )
        trainer.requests |= {request for request, any_rank in zip(_REQUESTS, asked, strict=True) if any_rank}
        if stop:
            stops: list[StopRequest | None] = comm.all_gather(self.stop, group=self._group)
            self.stop = None
            first = min((one for one in stops if one is not None), key=lambda one: bool(one.exit_code))
            trainer.stop(first.reason, first.exit_code)

    def end(self, trainer: _Trainer) -> None:
        """The loop has ended. A rank that failed leaves the others."""
        self.same_hooks = self.same_hooks and not trainer.failed
        if self.same_hooks:
            self._compare_rates(trainer.finished_iter, _rates(trainer))

    def share_metrics(self, trainer: _Trainer, writing: bool) -> None:
        """Combine the metrics of all ranks; see :func:`share_metrics`. Ranks with different hooks keep their own."""
        if self.same_hooks:
            share_metrics(trainer.storage, trainer.finished_iter, writing)
            self.next_iter = min(self.next_iter, trainer.iter + 1)  # may be called before end_step()

    def _compare_rates(self, iteration: int, rates: tuple[float, ...]) -> None:
        first, *others = comm.all_gather(rates, group=self._group)
        if found := [f"rank {i} has {[*o]}, rank 0 {[*first]}" for i, o in enumerate(others, start=1) if o != first]:
            raise RuntimeError(
                f"the learning rates differ by rank after iteration {iteration} ({'; '.join(found)}). Set them on all "
                "ranks in the same way. If ranks train weights of their own, set same_state_on_all_ranks to False in a "
                "strategy"
            )

    def wait_for_stop(self, iteration: int, reason: str) -> None:
        """Wait until all ranks have given up this step by ``StopTraining``, which ends the loop.

        Raises:
            RuntimeError: some ranks did not, and may wait in the middle of the step. The message has their numbers.
        """
        store: Any = comm.get_store()
        rank, key = comm.get_rank(), f"hookline/stop/{self._number}/{iteration}"
        if missing := comm.missing_ranks(store, key, rank, comm.get_world_size(), _WAIT):
            raise RuntimeError(
                f"StopTraining({reason!r}) was raised in step {iteration} of rank {rank}, and not on all "
                f"ranks: rank(s) {', '.join(missing)} cannot finish this step. To stop from one rank, call "
                "trainer.request_stop(reason) instead: all ranks then stop after the same step"
            )

    def _choose_steps(self, iteration: int, now: float) -> int:
        """The number of steps until the next exchange: at most twice the last one, since the first steps are slow."""
        seconds = max(now - self._last, 1e-6) / max(iteration - self._last_iter, 1)
        self._last, self._last_iter = now, iteration
        self._steps = max(1, min(2 * self._steps, int(_PERIOD / seconds)))
        return self._steps


def _rates(trainer: _Trainer) -> tuple[float, ...]:
    """Return the trainer's learning rates, which all ranks must have unless they train weights of their own."""
    if not getattr(getattr(trainer, "strategy", None), "same_state_on_all_ranks", False):
        return ()
    return tuple(float(group.get("lr", 0.0)) for group in trainer.optimizer.param_groups)  # type: ignore[attr-defined]


def _order(trainer: _Trainer) -> int:
    batches = getattr(trainer, "batches", None)  # a TrainerBase has none
    return 0 if batches is None else batches.order


# ---------------------------------------------------------------------- metrics


def share_metrics(storage: EventStorage, iteration: int, writing: bool) -> None:
    """Replace this rank's losses since the last call by the means over all ranks, in one exchange; other metrics by
    the sum or maximum, as ``put_scalar(..., over_ranks=...)`` says.

    Every rank must call it at the same step.

    Args:
        storage: its ``over_ranks`` has the names of the losses and other metrics.
        iteration: the last finished iteration.
        writing: whether metrics are written next. Then ``slowest_rank`` is put, the rank that spent the most time on
            its data in the last 20 steps (in the backward pass a rank waits for the others). Put before a save, it
            would be a row of its own in a resumed run.
    """
    histories, until = storage.histories(), storage.shared_until

    def since(name: str) -> dict[int, float]:
        """This rank's values of a metric after the last call, by iteration."""
        history = histories.get(name)
        return {} if history is None else {it: value for value, it in history.tail(history.count_since(until))}

    mine = {name: since(name) for name in sorted(storage.over_ranks)}
    data_time = histories.get("data_time") if writing else None
    seconds = 0.0 if data_time is None else sum(value for value, _ in data_time.tail(20))
    parts: list[tuple[dict[str, dict[int, float]], float]] = comm.all_gather((mine, seconds))
    for name, values in mine.items():
        there = [part.get(name, {}) for part, _ in parts]
        how = storage.over_ranks[name]
        if values:
            storage.replace(name, {it: combine(how, [o[it] for o in there if it in o], len(parts)) for it in values})
    storage.shared_until = iteration
    if data_time is not None:
        times = [time for _, time in parts]
        storage.put_scalar("slowest_rank", times.index(max(times)), smoothing_hint=False, cur_iter=iteration)
