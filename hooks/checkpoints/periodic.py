"""Checkpoints every period, at the end and after a failure, by hookline's checkpointer or fvcore's."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fvcore.common.checkpoint import PeriodicCheckpointer as FvcorePeriodicCheckpointer

from ...config import ConfigError, Duration
from ...config.files.atomic import shown_path
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every, Period

__all__ = ["ExceptionCheckpointer", "FvcoreAdapter", "PeriodicCheckpointer", "RollingCheckpointer", "adapt"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(HookBase):
    """Saves ``<prefix>_0000999`` every ``period`` and on request, and ``<prefix>_final`` when the run has ended.

    It acts at the end of a step, after every other hook and after metrics are written, wherever it stands in the list.
    So a checkpoint has the state of all hooks after the step, and the files have all metrics before it. An
    interrupted run (a signal, a time limit) is saved under its iteration; a failed run is not saved here. The list
    of kept checkpoints is saved too.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer` (or fvcore's).
        period: a duration, in iterations, epochs or time; 0: only on request and at the end.
        max_iter: ignored; accepted for compatibility with detectron2.
        max_to_keep: how many periodic checkpoints to keep, the most recent ones; None: all. The final and the best
            checkpoints do not count. An old checkpoint is removed after the new one is written.
        file_prefix: prefix of the file names.

    Raises:
        ConfigError: ``max_to_keep`` is less than 1.
    """

    _log_level = logging.INFO
    period = Period()
    _due_at = -1

    def __init__(
        self,
        checkpointer: Any,
        period: "Duration | int | str",
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ConfigError(f"max_to_keep must be at least 1, or None to keep all; got {max_to_keep}")
        self.checkpointer = adapt(checkpointer)
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.recent_checkpoints: list[str] = []
        # Files to remove with the next save. In the state, so that a resumed run removes them too.
        self._outdated: list[str] = []
        self._every = Every(period)
        self._ending = self._interrupted = False
        self._saved_iter = -1
        self._final_failed = False  # the final save failed
        self._periodic: FvcorePeriodicCheckpointer | None = None

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._ending = False
        self._saved_iter = self._due_at = -1
        self._scheduled = False
        self._error: OSError | None = None
        self._every.start()
        self._poll = self.checkpointer.poll

    def after_step(self) -> None:
        self._poll()  # finishes an asynchronous save that has ended
        if self._every(self.trainer):
            self._due_at = self.trainer.iter
            self.trainer.request_save(everywhere=True, due=True)

    def after_train(self) -> None:
        trainer = self.trainer
        self._ending = True
        self._interrupted = trainer.interrupted  # an error after this does not change the checkpoint's name
        has_news = trainer.finished_iter >= trainer.start_iter or self._final_failed or self._only_final_is_missing()
        if not trainer.failed and has_news:
            trainer.request_save()
        else:
            self.checkpointer.wait()

    def _only_final_is_missing(self) -> bool:
        """Return whether the earlier run was killed after its last step, before its final checkpoint was written."""
        trainer, resumed_from = self.trainer, os.path.basename(self.checkpointer.resumed_from)
        done = trainer.finished_iter + 1 == trainer.max_iter or getattr(trainer, "stopped", False)
        return done and resumed_from not in ("", f"{self.file_prefix}_final.pth")

    def on_save(self) -> None:
        trainer = self.trainer
        if trainer.only_due and self._due_at != trainer.iter:
            return
        iteration = trainer.finished_iter
        if self._ending and not self._interrupted:
            self._final_failed = True
            self._save_final(iteration)
        elif not self._ending:
            self._save_periodic(iteration)
        else:
            self.checkpointer.wait()  # the last step's save may be under way
            if self._saved_iter != iteration:
                self._save_periodic(iteration)
        if self._ending:
            self.checkpointer.wait()
            if self._error is not None:  # there is no later save, so this ends the run whatever on_error says
                raise self._error
            self._final_failed = False

    def after_run(self) -> None:
        self.checkpointer.close()

    # ------------------------------------------------------------------ for subclasses with a schedule of their own

    def step(self, iteration: int, **kwargs: Any) -> None:
        """Save at once if ``iteration`` ends a period, or is the last one: fvcore's method, for ported code.

        Args:
            iteration: the iteration, from 0.
            **kwargs: more data to save.
        """
        period = self._every.period.iterations(None) or sys.maxsize
        if self._periodic is None:
            args = (self.checkpointer, period, self.max_iter, self.max_to_keep, self.file_prefix)
            self._periodic = FvcorePeriodicCheckpointer(*args)
        self._periodic.period = period  # it may have been set since
        self._periodic.step(iteration, **kwargs)

    def _save_periodic(self, iteration: int) -> None:
        name = f"{self.file_prefix}_{iteration:07d}"
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        if self.max_to_keep is not None:
            # Before the save, so that the checkpoint has the list as it is after the save.
            kept = [*(p for p in self.recent_checkpoints if p != path), path]
            self._outdated += kept[: -self.max_to_keep]
            self.recent_checkpoints = kept[-self.max_to_keep :]
        outdated = [old for old in self._outdated if old != path]

        def then(error: OSError | None) -> None:
            if error is not None:  # nothing was removed
                self.recent_checkpoints = [kept for kept in self.recent_checkpoints if kept != path]
                return
            self._saved_iter = iteration
            self._outdated = [old for old in self._outdated if old not in outdated and old != path]

        self._save(name, then, outdated, iteration=iteration)

    def _save_final(self, iteration: int) -> None:
        # A run killed after its last periodic checkpoint may have left outdated files.
        outdated = list(self._outdated)

        def then(error: OSError | None) -> None:
            if error is None:
                self._outdated = [old for old in self._outdated if old not in outdated]

        self._save(f"{self.file_prefix}_final", then, outdated, iteration=iteration)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now, outside the schedule.

        Args:
            name: file name without folder and extension.
            **kwargs: more data to save.
        """
        self._save(name, lambda error: None, (), **kwargs)

    def _save(self, name: str, then: Callable[[OSError | None], Any], outdated: Sequence[str], **kwargs: Any) -> None:
        trainer = self.trainer
        if not self.checkpointer.save_dir:  # a checkpointer that only loads
            then(None)
            return
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            then(error)
            self._error = error
            if error is None:
                logger.log(self._log_level, "Saved %s", shown_path(path))
                trainer.emit("after_save", path)

        self.checkpointer.save(name, then=saved, outdated=outdated, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        # Names, not paths: a run's folder may be moved.
        return {"recent_checkpoints": _names(self.recent_checkpoints), "outdated": _names(self._outdated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recent_checkpoints = self._paths(state_dict["recent_checkpoints"])
        self._outdated = self._paths(state_dict.get("outdated", []))

    def _paths(self, names: Sequence[str]) -> list[str]:
        return [os.path.join(self.checkpointer.save_dir, name) for name in names]


def _names(paths: Sequence[str]) -> list[str]:
    return [os.path.basename(path) for path in paths]


@HOOK_REGISTRY.register()
class RollingCheckpointer(PeriodicCheckpointer):
    """Saves ``rolling_0000999`` every ``period``, and keeps the newest ``keep`` of them.

    A run needs few of these full checkpoints for a replay near its last step (``hookline replay``), and for a resume
    that repeats few steps: it takes the newest checkpoint, rolling or not. A step in which the PeriodicCheckpointer
    saves, and the end of the run, have no rolling one.

    Args:
        checkpointer: that of the run's PeriodicCheckpointer.
        period: a duration, in iterations, epochs or time.
        keep: how many to keep.

    Raises:
        ConfigError: ``keep`` is less than 1.
    """

    single = True
    _log_level = logging.DEBUG

    def __init__(self, checkpointer: Any, period: "Duration | int | str" = 200, keep: int = 1) -> None:
        if keep < 1:
            raise ConfigError(f"RollingCheckpointer: keep must be at least 1, not {keep}")
        super().__init__(checkpointer, period, max_to_keep=keep, file_prefix="rolling")

    def after_step(self) -> None:
        if self._every(self.trainer) and self.trainer.iter + 1 < self.trainer.max_iter:
            self._scheduled = True
            self.trainer.request_save(everywhere=True, extra=True)

    def on_save(self) -> None:
        self._scheduled = False  # the PeriodicCheckpointer saves

    def on_extra_save(self) -> None:
        if self._scheduled:
            self._scheduled = False
            self._save_periodic(self.trainer.finished_iter)

    def after_train(self) -> None:
        """Do nothing: the PeriodicCheckpointer saves the end."""


@HOOK_REGISTRY.register()
class ExceptionCheckpointer(HookBase):
    """Saves ``<file_name>.pth`` when a run fails, if the weights are those of a finished step.

    This is so if the failure comes before the update of its step or in a hook after the step. If it comes during the
    update or between the update and the end of the step, nothing is saved. To tell, the hook needs the event
    ``before_optimizer_step`` of :class:`~hookline.engine.SimpleTrainer`.

    The file is for inspection, and for a resume if there is no better checkpoint. It has the weights and optimizer of
    the last finished iteration, but the failed step has drawn random numbers and batches, may have changed batch norm
    statistics, and may have called only some of the hooks. So ``last_checkpoint`` does not point to it, and
    ``--resume`` stays exact. A second Ctrl-C saves nothing.

    Only the main rank saves, and only if it fails itself. The state of a sharded model (FSDP2) is not saved, since it
    takes all ranks.

    Args:
        checkpointer: saves the state.
        file_name: file name without extension.
    """

    def __init__(self, checkpointer: Any, file_name: str = "model_exception") -> None:
        self._checkpointer = adapt(checkpointer)
        self._file_name = file_name

    def before_train(self) -> None:
        self._updating = -1
        self._exact = False

    def before_optimizer_step(self) -> None:
        self._updating = self.trainer.iter

    def on_exception(self, error: BaseException) -> None:
        trainer = self.trainer
        in_step = trainer.iter != trainer.finished_iter
        # After an error about NaN the weights may be NaN.
        nan = isinstance(error, FloatingPointError)
        untouched = self._updating == trainer.finished_iter if in_step else not nan
        self._exact = isinstance(error, Exception) and trainer.finished_iter >= trainer.start_iter and untouched
        if isinstance(error, Exception) and not self._exact:
            logger.info("The state at the failure is not saved: it is not the state of a finished step of this run")

    def after_train(self) -> None:  # not earlier: hooks may restore weights in on_exception
        if not self.trainer.failed or not self._exact:
            return
        if self._checkpointer.needs_all_ranks:
            logger.info("The state at the failure is not saved: it takes all ranks")
            return
        trainer, path = self.trainer, os.path.join(self._checkpointer.save_dir, f"{self._file_name}.pth")
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is None:
                logger.warning(
                    "Saved the state at the failure, after iteration %d, as %s. --resume continues from the last "
                    "regular checkpoint; to continue from this one, write its name into last_checkpoint",
                    trainer.finished_iter,
                    path,
                )
                trainer.emit("after_save", path)

        self._checkpointer.save(self._file_name, then=saved, tag_last=False, iteration=trainer.finished_iter)
        self._checkpointer.wait()


# ---------------------------------------------------------------------------- fvcore's checkpointer


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
        inner = self._checkpointer
        # fvcore points last_checkpoint to every file it writes.
        last = "" if tag_last or not inner.has_checkpoint() else inner.get_checkpoint_file()
        inner.save(name, **data)
        if last:
            inner.tag_last_checkpoint(os.path.basename(last))
        for path in outdated:
            self.remove(path)
        if then is not None:
            then(None)

    def remove(self, path: str) -> None:
        if self._checkpointer.path_manager.exists(path):
            self._checkpointer.path_manager.rm(path)

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
        inner = self._checkpointer
        if strict:
            raise ConfigError(f"MODEL.WEIGHTS_STRICT needs hookline's Checkpointer; the trainer's is {type(inner)}")
        self.resumed_from = inner.get_checkpoint_file() if resume and inner.has_checkpoint() else ""
        content: dict[str, Any] = inner.resume_or_load(path, resume=resume)
        return content

    def poll(self) -> None:
        """Do nothing, as :meth:`wait` and :meth:`close`: no save is under way."""

    wait = close = poll
