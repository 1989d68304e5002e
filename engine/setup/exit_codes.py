"""Exit codes for config errors and signals."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ...config import ConfigError
from ...hooks.control.interruption import EXIT_AGAIN, EXIT_INTERRUPTED, INTERRUPTED_BY, is_session
from ..ranks.environment import launched_by_torchrun
from ..train_loop import TrainResult

__all__ = ["config_errors_exit", "exit_after_signal"]


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Turn a :class:`ConfigError` into its message and exit code 2, and Ctrl-C into exit code 130.

    Before and after training, SIGTERM and SIGUSR1 exit with 75 ("start it again"); during training
    :class:`~hookline.hooks.SignalHandler` handles them. Earlier handlers are restored at the end.
    """
    try:
        with _signals_exit():
            yield
    except ConfigError as error:
        if (
            not launched_by_torchrun() or os.environ["LOCAL_RANK"] == "0"
        ):  # other ranks of this machine have the same error
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            # That of a loader's worker has the worker's traceback before the message.
            message = str(error).rpartition("MismatchError: ")[2].rstrip()
            sys.stderr.write(f"error: {message}{notes}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


def exit_after_signal(result: TrainResult) -> None:
    """End the program if a signal ended training, as the signal would have done. A session goes on."""
    if result.exit_code and result.reason.startswith(INTERRUPTED_BY) and not is_session():
        raise SystemExit(result.exit_code)


@contextmanager
def _signals_exit() -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        os.write(
            2, f"{name}: saved checkpoints are intact; start again, with --resume if training had begun\n".encode()
        )
        raise SystemExit(EXIT_AGAIN)

    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers: dict[str, Any] = {"SIGTERM": leave, "SIGUSR1": leave, "SIGINT": signal.default_int_handler}
        for name, handler in handlers.items():
            number = getattr(signal, name, None)  # not every system has it
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # set by nohup and "&"
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
