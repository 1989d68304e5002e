"""How a run ends: the requests to stop it, its result, and its errors."""

import logging
import os
import sysconfig
import traceback
from dataclasses import dataclass, field
from typing import Self

from ..config import ConfigError
from ..hooks.event_storage import EventStorage

logger = logging.getLogger(__name__)

_ROOT = os.path.dirname(os.path.dirname(__file__))
# The folders of code that is not the user's.
_LIBRARIES = ("<frozen ", *(os.path.join(_ROOT, room, "") for room in ("config", "hooks", "engine")))
_LIBRARIES += tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: "completed", or the argument of ``request_stop``.
        iteration: number of finished iterations, including those before a resume.
        metrics: the last value of every metric.
        exit_code: for the program: 0, or that of ``request_stop`` if the run should be resumed (see docs/errors.md).
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0

    @classmethod
    def of(cls, stop: "StopRequest | None", iteration: int, storage: EventStorage) -> Self:
        """Return the result of a run that was stopped, or completed if ``stop`` is None."""
        metrics = {name: value for name, (value, _) in storage.latest().items()}
        if stop is None:
            return cls("completed", iteration, metrics)
        return cls(stop.reason, iteration, metrics, stop.exit_code)


@dataclass(frozen=True)
class StopRequest:
    """A request to stop training.

    Attributes:
        reason: why, for the log and the result.
        exit_code: not 0 if the run is only interrupted and should be resumed.
    """

    reason: str
    exit_code: int = 0

    def instead_of(self, earlier: "StopRequest | None") -> "StopRequest":
        """Return this request, or an earlier one: only a stop on purpose replaces that, and only an interruption.

        If early stopping and an interruption fall into the same step, a resumed run must not continue training.
        """
        return self if earlier is None or (earlier.exit_code and not self.exit_code) else earlier

    def as_error(self, trainer: str) -> BaseException:
        """Return what ends the loop of a trainer that does not look at ``stop_requested``."""
        if self.exit_code:
            return SystemExit(self.exit_code)
        return RuntimeError(
            f"{self.reason}: the run ends with its final checkpoint, and this error ends the training loop of "
            f"{trainer}; to do without it, let the loop check self.stop_requested"
        )


def log_error(error: BaseException, iteration: int) -> None:
    """Log what ended training, and add the user's last line to an error that a library raised, as its last line.

    The console gets the message alone, as Python shows the traceback when the program ends, with that of a worker.
    """
    kind = type(error).__name__
    if not isinstance(error, Exception):
        logger.warning("%s ended training at iteration %d", kind, iteration)
        return
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if users and users[-1] is not frames[-1]:
        last = users[-1]
        error.add_note(f'your line: File "{last.filename}", line {last.lineno}, in {last.name}: {last.line}')
    text = f"Exception during training, at iteration {iteration}"
    message = str(error).partition("\nOriginal Traceback")[0]
    level = logging.DEBUG if isinstance(error, ConfigError) else logging.ERROR  # a ConfigError's message is enough
    logger.log(level, text, exc_info=error, extra={"console": f"{text}: {kind}: {message}"})


def as_failure(error: SystemExit, iteration: int) -> RuntimeError:
    """Return an error for a ``sys.exit(0)`` during training, which would look like a run that completed."""
    failure = RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called at iteration {iteration}, before the run had "
        "ended. To stop training, call trainer.request_stop(reason)"
    )
    failure.__cause__ = error
    for note in getattr(error, "__notes__", ()):  # the name of the hook
        failure.add_note(note)
    return failure


def not_called(trainer: str, method: str) -> ConfigError:
    """Return an error for a method of TrainerBase that a subclass's loop, or its own method of the name, leaves out."""
    return ConfigError(
        f"{trainer}.{method}() does not reach TrainerBase.{method}(), without which steps are not counted and nothing "
        f"is saved: call self.{method}() in the loop, and super().{method}() in a {method}() of your own"
    )
