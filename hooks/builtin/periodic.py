"""Checkpoints every period, at the end and after a failure."""

import logging
import os
import re
from collections.abc import Callable
from inspect import signature
from typing import Any

from ...config import ConfigError, Duration
from ...config.atomic import shown_path
from ..base import HOOK_REGISTRY, Every, HookBase, Period, for_subclasses
from ..fvcore_adapter import FvcoreAdapter, checked
from ..protocol import TrainerProtocol

logger = logging.getLogger(__name__)


def save_with_events(
    trainer: TrainerProtocol, checkpointer: Any, name: str, saved: Callable[[OSError | None], object], **options: object
) -> None:
    """Save a checkpoint between the events ``before_save`` and ``after_save``.

    Args:
        trainer: the trainer; None: without events.
        checkpointer: what :func:`checked` returned.
        name: file name without folder and extension.
        saved: called before ``after_save`` with None, or with the error that prevented the write.
        **options: as for :meth:`~hookline.engine.checkpoint.Checkpointer.save`.
    """
    path = os.path.join(checkpointer.save_dir, f"{name}.pth")
    if "then" not in signature(checkpointer.save).parameters:  # a subclass written for fvcore
        checkpointer = FvcoreAdapter(checkpointer)
    if trainer is not None:
        trainer.emit("before_save", path)

    def then(error: OSError | None) -> None:
        saved(error)
        if error is None and trainer is not None:
            trainer.emit("after_save", path)

    checkpointer.save(name, then=then, **options)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(HookBase):
    """Saves ``<prefix>_0000999`` every ``period`` and on request, and ``<prefix>_final`` when the run has ended.

    It saves in ``on_save``, after every other hook and after metrics are written, wherever it stands in the list.
    So a checkpoint has the state of all hooks after the step, and the files have all metrics before it. An
    interrupted run (a signal, a time limit) is saved under its iteration; a failed run is not saved here. The list
    of kept checkpoints is saved too.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`, or fvcore's.
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
        self.checkpointer = checked(checkpointer)
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.recent_checkpoints: list[str] = []
        self._every = Every(period)
        self._due = False  # whether the period ends with this step
        self._saved_iter = -1
        self._error: OSError | None = None

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._due, self._saved_iter, self._error = False, -1, None
        self._every.start()
        self._asynchronous = getattr(self.checkpointer, "asynchronous", False)  # fvcore's have no such attribute
        self._has_own_step = type(self).after_step is not PeriodicCheckpointer.after_step

    @for_subclasses
    def after_step(self) -> None:
        self._due = self._every(self.trainer)

    def on_save(self) -> None:
        trainer = self.trainer
        if self._asynchronous:
            self.checkpointer.poll()  # finishes a save that has ended
        if trainer.ending:
            self._save_last()
            return
        if not self._has_own_step:
            self._due = self._every(trainer)
        if self._due or "save" in trainer.requests:
            trainer.prepare_for("save")
            self._save_periodic(trainer.finished_iter)

    def _save_last(self) -> None:
        """Save at the end of the run, also without a new step: a run may be killed before its final checkpoint."""
        trainer = self.trainer
        self.checkpointer.wait()  # the last step's save may be under way
        if trainer.finished_iter < 0 or trainer.start_iter > trainer.max_iter:
            return
        if trainer.stopped and trainer.finished_iter < trainer.start_iter:  # at once, as EarlyStopping after a resume
            last = os.path.basename(self.checkpointer.get_checkpoint_file())
            if last.startswith(f"{self.file_prefix}_final"):
                return
        if not trainer.interrupted:
            self.save(f"{self.file_prefix}_final", iteration=trainer.finished_iter)
        elif self._saved_iter != trainer.finished_iter:
            self._save_periodic(trainer.finished_iter)
        self.checkpointer.wait()
        if self._error is not None:  # there is no later save, so this ends the run whatever on_error says
            raise self._error

    def after_run(self) -> None:
        self.checkpointer.wait()

    # ------------------------------------------------------------------ for subclasses with a schedule of their own

    @property
    def path_manager(self) -> Any:
        """The checkpointer's, as fvcore's class has it."""
        return self.checkpointer.path_manager

    def step(self, iteration: int, **kwargs: object) -> None:
        """Save at once if ``iteration`` ends a period, or is the last one: fvcore's method, for ported code.

        Args:
            iteration: the iteration, from 0.
            **kwargs: more data to save.
        """
        period = self._every.period.iterations(None)
        if period and (iteration + 1) % period == 0:
            self._save_periodic(iteration, **kwargs)
        if self.max_iter is not None and iteration + 1 >= self.max_iter:
            self.save(f"{self.file_prefix}_final", iteration=iteration, **kwargs)

    def _save_periodic(self, iteration: int, **kwargs: object) -> None:
        name = f"{self.file_prefix}_{iteration:07d}"
        if self.max_to_keep is not None:
            # Before the save, since the checkpoint holds the list. Those that it removes are in it too, so that a
            # resumed run removes what a killed one has left.
            path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
            self.recent_checkpoints = [*(kept for kept in self.recent_checkpoints if kept != path), path]
        self.save(name, iteration=iteration, **kwargs)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now, also outside of the schedule.

        Args:
            name: file name without folder and extension.
            **kwargs: more data to save.
        """
        if not self.checkpointer.save_dir:  # a checkpointer that only loads
            return
        path, outdated = os.path.join(self.checkpointer.save_dir, f"{name}.pth"), []
        if self.max_to_keep is not None and kwargs.get("tag_last", True):  # else they may be the last
            outdated = [old for old in self.recent_checkpoints[: -self.max_to_keep] if old != path]

        def saved(error: OSError | None) -> None:
            self._error = error
            gone = outdated if error is None else [path]
            self.recent_checkpoints = [kept for kept in self.recent_checkpoints if kept not in gone]
            if error is None:
                self._saved_iter = kwargs.get("iteration", self._saved_iter)
                logger.log(self._log_level, "Saved %s", shown_path(path))

        save_with_events(self.trainer, self.checkpointer, name, saved, outdated=outdated, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        # Names, not paths: a run's folder may be moved.
        return {"recent_checkpoints": list(map(os.path.basename, self.recent_checkpoints))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # They are removed later, and a file that somebody else made may have any names.
        own = re.compile(rf"{re.escape(self.file_prefix)}_[0-9]{{7,}}\.pth")
        names = [str(name) for name in state_dict["recent_checkpoints"]]
        self.recent_checkpoints = [
            os.path.join(self.checkpointer.save_dir, name) for name in names if own.fullmatch(name)
        ]


@HOOK_REGISTRY.register()
class RollingCheckpointer(PeriodicCheckpointer):
    """Saves ``rolling_0000999`` every ``period``, and keeps the newest ``keep`` of them.

    A run needs few of these full checkpoints for a replay near its last step (``hookline replay``), and for a resume
    that repeats few steps: it takes the newest checkpoint, rolling or not. The end of the run has no rolling one.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`, or fvcore's.
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

    def on_save(self) -> None:
        trainer = self.trainer
        if not trainer.ending and self._every(trainer) and trainer.iter + 1 < trainer.max_iter:
            trainer.prepare_for("save")
            self._save_periodic(trainer.finished_iter)


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
        self._checkpointer = checked(checkpointer)
        self._file_name = file_name

    def before_train(self) -> None:
        self._updating = -1
        self._exact = False

    def before_optimizer_step(self) -> None:
        self._updating = self.trainer.iter

    def on_exception(self, error: BaseException) -> None:
        trainer = self.trainer
        if trainer.iter == trainer.finished_iter:  # after the step; in an error about NaN, the weights may be NaN
            is_whole = not isinstance(error, FloatingPointError)
        else:
            is_whole = self._updating not in (-1, trainer.iter)  # -1: a run_step of one's own, without the event
        self._exact = isinstance(error, Exception) and trainer.finished_iter >= trainer.start_iter and is_whole

    def after_train(self) -> None:  # not earlier: hooks may restore weights in on_exception
        trainer = self.trainer
        if not trainer.failed:
            return
        if not self._exact or self._checkpointer.needs_all_ranks:
            logger.info("The state at the failure is not saved: it is not of a finished step, or takes all ranks")
            return
        path = os.path.join(self._checkpointer.save_dir, f"{self._file_name}.pth")

        def saved(error: OSError | None) -> None:
            if error is None:
                logger.warning(
                    "Saved the state at the failure, after iteration %d, as %s. --resume continues from the last "
                    "regular checkpoint; to continue from this one, write its name into last_checkpoint",
                    trainer.finished_iter,
                    path,
                )

        options = {"tag_last": False, "iteration": trainer.finished_iter}
        save_with_events(trainer, self._checkpointer, self._file_name, saved, **options)
        self._checkpointer.wait()
