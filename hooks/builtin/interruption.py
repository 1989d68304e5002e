"""Stops a run early: signals, and a time limit."""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase

logger = logging.getLogger(__name__)

EXIT_RESUMABLE = 75
"""Exit code of an interrupted run, to be restarted with ``--resume`` (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""

_IMPORTED = time.monotonic()

INTERRUPTED_BY = "interrupted by"
"""The start of the reason of a run that a signal ended. The signal's name follows."""

# Slurm can send SIGUSR1 before the time limit (--signal=USR1@60). Windows does not have it.
STOP_SIGNALS = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopSignals:
    """Catches SIGINT (Ctrl-C), SIGTERM and SIGUSR1, from :meth:`catch` to :meth:`release`, or in a ``with`` block.

    A second Ctrl-C raises KeyboardInterrupt. Works only in the main thread, to which Python delivers signals.

    Args:
        then: called with the reason and the exit code at the first signal. It interrupts the program at any
            instruction, so it should only store them.

    Attributes:
        reason: such as "interrupted by SIGTERM"; empty before the first signal.
        exit_code: 130 after Ctrl-C, 75 after other signals; 0 before the first signal.
    """

    def __init__(self, then: Callable[[str, int], object] | None = None) -> None:
        self.reason = ""
        self.exit_code = 0
        self._then = then
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Install the signal handlers."""
        self.reason, self.exit_code = "", 0
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._handle)

    def release(self, ignore_sigterm: bool = False) -> None:
        """Restore the earlier signal handlers.

        Args:
            ignore_sigterm: ignore SIGTERM from now on instead of restoring its handler.
        """
        before, self._before = self._before, {}
        if ignore_sigterm and signal.SIGTERM in before:
            before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in before.items():
            # None: the handler was not set from Python, so it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> "StopSignals":
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked loader worker, which the current step still needs
            return
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            _write_line("Ctrl-C: stopping after this step. Press it again to stop at once, without saving")
        else:
            _write_line(f"{name}: stopping after this step")
        if self.reason:
            return
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE
        self.reason = f"{INTERRUPTED_BY} {name}"
        if self._then is not None:
            self._then(self.reason, self.exit_code)


def is_session() -> bool:
    """Return whether this is a notebook, IPython, Python's prompt, or a script of ``python -i``."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def in_notebook() -> bool:
    """Return whether this code runs in the kernel of a notebook, which shows more than text."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _write_line(text: str) -> None:
    """Write a line to stderr directly, since the signal may have interrupted the log."""
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one process per machine reports it
        return
    if in_notebook():  # whose cells show sys.stderr, which may be written in a signal handler
        print(text, file=sys.stderr)
        return
    with contextlib.suppress(OSError):  # stderr may be closed
        # In a terminal the cursor may be behind a progress bar or the typed ^C.
        begin = "\n" if os.isatty(2) else ""
        os.write(2, f"{begin}{text}\n".encode())


def _ignore_stop_signals() -> None:
    """Ignore the signals while the program ends after a run: its exit code is that of the run."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@HOOK_REGISTRY.register()
class SignalHandler(HookBase):
    """Stops training after the current step on Ctrl-C, SIGTERM or SIGUSR1. A second Ctrl-C stops at once.

    After the first signal the step is finished, including an evaluation that is due; metrics are written; a checkpoint
    for ``--resume`` is saved; the result's ``exit_code`` is 130 after Ctrl-C, otherwise 75. Signals are caught until
    the end of the run. A signal after the last step has no effect. Works only in the main thread.
    """

    single = True

    def __init__(self) -> None:
        self._signals = StopSignals(lambda reason, exit_code: self.trainer.request_stop(reason, exit_code))

    def before_train(self) -> None:
        self._signals.catch()

    def after_run(self) -> None:
        # torchrun sends SIGTERM as soon as one rank fails. The others must still report which rank that was.
        several = self.trainer.comm.get_world_size() > 1
        self._signals.release(ignore_sigterm=self.trainer.failed and several)
        if not self.trainer.failed:
            atexit.unregister(_ignore_stop_signals)  # by an earlier run
            atexit.register(_ignore_stop_signals)


@HOOK_REGISTRY.register()
class TimeLimit(HookBase):
    """Stops training before a time limit, early enough to save a checkpoint.

    After each step it checks that the longest step so far, with the evaluation and checkpoint in it, and another
    checkpoint still fit before the limit, and ``margin``. If they do not, training stops with exit code 75 and saves a
    checkpoint. The first step is not measured, since it includes compilation and loading. Has no state: a resumed run
    has the whole limit again.

    Args:
        limit: a time, such as ``"2h"``.
        margin: extra time for what has not been measured: the first evaluation or checkpoint, the end of the program.
            Default: a twentieth of the limit, at most a minute.
        since: when the limit starts: "train", at the start of training; "process", when this process imported
            hookline, as a cluster counts a job's limit.

    Raises:
        ConfigError: ``limit`` or ``margin`` is not a time, or ``limit`` is not larger than ``margin`` and 0.
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
        self._since = since
        self.margin = min(seconds / 20, 60.0) if margin is None else Duration.parse_time(margin).seconds
        if self.margin >= seconds:
            raise ConfigError(f"TimeLimit: the margin, {self.margin:g} s, is not smaller than the limit, {self.limit}")

    def before_train(self) -> None:
        start = _IMPORTED if self._since == "process" else time.monotonic()
        self._end = start + self.limit.seconds - self.margin
        self._last: float | None = None  # the end of the last step
        self._longest_step = self._longest_save = 0.0

    def after_step(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        if now + self._longest_step + self._longest_save > self._end:
            self.trainer.request_stop(f"the time limit of {self.limit} is near", EXIT_RESUMABLE)

    def before_save(self, path: str) -> None:
        self._save_start = time.monotonic()

    def after_save(self, path: str) -> None:
        self._longest_save = max(self._longest_save, time.monotonic() - self._save_start)
