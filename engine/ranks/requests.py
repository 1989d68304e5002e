"""Requests of hooks: stop, save, write metrics, evaluate. Several ranks agree on them."""

import time

from ...hooks.host import HookHost, hook_name
from ...hooks.storage.event_storage import EventStorage
from .. import comm
from .agreement import Agreement, HookList, StopRequest
from .shared_metrics import share_metrics

__all__ = ["RequestHost"]


class RequestHost(HookHost):
    """The part of a trainer that receives requests of hooks. The training loop serves them at the end of a step.

    Attributes:
        iter: the current iteration.
        finished_iter: the last finished iteration.
        storage: the metrics.
    """

    storage: EventStorage

    def __init__(self) -> None:
        super().__init__()
        self._stop: StopRequest | None = None
        self._requests: set[str] = set()
        self._agreement: Agreement | None = None  # with other ranks, during training
        self._ends_together = False  # all ranks end the run, with the same hooks
        self._hook_changes = 0
        self._began = 0.0

    @property
    def finished_iter(self) -> int:
        raise NotImplementedError

    def _start_requests(self, start_iter: int, stop: StopRequest | None) -> None:
        """Begin a run. ``stop``: the request that had stopped the run before, if it only repeats its end."""
        self._stop = stop
        self._requests.clear()
        self._began = time.monotonic()
        self._agreement, self._hook_changes = None, 0
        if comm.get_world_size() > 1:
            self._agreement = Agreement(start_iter, self._hook_list())

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

    def request_save(self, everywhere: bool = False) -> None:
        """Save a checkpoint at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_save", everywhere)

    def request_write(self, everywhere: bool = False) -> None:
        """Write metrics at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_write", everywhere)

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_eval", everywhere)

    def _request(self, event: str, everywhere: bool) -> None:
        if self._agreement is not None and self._agreement.needs_exchange(event, everywhere):
            self._agreement.ask(event)
        else:
            self._requests.add(event)

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
        events, stop = agreement.exchange(self.iter, self._hook_list())
        self._requests |= events
        if stop is not None:
            self._stop_with(stop)
        if self._requests and agreement.same_hooks:
            share_metrics(self.storage, self.finished_iter)

    def _end_requests(self, failed: bool) -> None:
        """After the loop: average the last metrics over ranks. A rank that failed leaves the others."""
        agreement, self._agreement = self._agreement, None
        self._ends_together = False
        if agreement is not None and agreement.same_hooks and not failed:
            share_metrics(self.storage, self.finished_iter)
            self._ends_together = True

    def _hook_list(self) -> HookList:
        waiting = len(self._joined) + len(self._left)
        return HookList(tuple(map(hook_name, self._hooks)), self._hook_changes + waiting)

    def _change_hooks(self) -> None:
        self._hook_changes += len(self._joined) + len(self._left)
        super()._change_hooks()
