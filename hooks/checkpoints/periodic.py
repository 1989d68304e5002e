"""When checkpoints are written, and which are kept."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every
from .adapter import adapt

__all__ = ["ExceptionCheckpointer", "PeriodicCheckpointer"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PeriodicCheckpointer(HookBase):
    """Saves ``<prefix>_0000999`` every ``period`` and on request, and ``<prefix>_final`` when the run has ended.

    It acts at the very end of a step, after every other hook and after metrics were written: what it saves is the
    state all hooks are in, and no metric that belongs before the checkpoint is missing from the files. Its place
    in the list of hooks makes no difference. A run that is interrupted (a signal, a time limit) is saved under the
    name of its iteration, as by period; one that fails is not saved here. Saves the list of checkpoints it keeps.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer` (or fvcore's).
        period: a duration, in iterations, epochs or time; 0: only on request and at the end.
        max_iter: accepted for detectron2's sake; the trainer's is used.
        max_to_keep: keep only so many of the periodic checkpoints, the newest; None keeps all. The last, the final
            and the best one are not among them, and always kept. An older one goes when the newer one is whole.
        file_prefix: how the names begin.

    Raises:
        ConfigError: ``max_to_keep`` is less than 1.
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
            raise ConfigError(f"max_to_keep must be at least 1, or None to keep all; got {max_to_keep}")
        self.checkpointer = adapt(checkpointer)
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.recent_checkpoints: list[str] = []
        # Those that are to go with the next save: so they do also after a run was killed before they went.
        self._outdated: list[str] = []
        self._every = Every(period)
        self._ending = False
        self._saved_iter = -1
        self._end_is_lost = False  # the final save failed

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter
        self._ending = False
        self._saved_iter = -1
        self._scheduled = self._may_be_made_up_for = False
        self._lost: OSError | None = None
        self._every.start()
        self._poll = self.checkpointer.poll

    def after_step(self) -> None:
        if self._poll():  # tells of asynchronous saves that have ended
            self._make_up_for_it()
        if self._every(self.trainer):
            self._scheduled = True
            self.trainer.request_save(everywhere=True)

    def _make_up_for_it(self) -> None:
        """Have what all ranks wrote parts of, in vain, be saved once more at the same step on all of them: once, as
        the next one that is due tells of this one's failure."""
        trainer = self.trainer
        if self._may_be_made_up_for and (trainer.ranks_in_sync or trainer.comm.get_world_size() == 1):
            trainer.request_save()

    def after_train(self) -> None:
        trainer = self.trainer
        self._ending = True
        has_news = trainer.finished_iter >= trainer.start_iter or self._end_is_lost or self._only_the_end_is_missing()
        if not trainer.failed and has_news:
            trainer.request_save()
        else:
            self.checkpointer.wait()

    def _only_the_end_is_missing(self) -> bool:
        """Whether there was no step left to do when this run began, and the one before was killed as it ended."""
        trainer, resumed_from = self.trainer, os.path.basename(self.checkpointer.resumed_from)
        done = trainer.finished_iter + 1 == trainer.max_iter or getattr(trainer, "stopped", False)
        return done and resumed_from not in ("", f"{self.file_prefix}_final.pth")

    def on_save(self) -> None:
        trainer = self.trainer
        self._may_be_made_up_for, self._scheduled = self._scheduled, False
        iteration = trainer.finished_iter
        if self._ending and not trainer.interrupted:
            self._end_is_lost = True
            self._save_final(iteration)
        elif not self._ending:
            self._save_periodic(iteration)
        else:
            self.checkpointer.wait()  # the last step's may be on its way
            if self._saved_iter != iteration:
                self._save_periodic(iteration)
        if self._ending:
            self.checkpointer.wait()
            if self._lost is not None:  # no next save will make up for it, whatever the checkpointer does about errors
                raise self._lost
            self._end_is_lost = False

    def after_run(self) -> None:
        self.checkpointer.close()

    def _save_periodic(self, iteration: int) -> None:
        name = f"{self.file_prefix}_{iteration:07d}"
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        if self.max_to_keep is not None:
            # Before the save, so that the checkpoint's own list is the one that holds after it.
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
        # A run that was killed after its last periodic checkpoint may have left files that were to go with it.
        outdated = list(self._outdated)

        def then(error: OSError | None) -> None:
            if error is None:
                self._outdated = [old for old in self._outdated if old not in outdated]

        self._save(f"{self.file_prefix}_final", then, outdated, iteration=iteration)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now, outside the schedule.

        Args:
            name: of the file, without folder or extension.
            **kwargs: further data to save.
        """
        self._save(name, lambda error: None, (), **kwargs)

    def _save(self, name: str, then: Callable[[OSError | None], Any], outdated: Sequence[str], **kwargs: Any) -> None:
        trainer = self.trainer
        path = os.path.join(self.checkpointer.save_dir, f"{name}.pth")
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            then(error)
            self._lost = error
            if error is None:
                logger.info("Saved %s", path)
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
class ExceptionCheckpointer(HookBase):
    """When a run fails, saves ``<file_name>.pth``, if its weights are those of a step that was finished.

    They are if the failure came before the update of its step, or in hooks after the step. If it came in the update
    or between the update and the step's end, nothing is saved: the weights are of no iteration. To be able to tell, it
    needs the event ``before_optimizer_step`` of :class:`~hookline.engine.SimpleTrainer`.

    The file is there to look into, and to go on from if no better one is left: it holds the last finished iteration's
    weights and optimizer, but random numbers and batches that the failed step has drawn are gone, statistics of batch
    normalisation may have seen its batch, and of several hooks only those before the failing one had their turn. So
    ``last_checkpoint`` is not made to point to it, and ``--resume`` stays exact. Ctrl-C twice saves nothing.

    Of several ranks the main one alone can save, if it fails. Of a sharded model (FSDP2) nothing is saved: a rank that
    fails cannot have the others write their parts.

    Args:
        checkpointer: saves the state.
        file_name: name of the file, without its extension.
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
        # Where an error about NaN comes after a step, the weights may be NaN.
        nan = isinstance(error, FloatingPointError)
        untouched = self._updating == trainer.finished_iter if in_step else not nan
        self._exact = isinstance(error, Exception) and trainer.finished_iter >= trainer.start_iter and untouched
        if isinstance(error, Exception) and not self._exact:
            logger.info("The state at the failure is not saved: it is not that of a step of this run that was finished")

    def after_train(self) -> None:  # not before: hooks may put weights back in on_exception
        if not self.trainer.failed or not self._exact:
            return
        if self._checkpointer.needs_all_ranks:
            logger.info("The state at the failure is not saved: other ranks would have to write their parts of it")
            return
        trainer, path = self.trainer, os.path.join(self._checkpointer.save_dir, f"{self._file_name}.pth")
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is None:
                logger.warning(
                    "Saved the state at the failure, after iteration %d, as %s. --resume goes on from the last "
                    "checkpoint before it, exactly; to go on from this one, write its name into last_checkpoint",
                    trainer.finished_iter,
                    path,
                )
                trainer.emit("after_save", path)

        self._checkpointer.save(self._file_name, then=saved, tag_last=False, iteration=trainer.finished_iter)
        self._checkpointer.wait()
