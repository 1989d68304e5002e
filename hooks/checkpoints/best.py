"""Keeping the best weights of a run."""

import logging
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal

from ...config import ConfigError, Duration, suggest
from ...config.files.atomic import displaced, replace_file, shown_path, sync_directory, temporary_path
from ...config.files.run_folder import claim
from ..base import HOOK_REGISTRY, HookBase
from ..evaluation import Monitor
from ..event_storage import has_event_storage
from ..every import Every, Period
from .periodic import adapt

__all__ = ["BestCheckpointer", "link"]

logger = logging.getLogger(__name__)

Entry = tuple[float, int]
"""The value of a metric, and the iteration it was put at."""


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Keeps the weights with the best values of a metric.

    The best ``keep`` are ``<file_prefix>_<iteration>.pth``; ``<file_prefix>.pth`` is a hard link to the best of them,
    or a copy where links are not possible. The metric is checked after each evaluation, and every ``eval_period``.
    NaN and infinity are never best. ``last_checkpoint`` never points to a best file.

    The list of the best is saved in checkpoints. A file that leaves the list is removed after the next checkpoint, so
    that a resumed run finds all files of its list. An entry whose file is missing is dropped with a warning. Files
    written after the checkpoint of a resume are not in its list, and go the same way.

    Args:
        eval_period: a duration; 0: only after evaluations.
        checkpointer: saves the weights.
        val_metric: the metric's full name in the storage, such as ``"digits_test/accuracy"``, or a function of all
            metrics; see :class:`~hookline.hooks.evaluation.Monitor`.
        mode: whether more ("max") or less ("min") is better.
        file_prefix: name of the file, without its extension.
        keep: how many to keep.
        load_at_end: load the best weights into the model after a run that did not fail and was not interrupted.
        reset_on_train: forget the best values when training starts, also after a resume.

    A subclass may override ``_best_checking``, as in detectron2. It is then called when detectron2 calls it: every
    ``eval_period``, and at the end of a run that did not fail. ``_update_best`` records what it has saved itself.

    Raises:
        ConfigError: ``mode`` or ``keep`` is invalid.
    """

    _period = Period()
    _logger = logger  # detectron2's name

    def __init__(
        self,
        eval_period: "Duration | int | str",
        checkpointer: Any,
        val_metric: str | Callable[[Mapping[str, float]], float | None],
        mode: Literal["max", "min"] = "max",
        file_prefix: str = "model_best",
        keep: int = 1,
        load_at_end: bool = False,
        reset_on_train: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f'BestCheckpointer: mode must be "max" or "min", not {mode!r}')
        if keep < 1:
            raise ConfigError(f"BestCheckpointer: keep must be at least 1, not {keep}")
        self._every = Every(eval_period)
        self._monitor = Monitor(val_metric)
        self._val_metric = self._monitor.name
        self._reset_on_train = reset_on_train
        self._mode = mode
        self._compare = operator.gt if mode == "max" else operator.lt
        self._checkpointer = adapt(checkpointer)
        self._file_prefix = file_prefix
        self._keep = keep
        self._load_at_end = load_at_end
        self.best: list[Entry] = []
        """The best as (value, iteration), in order."""
        self.best_metric: float | None = None
        """The best value so far."""
        self.best_iter: int | None = None
        """The iteration of the best value."""
        # Iterations whose files are to be removed. In the state, so that a resumed run removes them too.
        self._outdated: set[int] = set()
        self._removable: dict[str, set[int]] = {}  # those of them that are not listed in a checkpoint being written
        self._former: int | None = None  # iteration of the checkpoint's best, if chosen by another metric
        self._checked_iter: int | None = None
        self._first_iter = 0  # earlier values do not count: their weights are gone
        self._warned = False
        self.loaded_iter: int | None = None
        """The iteration whose weights were loaded at the end; None: none were."""

    # ------------------------------------------------------------------ events

    def before_train(self) -> None:
        self._every.start()
        self._checked_iter = self.loaded_iter = None
        self._first_iter = 0
        self._removable.clear()
        if self._reset_on_train:
            self.reset_state()
        if not self.trainer.start_iter:
            return
        if self._writes:
            self._compare_with_files()
        if self._checkpointer.needs_all_ranks:  # all ranks must keep the same list
            best, self._first_iter = self.trainer.comm.broadcast_object((self.best, self._first_iter))
            self._set_best(best)

    def after_eval(self, results: Mapping[str, Any]) -> None:
        # False for an evaluation outside training.
        if has_event_storage() and not (self._checks_itself and self._every.period):
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer) and not (self._checks_itself and self.trainer.iter + 1 == self.trainer.max_iter):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    @property
    def _checks_itself(self) -> bool:
        return type(self)._best_checking is not BestCheckpointer._best_checking

    def before_save(self, path: str) -> None:
        self._removable[path] = set(self._outdated)

    def after_save(self, path: str) -> None:
        removable = self._removable.pop(path, set())
        if not self._writes or os.path.basename(self._checkpointer.get_checkpoint_file()) != os.path.basename(path):
            return  # a resume does not start from this file
        for iteration in removable - self._listed:
            self._checkpointer.remove(self._path(iteration))
        self._outdated -= removable

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
        path = self._path()
        if not self.best or not self._checkpointer.path_manager.exists(path):
            logger.warning("There is no %s to load at the end: %s has had no finite value", path, self._val_metric)
            return
        # The averaged weights, if a hook had those evaluated.
        self._checkpointer.load(path, checkpointables=[], weights_from="auto")
        self.trainer.emit("after_load_best")
        value, self.loaded_iter = self.best[0]
        logger.info(
            "The model has the best weights now: %s, of iteration %d, %s: %.5g",
            path,
            self.loaded_iter,
            self._val_metric,
            value,
        )

    # ------------------------------------------------------------------ choosing

    @property
    def _listed(self) -> set[int]:
        return {iteration for _, iteration in self.best}

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
            if self._monitor.function is None:
                self._warn_once(self.trainer.storage.latest())
            return
        value, iteration = found
        if iteration == self._checked_iter or iteration in self._listed or iteration < self._first_iter:
            return
        self._checked_iter = iteration
        if not math.isfinite(value) or self._place(value) >= self._keep:
            logger.debug("%s is %.5f; the best so far: %s", self._val_metric, value, self.best)
            return
        self._checkpointer.wait()  # a failed save removes its entry from the list
        self._save(value, iteration)

    def _place(self, value: float) -> int:
        """The position of a value in the list, after equal ones."""
        return sum(not self._compare(value, other) for other, _ in self.best)

    def _save(self, value: float, iteration: int) -> None:
        trainer, place, former, path = self.trainer, self._place(value), self.best, self._path(iteration)
        ranked = [*former[:place], (value, iteration), *former[place:]]
        self._set_best(ranked[: self._keep])
        self._outdated = self._outdated - {iteration} | {old for _, old in ranked[self._keep :]}
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is not None:
                self._set_best(former)
                self._outdated -= self._listed
                return
            if place == 0:
                self._link_best()
            trainer.emit("after_save", path)

        self._checkpointer.save(
            os.path.basename(path).removesuffix(".pth"),
            then=saved,
            tag_last=False,
            iteration=iteration,
            best_metric={"name": self._val_metric, "value": value, "mode": self._mode},
        )
        if place == 0:
            before = f" (before: {former[0][0]:.5g})" if former else ""
            logger.info("Best %s so far: %.5g%s, saved %s", self._val_metric, value, before, shown_path(path))
        else:
            logger.info("%s is %.5g, number %d of the best, saved %s", self._val_metric, value, place + 1, path)

    def _warn_once(self, latest: Mapping[str, Any]) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "BestCheckpointer watches %r, which is not among the metrics so far (%s)%s",
                self._val_metric,
                ", ".join(latest) or "none",
                suggest(self._val_metric, latest),
            )

    # ------------------------------------------------------------------ files

    @property
    def _writes(self) -> bool:
        return bool(self._checkpointer.save_dir) and self._checkpointer.save_to_disk

    def _path(self, iteration: int | None = None) -> str:
        name = self._file_prefix if iteration is None else f"{self._file_prefix}_{iteration:07d}"
        return os.path.join(self._checkpointer.save_dir, f"{name}.pth")

    def _link_best(self) -> None:
        if self.best and self._writes:
            link(self._path(self.best[0][1]), self._path(), self._checkpointer.path_manager)

    def _compare_with_files(self) -> None:
        """On a resume: find files that are newer than the checkpoint, and drop entries of the list without a file."""
        manager, start = self._checkpointer.path_manager, self.trainer.start_iter
        names = []
        with suppress(OSError, NotImplementedError):  # some URIs cannot be listed
            names = manager.ls(self._checkpointer.save_dir)
        if self._former is not None:
            source, self._first_iter = self._path(self._former), start
            former = f"{source.removesuffix('.pth')}_before.pth"
            if manager.exists(source) and not manager.exists(former):  # else a killed run has kept it
                link(source, former, manager)
                logger.warning("The former best is kept as %s", former)
        matches = map(re.compile(rf"{re.escape(self._file_prefix)}_(\d{{7,}})\.pth").fullmatch, names)
        numbers = {int(match[1]) for match in matches if match}
        self._outdated |= {number for number in numbers if number >= start} - self._listed
        there = [entry for entry in self.best if manager.exists(self._path(entry[1]))]
        if self.best and not there and not numbers and manager.exists(self._path()):  # detectron2 has only this file
            there = self.best[:1]
            link(self._path(), self._path(there[0][1]), manager)
        for value, iteration in self.best:
            if (value, iteration) not in there:
                self._first_iter = start
                logger.warning(
                    "The file of iteration %d is missing (%s: %.5g): it no longer counts as one of the best",
                    iteration,
                    self._val_metric,
                    value,
                )
        if self.best:
            self._set_best(there)
        self._link_best()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
            "best": [list(b) for b in self.best],
            "outdated": sorted(self._outdated),
            "judged_by": [self._val_metric, self._mode],
        }

    def reset_state(self) -> None:
        self._outdated |= self._listed
        self._former = None
        self._set_best([])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded_iter = self._former = None
        value, iteration, best = state_dict["best_metric"], state_dict["best_iter"], state_dict.get("best")
        if best is None:  # detectron2's
            best = [] if value is None else [(value, iteration)]
        self._set_best([(float(value), int(iteration)) for value, iteration in best])
        if not best:  # a subclass has chosen by itself
            self.best_metric, self.best_iter = value, iteration
        self._outdated = set(state_dict.get("outdated", ()))
        name, mode = state_dict.get("judged_by", (self._val_metric, self._mode))
        if (name, mode) != (self._val_metric, self._mode):
            self._former = -1 if self.best_iter is None else self.best_iter
            self._outdated |= self._listed
            self._set_best([])
            logger.warning(
                "The best weights were chosen by %s (%s), and are chosen by %s (%s) from now on",
                name,
                mode,
                self._val_metric,
                self._mode,
            )


def link(source: str, target: str, path_manager: Any) -> None:
    """Make ``target`` a second name of ``source``, replacing an existing file. A missing ``source`` is ignored.

    Files are hard links, or copies where the file system has none; in a folder each file is linked. A process killed
    in between leaves either the old ``target`` or the new one.

    Args:
        source: a file or folder; a URI is copied.
        target: its second name.
        path_manager: copies URIs.
    """
    if "://" in source:
        path_manager.copy(source, target, overwrite=True)
        return
    if not os.path.exists(source) or (os.path.exists(target) and os.path.samefile(source, target)):
        return
    claim(target)
    temporary = temporary_path(target)
    try:
        if os.path.isdir(source):  # a sharded checkpoint
            shutil.copytree(source, temporary, copy_function=_link_file)
        else:
            _link_file(source, temporary)
        with displaced(target) if os.path.isdir(source) or os.path.isdir(target) else nullcontext():
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):  # raise the first error
            (shutil.rmtree if os.path.isdir(temporary) else os.remove)(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(target)))


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        with open(source, "rb") as file:
            replace_file(target, lambda copy: shutil.copyfileobj(file, copy, 1 << 24))
