"""The error for ``sys.exit(0)`` during training."""

import traceback

__all__ = ["as_failure"]


def as_failure(error: SystemExit, iteration: int) -> RuntimeError:
    """Return an error for a ``sys.exit(0)`` during training, which would look like a run that completed."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    failure = RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called at iteration {iteration} ({where}), before "
        "the run had ended. To stop training, call trainer.request_stop(reason)"
    )
    failure.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure
