"""Keeping the best weights of a run."""

import inspect
import logging
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...config import ConfigError, Duration, suggest
from ...config.errors import shown_path
from ...config.files.atomic import is_checkpoint_folder
from ...config.files.run_folder import is_claimed
from ..base import HOOK_REGISTRY, HookBase
from ..evaluation import Monitor
from ..every import Every, Period
from ..storage.event_storage import has_event_storage
from .adapter import adapt
from .links import link
from .own_choice import OwnChoice, calls_base

__all__ = ["BestCheckpointer"]

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

    A subclass that overrides ``_best_checking`` without ``super()``, as for detectron2, chooses and saves by itself;
    see :class:`~hookline.hooks.checkpoints.own_choice.OwnChoice`.

    Raises:
        ConfigError: ``mode`` or ``keep`` is invalid.
    """

    _period = Period()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("_best_checking")
        if inspect.isfunction(own) and not calls_base(own, cls):
            OwnChoice.give_to(cls, BestCheckpointer)

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
        self._saved: set[int] = set()  # iterations that have a file
        self._unlisted: dict[str, set[int]] = {}  # those of them that a checkpoint being written does not list
        self._former: tuple[str, list[Entry]] | None = None  # metric and list of the checkpoint, if by another metric
        self._checked_iter: int | None = None
        self._first_iter = 0  # earlier values do not count: their weights are gone
        self._warned = False
        self.loaded_iter: int | None = None
        """The iteration whose weights were loaded at the end; None: none were."""

    @property
    def best_metric(self) -> float | None:
        """The best value so far."""
        return self.best[0][0] if self.best else None

    @property
    def best_iter(self) -> int | None:
        """The iteration of the best value."""
        return self.best[0][1] if self.best else None

    # ------------------------------------------------------------------ events

    def before_train(self) -> None:
        self._every.start()
        self._checked_iter = self.loaded_iter = None
        self._first_iter = 0
        self._unlisted.clear()
        if self._reset_on_train:
            self.reset_state()
        if not self.trainer.start_iter:
            return
        if self._writes:
            self._compare_with_files()
        self._former = None
        if self._checkpointer.needs_all_ranks:  # all ranks must keep the same list
            self.best, self._first_iter = self.trainer.comm.broadcast_object((self.best, self._first_iter))

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if has_event_storage():  # False for an evaluation outside training
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    def before_save(self, path: str) -> None:
        self._unlisted[path] = self._saved - self._listed

    def after_save(self, path: str) -> None:
        unlisted = self._unlisted.pop(path, set())
        if not self._writes or os.path.basename(self._checkpointer.get_checkpoint_file()) != os.path.basename(path):
            return  # a resume does not start from this file
        for iteration in unlisted - self._listed:
            self._remove(self._path(iteration))
            self._saved.discard(iteration)

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
        self.best = [*former[:place], (value, iteration), *former[place:]][: self._keep]
        self._saved.add(iteration)
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is not None:
                self.best = former
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

    def _remove(self, path: str) -> None:
        manager = self._checkpointer.path_manager
        if not is_claimed(path) or (os.path.isdir(path) and not is_checkpoint_folder(path)):
            logger.warning("%s was not written by this run, and is not removed", path)
            return
        try:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif manager.exists(path):
                manager.rm(path)
        except Exception as error:  # of the disk or of a path handler: no reason to end a run
            logger.warning("Cannot remove %s, which is no longer one of the best: %s", path, error)

    def _compare_with_files(self) -> None:
        """On a resume: find the files, and drop entries that have none."""
        manager, start = self._checkpointer.path_manager, self.trainer.start_iter
        try:
            names = manager.ls(self._checkpointer.save_dir)
        except (OSError, NotImplementedError):  # some URIs cannot be listed
            names = []
        matches = map(re.compile(rf"{re.escape(self._file_prefix)}_(\d{{7,}})\.pth").fullmatch, names)
        self._saved = {int(match[1]) for match in matches if match}
        self._saved |= {iteration for iteration in self._listed if manager.exists(self._path(iteration))}
        if self.best and not self._saved and manager.exists(self._path()):  # detectron2 has only this file
            link(self._path(), self._path(self.best[0][1]), manager)
            self._saved = {self.best[0][1]}
        if self._former is not None:
            self._keep_former_best(*self._former)
            self._first_iter = start
        for value, iteration in [entry for entry in self.best if entry[1] not in self._saved]:
            self.best.remove((value, iteration))
            self._first_iter = start
            logger.warning(
                "The file of iteration %d is missing (%s: %.5g): it no longer counts as one of the best",
                iteration,
                self._val_metric,
                value,
            )
        self._link_best()

    def _keep_former_best(self, chosen_by: str, best: list[Entry]) -> None:
        """The config has another metric now: keep the best file by the former metric under another name."""
        kept = ""
        if best:
            source = self._path(best[0][1])
            target = f"{source.removesuffix('.pth')}_before.pth"
            if not self._checkpointer.path_manager.exists(target):  # else a killed run has kept it
                link(source, target, self._checkpointer.path_manager)
            kept = f". The former best is kept as {target}"
        logger.warning(
            "The best weights were chosen by %s, and are chosen by %s (%s) from now on%s",
            chosen_by,
            self._val_metric,
            self._mode,
            kept,
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
            "best": [list(b) for b in self.best],
            "judged_by": [self._val_metric, self._mode],
        }

    def reset_state(self) -> None:
        self.best, self._former = [], None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded_iter = None
        best = state_dict.get("best")
        if best is None:  # detectron2's
            value, iteration = state_dict["best_metric"], state_dict["best_iter"]
            best = [] if value is None else [(value, iteration)]
        self.best = [(float(value), int(iteration)) for value, iteration in best]
        self._former = None
        name, mode = state_dict.get("judged_by", (self._val_metric, self._mode))
        if (name, mode) != (self._val_metric, self._mode):
            self._former = f"{name} ({mode})", self.best
            self.best = []
