"""fvcore's Checkpointer, and those that projects derive from it, for hooks and trainers."""

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ..config import ConfigError


class FvcoreAdapter:
    """Gives a checkpointer with fvcore's methods those of :class:`~hookline.engine.checkpoint.Checkpointer`.

    It saves and loads as it does by itself: in place, at once, without verification. Only the main rank saves.

    Args:
        checkpointer: fvcore's, or a subclass of it. Other attributes are its own.
    """

    needs_all_ranks = False

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer
        self.resumed_from = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    @property
    def save_to_disk(self) -> bool:
        main = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        return main and getattr(self._checkpointer, "save_to_disk", True)

    def save(
        self, name: str, *, tag_last: bool = True, outdated: Iterable[str] = (), then: Any = None, **kwargs: Any
    ) -> None:
        inner = self._checkpointer
        if self.save_dir and not self.save_to_disk and getattr(inner, "needs_all_ranks", False):
            inner.save(name, **kwargs)
        elif self.save_dir and self.save_to_disk:
            tag = os.path.join(self.save_dir, "last_checkpoint")
            last = self.get_checkpoint_file() if self.has_checkpoint() else ""
            inner.save(name, **kwargs)
            getattr(inner, "wait", self.wait)()  # hookline's may save in a thread, which sets last_checkpoint
            if not tag_last and last:
                self.tag_last_checkpoint(os.path.basename(last))
            elif not tag_last and self.has_checkpoint():
                self.path_manager.rm(tag)
            for old in outdated:
                self.remove(old)
        if then is not None:
            then(None)

    def remove(self, path: str) -> None:
        inside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(self.save_dir)
        if inside and path.endswith(".pth") and self.path_manager.isfile(path):
            self.path_manager.rm(path)

    def poll(self) -> None:
        """Do nothing, as :meth:`wait`: a save is complete when it returns."""

    wait = poll

    def fetch(self, path: str) -> str:
        return str(self.path_manager.get_local_path(path))

    def load(
        self, path: str, checkpointables: Any = None, *, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        if strict or weights_from == "averaged":
            raise ConfigError(
                f"MODEL.WEIGHTS_STRICT, MODEL.WEIGHTS_FROM: a {type(self._checkpointer).__name__} cannot do that; use "
                "hookline.engine.checkpoint.Checkpointer"
            )
        rest: dict[str, Any] = self._checkpointer.load(path, checkpointables)
        return rest

    def resume_or_load(self, path: str, *, resume: bool | str = True, **options: Any) -> dict[str, Any]:
        self.resumed_from = resume if isinstance(resume, str) else ""
        if resume is True and self.has_checkpoint():
            self.resumed_from = self.get_checkpoint_file()
        if self.resumed_from:
            return self.load(self.resumed_from)
        return self.load(path, checkpointables=[], **options)


def checked(checkpointer: Any) -> Any:
    """Return a checkpointer of hookline as it is, and one with fvcore's methods in a :class:`FvcoreAdapter`.

    Raises:
        ConfigError: it is neither.
    """
    if hasattr(checkpointer, "poll"):
        return checkpointer
    if missing := [name for name in ("save", "load", "save_dir") if not hasattr(checkpointer, name)]:
        raise ConfigError(
            f"the checkpointer is a {type(checkpointer).__name__} without {missing[0]}: use "
            "hookline.engine.checkpoint.Checkpointer, or fvcore's"
        )
    return FvcoreAdapter(checkpointer)
