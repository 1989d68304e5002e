"""What hooks may ask of a trainer: how far the run is, and requests to stop, save, write metrics or evaluate."""

import math
import time
from numbers import Real
from typing import Any, cast

from ..config import ConfigError
from ..hooks.host import HookHost, hook_name
from ..hooks.storage.event_storage import EventStorage, get_event_storage
from . import comm
from .ranks.agreement import Agreement, HookList, StopRequest
from .ranks.shared_metrics import share_metrics

__all__ = ["OPEN_STORAGE", "RunState"]


class _OpenStorage:
    """Stands for the open storage, in a trainer whose steps another trainer calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(get_event_storage(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(get_event_storage(), name, value)


OPEN_STORAGE: EventStorage = cast(Any, _OpenStorage())
"""The storage of a trainer outside of its ``train()``."""


class RunState(HookHost):
    """The state of a run, and the requests that hooks make. The training loop serves them at the end of a step.

    See :class:`~hookline.engine.TrainerBase` for the attributes.
    """

    storage: EventStorage = OPEN_STORAGE
    _max_iter: int = 0
    _longest: int = 0  # the largest max_iter of the run
    only_due: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.iter: int = 0
        self.start_iter: int = 0
        self._finished: int = -1  # the last finished iteration
        self._error: BaseException | None = None
        self._stop: StopRequest | None = None
        self._requests: dict[str, bool] = {}  # events, and whether all hooks act, not only those that are due
        self._agreement: Agreement | None = None  # with other ranks, during training
        self._at_last_save = False  # the checkpoint that is saved now is the final one
        self._ends_together = False  # all ranks end the run, with the same hooks
        self._hook_changes = 0
        self._began = 0.0

    # ------------------------------------------------------------------ how far the run is

    @property
    def max_iter(self) -> int:
        return self._max_iter

    @max_iter.setter
    def max_iter(self, value: int) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, Real)
            or not (value >= 0 and value in (math.inf, value // 1))
        ):
            raise ConfigError(
                f"max_iter: expected a number of iterations, not {value!r}; for 20 epochs: 20 * trainer.iters_per_epoch"
            )
        changed, self._max_iter = value != self._max_iter, value
        if changed and self._running:
            self._longest = max(self._longest, value)
            self._length_changed()

    def _length_changed(self) -> None:
        """Called when ``max_iter`` changes during training."""
        self.emit("set_max_iter", self.max_iter)

    @property
    def finished_iter(self) -> int:
        """The last finished iteration. A checkpoint has the state after it; a resume starts with the next one."""
        return self._finished

    @property
    def completed(self) -> bool:
        """Whether all iterations up to ``max_iter`` are done without an error."""
        return self._error is None and self.iter >= self.max_iter

    @property
    def interrupted(self) -> bool:
        """Whether the run ends early because of an exit code (a signal, a time limit). It can be resumed."""
        stop = self._stop
        return self._error is None and stop is not None and bool(stop.exit_code) and self._finished + 1 < self.max_iter

    @property
    def stopped(self) -> bool:
        """Whether the run ends early on purpose, for example by early stopping. A resume does not continue it."""
        return self._error is None and self._stop is not None and not self._stop.exit_code

    @property
    def stop_reason(self) -> str:
        """Why the run stops early: the argument of ``request_stop`` or ``StopTraining``. Empty if it does not."""
        return "" if self._stop is None else self._stop.reason

    @property
    def failed(self) -> bool:
        """Whether the run ends with an error."""
        return self._error is not None

    def _end(self) -> dict[str, Any] | None:
        """Return how the run ended; None if it has not, was interrupted or failed.

        Returns:
            ``reason``: "completed", or the argument of ``request_stop``; ``iteration``: number of finished iterations;
            ``max_iter``: the largest of the run; ``by``: see :class:`StopRequest`; ``complete``: True if the work after
            the loop, such as the last evaluation, is done too. The final checkpoint has True.
        """
        done = self._finished + 1
        if self.stopped:
            assert self._stop is not None
            reason, by = self._stop.reason, self._stop.by
        elif self._error is None and done >= self.max_iter > 0:
            reason, by = "completed", None
        else:
            return None
        complete = self._at_last_save
        return {"reason": reason, "iteration": done, "max_iter": self._longest, "by": by, "complete": complete}

    # ------------------------------------------------------------------ requests

    def _start_requests(self, stop: StopRequest | None) -> None:
        """Clear the requests of an earlier run. ``stop``: the request that had stopped it, to repeat only its end."""
        self._stop, self._agreement = stop, None
        self._requests.clear()
        self._began = time.monotonic()

    def replay_command(self, iteration: int) -> str:
        """Return the shell command that repeats a step, for messages; empty if there is none."""
        return ""

    def _start_agreement(self) -> None:
        """Compare the hooks of all ranks, and begin to exchange requests."""
        self._hook_changes = 0
        if comm.get_world_size() > 1:
            self._agreement = Agreement(self.start_iter, self._hook_list())

    def request_stop(self, reason: str = "", exit_code: int = 0, everywhere: bool = False) -> None:
        """Stop training after the current step. The first request counts, but an interruption yields to a stop.

        With several ranks, one rank may request it: all ranks stop at the end of the same step, within about a second.

        Args:
            reason: returned by :meth:`train`, and logged.
            exit_code: not 0 if the run is interrupted and should be resumed (a signal, a time limit). Its checkpoint
                is named by the iteration instead of ``model_final``, and the program exits with this code.
            everywhere: all ranks make this request in this step, so no exchange between ranks is needed.
        """
        by = None if exit_code else self._asking_hook()  # an interrupted run can always be resumed
        request = StopRequest(reason or "stop requested", exit_code, by)
        if self._agreement is not None and self._agreement.needs_exchange("stop", everywhere):
            self._agreement.ask(request)
        else:
            self._stop_with(request)

    def request_save(self, everywhere: bool = False, extra: bool = False, due: bool = False) -> None:
        """Save a checkpoint at the end of the current step. ``everywhere``: as for :meth:`request_stop`.

        Args:
            extra: by :class:`~hookline.hooks.RollingCheckpointer`, not by
                :class:`~hookline.hooks.PeriodicCheckpointer`. All ranks must request it.
            due: only the checkpointers whose period ends with this step save, unless there is another request.
        """
        if extra:
            self._requests["on_extra_save"] = True
        else:
            self._request("on_save", everywhere, due)

    def request_write(self, everywhere: bool = False, due: bool = False) -> None:
        """Write metrics at the end of the current step. ``everywhere``, ``due``: as for :meth:`request_save`."""
        self._request("on_write", everywhere, due)

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_eval", everywhere)

    def _request(self, event: str, everywhere: bool, due: bool = False) -> None:
        if self._agreement is not None and self._agreement.needs_exchange(event, everywhere):
            self._agreement.ask(event)
        else:
            self._requests[event] = self._requests.get(event, False) or not due

    def _stop_with(self, request: StopRequest) -> None:
        if request.outranks(self._stop):
            self._stop = request

    def _stop_step(self, reason: str) -> None:
        """Stop because a step raised ``StopTraining``. All ranks must do so in the same step."""
        reason = reason or "stop requested"
        if self._agreement is not None:
            self._agreement.wait_for_stop(self.iter, reason)
        self._stop_with(StopRequest(reason))

    def clock(self) -> float:
        """Seconds since training began. With several ranks: rank 0's value at the last exchange, the same on all."""
        return time.monotonic() - self._began if self._agreement is None else self._agreement.clock

    @property
    def ranks_in_sync(self) -> bool:
        """Whether there are several ranks with the same hooks. Hooks may then call collectives in their events."""
        return self._ends_together or (self._agreement is not None and self._agreement.same_hooks)

    def _exchange_requests(self) -> None:
        """Exchange requests with the other ranks if it is time; average metrics before they are written or saved."""
        agreement = self._agreement
        if agreement is None or not (self.iter >= agreement.next_iter or (self._requests and agreement.same_hooks)):
            return
        events, stop = agreement.exchange(self.iter, self._hook_list(), self._settings())
        self._requests |= dict.fromkeys(events, True)
        if stop is not None:
            self._stop_with(stop)
        if self._requests and agreement.same_hooks:
            share_metrics(self.storage, self._finished)

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same on all ranks in each step, by name."""
        return {}

    def _end_requests(self) -> None:
        """After the loop: average the last metrics over ranks. A rank that failed leaves the others."""
        agreement, self._agreement = self._agreement, None
        self._ends_together = self.only_due = False  # only_due: an error may have ended a step
        if agreement is not None and agreement.same_hooks and not self.failed:
            share_metrics(self.storage, self._finished)
            self._ends_together = True

    def _hook_list(self) -> HookList:
        waiting = len(self._joined) + len(self._left)
        return HookList(tuple(map(hook_name, self._hooks)), self._hook_changes + waiting)

    def _change_hooks(self) -> None:
        self._hook_changes += len(self._joined) + len(self._left)
        super()._change_hooks()
