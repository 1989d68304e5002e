"""What ends a run before its time: signals, and the time that a job has."""

import contextlib
import logging
import mmap
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..watching.timing import format_seconds

__all__ = [
    "EXIT_AGAIN",
    "EXIT_INTERRUPTED",
    "STOP_SIGNALS",
    "SignalHandler",
    "StopSignals",
    "TimeLimit",
    "leave_signals_to_parent",
]

logger = logging.getLogger(__name__)

EXIT_AGAIN = 75
"""Exit code of a run that was stopped before its end and is to be started again with ``--resume`` (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
"""Exit code of a run that somebody ended with Ctrl-C: 128 + SIGINT, as shells have it."""

# SIGUSR1 is what Slurm is asked to send ahead of time (--signal=USR1@60); there is none on Windows.
STOP_SIGNALS = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopSignals:
    """Catches SIGINT (Ctrl-C), SIGTERM and SIGUSR1, from :meth:`catch` to :meth:`release`, or in a ``with`` block.

    A second Ctrl-C is KeyboardInterrupt again. Works in the main thread only, where Python delivers signals;
    elsewhere it does nothing.

    Args:
        then: called with the reason and the exit code when the first one comes. It runs between two instructions of
            whatever the program is doing, so it should do no more than take a note.

    Attributes:
        reason: such as "interrupted by SIGTERM"; empty as long as there was none.
        exit_code: 75 or, after Ctrl-C, 130; 0 as long as there was none.
    """

    def __init__(self, then: Callable[[str, int], Any] | None = None) -> None:
        self.reason = ""
        self.exit_code = 0
        self._then = then
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Begin."""
        self.reason, self.exit_code = "", 0
        self._process = os.getpid()
        tell_workers_of_the_end()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._handle)

    def release(self) -> None:
        """End: what was done about the signals before is done again."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            # None: it was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> "StopSignals":
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker that was forked: it goes on for the present step
            return
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            _tell("Ctrl-C: stopping after this step. Press it again to stop at once, without saving")
        else:
            _tell(f"{name}: stopping after this step")
        if self.reason:
            return
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN
        self.reason = f"interrupted by {name}"
        if self._then is not None:
            self._then(self.reason, self.exit_code)


def leave_signals_to_parent(worker_id: int = 0) -> None:
    """Have a data loader's worker ignore signals: the process that trains decides when to end.

    Called first in each worker; can be a ``worker_init_fn``. Schedulers and terminals signal all processes of a job. If
    a worker ended at once, the step that is to be finished would fail. After SIGTERM a worker stays for a minute, or
    until the program ends, which sends it SIGTERM too. If the process that trains is killed, the worker ends with it:
    torch's own watch begins later, and may miss that.

    Args:
        worker_id: not used.
    """
    for number in STOP_SIGNALS:
        # Not SIG_IGN for SIGTERM: a loader that gives up a worker that hangs sends it this, too.
        signal.signal(number, _end_in_a_minute if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _end_now)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="hookline-parent", daemon=True).start()


# One byte that a process shares with the workers it forks: whether it is about to end.
_ending = mmap.mmap(-1, 1)
_at_the_end: multiprocessing.util.Finalize | None = None
_process = 0


def tell_workers_of_the_end() -> None:
    """Have the loader workers that this process starts from now on know when it is about to end.

    Called before workers are started. What an import registers for the end of a process is lost in a process that
    multiprocessing has started, and is the parent's alone in one that was forked otherwise.
    """
    global _ending, _at_the_end, _process
    if _process != os.getpid() or _at_the_end is None or not _at_the_end.still_active():
        _process = os.getpid()
        _ending = mmap.mmap(-1, 1)  # another than that of the process which this one was forked from
        # Of a high priority: called before multiprocessing ends its workers.
        _at_the_end = multiprocessing.util.Finalize(None, _say_that_it_ends, exitpriority=100)


def _say_that_it_ends() -> None:
    _ending[0] = 1


tell_workers_of_the_end()


def _end_in_a_minute(number: int, frame: FrameType | None) -> None:
    if _ending[0] or not hasattr(signal, "alarm"):
        _end_now(number, frame)
    signal.alarm(60)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(0)


def _end_now(number: int, frame: FrameType | None) -> None:
    # Without an error, which torch would report of a worker that a signal has ended.
    os._exit(0)


def _tell(text: str) -> None:
    """Write a line at once. The log could be in the middle of writing one, where the signal came."""
    if os.environ.get("LOCAL_RANK", "0") != "0":  # all processes of a run get it; one of each machine says so
        return
    with contextlib.suppress(OSError):  # nobody reads it
        # In a terminal the cursor may stand behind a progress bar, or behind the ^C that was typed.
        begin = "\n" if os.isatty(2) else ""
        os.write(2, f"{begin}{text}\n".encode())


@HOOK_REGISTRY.register()
class SignalHandler(HookBase):
    """Ctrl-C, SIGTERM or SIGUSR1 ends training in good order after the present step; a second Ctrl-C at once.

    In good order means: the step is finished, with the evaluation it may end with; metrics are written; a checkpoint
    is saved that ``--resume`` goes on from; the result's ``exit_code`` is 130 after Ctrl-C, otherwise 75. Signals are
    looked after until the very end of the run, its last evaluation and checkpoint included: one that comes when all
    steps are done changes nothing. Works in the main thread only; elsewhere it does nothing.
    """

    single = True

    def __init__(self) -> None:
        self._signals = StopSignals()

    def before_train(self) -> None:
        trainer = self.trainer
        self._signals = StopSignals(lambda reason, exit_code: trainer.request_stop(reason, exit_code))
        self._signals.catch()

    def after_run(self) -> None:
        self._signals.release()


@HOOK_REGISTRY.register()
class TimeLimit(HookBase):
    """Stops training, as :class:`SignalHandler` does, while there is still time to save.

    At the end of each step it looks whether another one fits: the longest step, evaluation and checkpoint seen in this
    run, each once, and ``margin``. If not, training stops with exit code 75, after this step's checkpoint. The first
    step, in which things are compiled and loaded, is not taken for a usual one. Saves nothing: a resumed run is
    another job, and has the whole limit again.

    Args:
        limit: a time, such as ``"2h"``.
        margin: a time to leave on top, for what is not seen in time: a first evaluation or checkpoint, the end of the
            program. By default a twentieth of the limit, but no more than a minute.
        since: from when the limit counts: "train", the start of training; or "process", the start of this process,
            which is what a cluster's limit for a job counts from.

    Raises:
        ConfigError: limit or margin is no time, or the limit is not positive.
    """

    single = True

    def __init__(
        self,
        limit: "Duration | int | str",
        margin: "Duration | int | str | None" = None,
        since: Literal["train", "process"] = "train",
    ) -> None:
        self.limit = Duration.parse_time(limit)
        seconds = self.limit.seconds
        if not seconds:
            raise ConfigError("TimeLimit: limit must be a time that is not 0; write '45s', '30min' or '2h'")
        if since not in ("train", "process"):
            raise ConfigError(f'TimeLimit: since must be "train" or "process", not {since!r}')
        self.margin = min(seconds / 20, 60.0) if margin is None else Duration.parse_time(margin).seconds
        if self.margin >= seconds:
            raise ConfigError(f"TimeLimit: the margin, {self.margin:g} s, leaves nothing of the limit, {self.limit}")
        self._since = since
        self._reset()

    def _reset(self) -> None:
        self._last = time.monotonic()
        self._first = True
        # The longest so far, in seconds.
        self._step = self._eval = self._save = 0.0
        # Of the present step: what was no part of it.
        self._apart = 0.0
        # When the present evaluation and checkpoint began, and in which iteration.
        self._eval_began = self._save_began = (0.0, -1)

    def before_train(self) -> None:
        self._reset()
        start = self._last if self._since == "train" else _process_start()
        self._end = start + self.limit.seconds - self.margin

    def after_step(self) -> None:
        now = time.monotonic()
        step = now - self._last - self._apart
        if not self._first and step > self._step:
            self._step = step
        self._first, self._last, self._apart = False, now, 0.0
        if now + self._step + self._eval + self._save <= self._end:
            return
        self.trainer.request_stop(f"the time limit of {self.limit} is near", EXIT_AGAIN)

    def before_eval(self) -> None:
        self._eval_began = time.monotonic(), self.trainer.iter

    def after_eval(self, results: Any) -> None:
        self._eval = max(self._eval, self._since_began(self._eval_began))

    def before_save(self, path: str) -> None:
        self._save_began = time.monotonic(), self.trainer.iter

    def after_save(self, path: str) -> None:
        self._save = max(self._save, self._since_began(self._save_began))

    def after_run(self) -> None:
        logger.debug(
            "Longest step %s, evaluation %s, checkpoint %s",
            *map(format_seconds, (self._step, self._eval, self._save)),
        )

    def _since_began(self, began: tuple[float, int]) -> float:
        took = time.monotonic() - began[0]
        if began[1] == self.trainer.iter:  # steps waited for it: it was not saved in the background
            self._apart += took
        return took


_imported = time.monotonic()


def _process_start() -> float:
    """When this process began, on the clock of ``time.monotonic``; where no one can tell, when this was imported."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22, since the machine's boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return _imported
    return time.monotonic() - age
