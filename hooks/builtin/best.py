"""Keeping the best weights of a run."""

import logging
import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...config import ConfigError, Duration, suggest
from ...config.atomic import free_name, shown_path, temporary_path
from ...config.values import mode_of
from ..base import HOOK_REGISTRY, Every, HookBase, Period
from ..evaluation import Monitor, fit_names
from ..event_storage import has_event_storage
from ..fvcore_adapter import checked
from .periodic import save_with_events

logger = logging.getLogger(__name__)

Entry = tuple[float, int]
"""The value of a metric, and the iteration it was put at."""


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Keeps the weights with the best values of a metric.

    The best ``keep`` are ``<file_prefix>_<iteration>.pth``; ``<file_prefix>.pth`` is a link to the best of them. The
    metric is checked after each evaluation, and every ``eval_period``. NaN and infinity are never best.
    ``last_checkpoint`` never points to a best file.

    The list of the best is saved in checkpoints. A file that leaves the list is removed after the next checkpoint, so
    that a resumed run finds all files of its list. A resume drops entries whose files are missing, with a warning.

    Args:
        eval_period: a duration; 0: only after evaluations.
        checkpointer: saves the weights.
        val_metric: the metric's full name in the storage, such as ``"digits_test/accuracy"``, or a function of all
            metrics; see :class:`~hookline.hooks.evaluation.Monitor`.
        mode: whether more ("max") or less ("min") is better. "auto": as the metric's name says.
        file_prefix: name of the file, without its extension.
        keep: how many to keep.
        load_at_end: load the best weights into the model after a run that did not fail and was not interrupted.
        reset_on_train: forget the best values when training starts, also after a resume.

    A subclass may override ``_best_checking``, as in detectron2. It is called when the metric is checked.
    ``_update_best`` records what it has saved itself.

    Raises:
        ConfigError: ``mode`` or ``keep`` is invalid, or the checkpointer saves to a URI.
    """

    _period = Period()
    _logger = logger  # detectron2's name

    def __init__(
        self,
        eval_period: "Duration | int | str",
        checkpointer: Any,
        val_metric: str | Callable[[Mapping[str, float]], float | None],
        mode: Literal["max", "min", "auto"] = "max",
        file_prefix: str = "model_best",
        keep: int = 1,
        load_at_end: bool = False,
        reset_on_train: bool = False,
    ) -> None:
        if mode not in ("max", "min", "auto"):
            raise ConfigError(f'BestCheckpointer: mode must be "max", "min" or "auto", not {mode!r}')
        if keep < 1:
            raise ConfigError(f"BestCheckpointer: keep must be at least 1, not {keep}")
        self._checkpointer = checked(checkpointer)
        if "://" in checkpointer.save_dir:
            raise ConfigError(f"BestCheckpointer needs a local folder, not {checkpointer.save_dir}")
        self._every = Every(eval_period)
        self._monitor = Monitor(val_metric)
        self._val_metric = self._monitor.name
        self._reset_on_train = reset_on_train
        self._mode = mode_of(self._val_metric, mode)
        self._compare = operator.gt if self._mode == "max" else operator.lt  # for subclasses, as in detectron2
        self._file_prefix = file_prefix
        self._keep = keep
        self._load_at_end = load_at_end
        self.best: list[Entry] = []
        """The best as (value, iteration), in order."""
        self.best_metric: float | None = None
        """The best value so far."""
        self.best_iter: int | None = None
        """The iteration of the best value."""
        # Iterations of the files that this run has written. In the state, so that a resumed run removes them too.
        self._written: set[int] = set()
        self._checked: Entry | None = None
        self._at_start: Entry | None = None
        self._warned = False
        self.loaded_iter: int | None = None
        """The iteration whose weights were loaded at the end; None: none were."""

    # ------------------------------------------------------------------ events

    def before_train(self) -> None:
        self._every.start()
        self._checked = self._at_start = self.loaded_iter = None
        if self.trainer.start_iter and self._monitor.function is None:
            self._at_start = self._monitor.value(self.trainer)
        if self._reset_on_train:
            self.reset_state()
        if self._writes and (missing := [entry for entry in self.best if not os.path.exists(self._path(entry[1]))]):
            logger.warning("The files of these best (%s, iteration) are missing: %s", self._val_metric, missing)
            self._set_best([entry for entry in self.best if entry not in missing])
        if self._checkpointer.needs_all_ranks:  # all ranks must keep the same list
            self._set_best(self.trainer.comm.broadcast_object(self.best))
        self._link_best()

    def after_eval(self, results: Mapping[str, object]) -> None:
        if has_event_storage():  # not so for an evaluation outside training
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    def after_save(self, path: str) -> None:
        if len(self._written) == len(self.best) or not self._writes:
            return
        # Only now: a resume starts from this file, whose list does not have the others.
        if os.path.basename(self._checkpointer.get_checkpoint_file()) == os.path.basename(path):
            listed = {iteration for _, iteration in self.best}
            for iteration in self._written - listed:
                self._checkpointer.remove(self._path(iteration))
            self._written &= listed

    def after_run(self) -> None:
        trainer = self.trainer
        self._checkpointer.wait()
        if self._load_at_end and not trainer.failed and not trainer.interrupted:
            trainer.comm.synchronize()  # another rank writes
            self.load_best()

    def load_best(self) -> None:
        """Load the best weights into the model, if ``load_at_end`` is set."""
        if not self._load_at_end:
            return
        name = self._val_metric
        if not self.best:
            logger.warning("There are no best weights to load at the end: %s has had no finite value", name)
            return
        path = self._path(self.best[0][1])
        # The averaged weights, if a hook had those evaluated.
        content = self._checkpointer.load(path, checkpointables=[], weights_from="auto")
        if (loss := getattr(self.trainer, "loss_module", None)) is not None:
            loss.load_from(content)
        self.trainer.emit("after_load_best")
        value, self.loaded_iter = self.best[0]
        logger.info("The model has the best weights, of iteration %d, %s: %.5g", self.loaded_iter, name, value)

    # ------------------------------------------------------------------ choosing

    def _set_best(self, best: list[Entry]) -> None:
        self.best = best
        self.best_metric, self.best_iter = best[0] if best else (None, None)

    def _update_best(self, val: float, iteration: int) -> bool:
        """Record a best value, unless it is NaN or infinite; return whether it is recorded. For subclasses."""
        if not math.isfinite(val):
            return False
        self.best_metric, self.best_iter = val, iteration
        return True

    def _best_checking(self) -> None:
        found = self._monitor.value(self.trainer)
        if found is None:
            latest = self.trainer.storage.latest()
            if self._monitor.function is None and not self._warned:
                logger.warning(
                    "BestCheckpointer watches %r, which is not among the metrics so far (%s)%s",
                    self._val_metric,
                    ", ".join(latest) or "none",
                    suggest(self._val_metric, latest),
                )
                self._warned = True
            return
        value, iteration = found
        trainer = self.trainer
        weights_are_gone = iteration < trainer.start_iter or trainer.finished_iter >= trainer.start_iter
        if found == self._checked or (found == self._at_start and weights_are_gone):
            return
        self._checked = found
        if not math.isfinite(value) or found not in self._with(found):
            logger.debug("%s is %.5f; the best so far: %s", self._val_metric, value, self.best)
            return
        self._checkpointer.wait()  # a failed save removes its entry from the list
        former, best, path = self.best, self._with(found), self._path(iteration)
        self._set_best(best)
        self._written.add(iteration)

        def saved(error: OSError | None) -> None:
            if error is not None:
                self._set_best(former)
            elif best[0] == found:
                self._link_best()

        save_with_events(
            self.trainer,
            self._checkpointer,
            os.path.basename(path).removesuffix(".pth"),
            saved,
            tag_last=False,
            iteration=iteration,
            best_metric={"name": self._val_metric, "value": value, "mode": self._mode},
        )
        message = "Best {} so far: " if best[0] == found else "{}, one of the best: "
        message += f"{value:.5g}, saved {{}}"
        names = self._val_metric, shown_path(path)
        logger.info("%s", message.format(*names), extra={"console": fit_names(message, *names)})

    def _with(self, entry: Entry) -> list[Entry]:
        """Return the list of the best with another entry, if that is one of them; after equal ones."""
        others = [one for one in self.best if one[1] != entry[1]]  # a resumed run may evaluate an iteration again
        index = sum(not self._compare(entry[0], value) for value, _ in others)
        return [*others[:index], entry, *others[index:]][: self._keep]

    # ------------------------------------------------------------------ files

    @property
    def _writes(self) -> bool:
        return bool(self._checkpointer.save_dir) and self._checkpointer.save_to_disk

    def _path(self, iteration: int | None = None) -> str:
        name = self._file_prefix if iteration is None else f"{self._file_prefix}_{iteration:07d}"
        return os.path.join(self._checkpointer.save_dir, f"{name}.pth")

    def _link_best(self) -> None:
        """Make ``<file_prefix>.pth`` a link to the best file. A kill leaves either the old link or the new one."""
        if not self.best or not self._writes:
            return
        path = self._path()
        if os.path.lexists(path) and not os.path.islink(path):  # a person's, or a copy of a run without its links
            os.rename(path, other := free_name(path))
            logger.warning("%s is not a link to one of the best. It is now %s", path, other)
        temporary = temporary_path(path)
        os.symlink(os.path.basename(self._path(self.best[0][1])), temporary)
        os.replace(temporary, path)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
            "best": list(map(list, self.best)),
            "written": sorted(self._written),
            "metric": [self._val_metric, self._mode],
        }

    def reset_state(self) -> None:
        self._set_best([])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded_iter = None
        self._set_best([(float(value), int(iteration)) for value, iteration in state_dict["best"]])
        written = state_dict.get("written")
        if written is None:  # an earlier version named only those that are not in the list any more
            written = [*state_dict["outdated"], *(iteration for _, iteration in self.best)]
        self._written = set(map(int, written))
        if not self.best:  # a subclass has chosen by itself
            self.best_metric, self.best_iter = state_dict["best_metric"], state_dict["best_iter"]
        metric = [self._val_metric, self._mode]
        if state_dict["metric"] != metric:
            logger.warning(
                "The best weights were chosen by %s (%s), and are chosen by %s (%s) from now on. The files of the "
                "former best are kept",
                *(*state_dict["metric"], *metric),
            )
            self._written = set()
            self._set_best([])
