"""Lets hooks use fvcore's Checkpointer like hookline's."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from ...config import ConfigError

__all__ = ["FvcoreAdapter", "adapt"]


def adapt(checkpointer: Any) -> Any:
    """Return hookline's checkpointer as it is, fvcore's in a :class:`FvcoreAdapter`."""
    return checkpointer if hasattr(checkpointer, "poll") else FvcoreAdapter(checkpointer)


class FvcoreAdapter:
    """Gives fvcore's Checkpointer the methods of hookline's. All saves are synchronous, and errors are raised.

    Args:
        checkpointer: fvcore's. Attributes that are not defined here are its own.
    """

    needs_all_ranks = False
    resumed_from = ""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        outdated: Iterable[str] = (),
        then: Callable[[OSError | None], Any] | None = None,
        **data: Any,
    ) -> None:
        """Save a checkpoint, remove the files ``outdated``, then call ``then(None)``."""
        inner = self._checkpointer
        # fvcore points last_checkpoint to every file it writes.
        last = "" if tag_last or not inner.has_checkpoint() else inner.get_checkpoint_file()
        inner.save(name, **data)
        if last:
            inner.tag_last_checkpoint(os.path.basename(last))
        for path in outdated:
            if inner.path_manager.exists(path):
                inner.path_manager.rm(path)
        if then is not None:
            then(None)

    def load(self, path: str, checkpointables: list[str] | None = None, *, weights_from: str = "model") -> Any:
        """Load a checkpoint. ``weights_from`` is ignored: fvcore's files hold one set of weights."""
        return self._checkpointer.load(path, checkpointables)

    def resume_or_load(
        self, path: str, *, resume: bool = True, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        """Resume from the last checkpoint, or load ``path``. ``weights_from`` is ignored, as in :meth:`load`.

        Raises:
            ConfigError: ``strict``, which fvcore's Checkpointer does not have, is set.
        """
        if strict:
            raise ConfigError(
                f"MODEL.WEIGHTS_STRICT needs hookline's Checkpointer; the trainer's is {type(self._checkpointer)}"
            )
        inner = self._checkpointer
        self.resumed_from = inner.get_checkpoint_file() if resume and inner.has_checkpoint() else ""
        content: dict[str, Any] = inner.resume_or_load(path, resume=resume)
        return content

    def poll(self) -> bool:
        """Return False: no save is under way."""
        return False

    def wait(self) -> None:
        """Do nothing: no save is under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
