"""When checkpoints are written, and which are kept."""

import inspect
import logging
import math
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal

from ..config import Duration, suggest
from .base import HOOK_REGISTRY, Every, HookBase
from .events import has_event_storage

__all__ = ["BestCheckpointer", "PeriodicCheckpointer"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(HookBase):
    """Saves ``<prefix>_0000999`` every ``period``, and ``<prefix>_final`` when training ends in good order.

    It acts at the very end of a step, after every other hook and after metrics were written: what it saves is the
    state all hooks are in, and no metric that belongs before the checkpoint is missing from the files. Its place
    in the list of hooks makes no difference. Saves the list of checkpoints it keeps.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer` (or fvcore's).
        period: a duration.
        max_iter: accepted for detectron2's sake; the trainer's is used.
        max_to_keep: keep only so many of the periodic checkpoints, the newest; None keeps all.
        file_prefix: how the names begin.
    """

    def __init__(
        self,
        checkpointer: Any,
        period: "Duration | int | str",
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None to keep all; got {max_to_keep}")
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.recent_checkpoints: list[str] = []
        self._every = Every(period)
        self._ending = False

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._ending = False
        self._every.start()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self.trainer.request_save()

    def after_train(self) -> None:
        trainer = self.trainer
        self._ending = True
        if not trainer.failed and trainer.finished_iter >= trainer.start_iter:
            trainer.request_save()

    def on_save(self) -> None:
        iteration = self.trainer.finished_iter
        if self._ending:
            self.save(f"{self.file_prefix}_final", iteration=iteration)
            return
        name = f"{self.file_prefix}_{iteration:07d}"
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        old: list[str] = []
        if self.max_to_keep is not None:
            # Before the save, so that the checkpoint's own list is the one that holds after it.
            kept = [*(p for p in self.recent_checkpoints if p != path), path]
            old, self.recent_checkpoints = kept[: -self.max_to_keep], kept[-self.max_to_keep :]
        self.save(name, iteration=iteration)
        for outdated in old:
            if self.checkpointer.path_manager.exists(outdated):
                self.checkpointer.path_manager.rm(outdated)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now, outside the schedule; arguments as for ``Checkpointer.save``."""
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        self.trainer.emit("before_save", path)
        self.checkpointer.save(name, **kwargs)
        logger.info("Saved %s", path)
        self.trainer.emit("after_save", path)

    def state_dict(self) -> dict[str, Any]:
        # Names, not paths: a run's folder may be moved.
        return {"recent_checkpoints": [os.path.basename(path) for path in self.recent_checkpoints]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = state_dict["recent_checkpoints"]
        self.recent_checkpoints = [os.path.join(self.checkpointer.save_dir, name) for name in names]


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Keeps the weights with the best value of a metric, as ``<file_prefix>.pth``.

    Looks at the metric after each evaluation, and every ``eval_period``. NaN is never best. ``last_checkpoint``
    is left alone: a resume goes on from where training was, not from the best. Saves the best value and its place.

    Args:
        eval_period: a duration; 0: only after evaluations.
        checkpointer: saves the weights.
        val_metric: the metric's full name in the storage, such as ``"digits_test/accuracy"``.
        mode: whether more ("max") or less ("min") is better.
        file_prefix: name of the file, without its extension.
    """

    def __init__(
        self,
        eval_period: "Duration | int | str",
        checkpointer: Any,
        val_metric: str,
        mode: Literal["max", "min"] = "max",
        file_prefix: str = "model_best",
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f'mode must be "max" or "min", not {mode!r}')
        self._every = Every(eval_period)
        self._period = eval_period
        self._val_metric = val_metric
        self._compare = operator.gt if mode == "max" else operator.lt
        self._checkpointer = checkpointer
        self._file_prefix = file_prefix
        self.best_metric: float | None = None
        self.best_iter: int | None = None
        self._checked_iter: int | None = None
        self._warned = False

    def before_train(self) -> None:
        self._every.start()
        self._checked_iter = None

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if has_event_storage():  # an evaluation beside training is not for keeping weights by
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    def _best_checking(self) -> None:
        latest = self.trainer.storage.latest()
        if self._val_metric not in latest:
            self._warn(latest)
            return
        value, iteration = latest[self._val_metric]
        if iteration == self._checked_iter:
            return
        self._checked_iter = iteration
        if not math.isfinite(value):
            return
        if self.best_metric is not None and not self._compare(value, self.best_metric):
            logger.debug(
                "%s is %.5f; the best so far is %.5f, of iteration %d",
                self._val_metric,
                value,
                self.best_metric,
                self.best_iter,
            )
            return
        before = "" if self.best_metric is None else f" (before: {self.best_metric:.5g})"
        self.best_metric, self.best_iter = value, iteration
        path = self._save(iteration)
        logger.info("Best %s so far: %.5g%s, saved %s", self._val_metric, value, before, path)

    def _save(self, iteration: int) -> str:
        checkpointer = self._checkpointer
        path = os.path.join(checkpointer.save_dir, f"{self._file_prefix}.pth")
        self.trainer.emit("before_save", path)
        if "tag_last" in inspect.signature(checkpointer.save).parameters:
            checkpointer.save(self._file_prefix, tag_last=False, iteration=iteration)
        else:  # fvcore's points last_checkpoint at whatever it wrote
            last = checkpointer.get_checkpoint_file() if checkpointer.has_checkpoint() else ""
            checkpointer.save(self._file_prefix, iteration=iteration)
            if last:
                checkpointer.tag_last_checkpoint(os.path.basename(last))
        self.trainer.emit("after_save", path)
        return path

    def _warn(self, latest: Mapping[str, Any]) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "BestCheckpointer watches %r, which is not among the metrics put so far (%s)%s",
                self._val_metric,
                ", ".join(latest) or "none",
                suggest(self._val_metric, latest),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_metric, self.best_iter = state_dict["best_metric"], state_dict["best_iter"]
