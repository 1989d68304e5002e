"""Keeping the best weights of a run."""

import logging
import math
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal

from ...config import ConfigError, Duration, suggest
from ..base import HOOK_REGISTRY, Every, HookBase
from ..storage.event_storage import has_event_storage
from .adapter import adapt
from .best_files import BestFiles, Entry

__all__ = ["BestCheckpointer"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Keeps the weights with the best value of a metric as ``<file_prefix>.pth``, and the next best ones if asked to.

    Looks at the metric after each evaluation, and every ``eval_period``. NaN and infinity are never best. The
    ``keep - 1`` next best are ``<file_prefix>_<iteration>.pth``. ``last_checkpoint`` is left alone: a resume goes on
    from where training was, not from the best. Saves the list of the best.

    A file goes when it is no longer among the best, and the last checkpoint (that of ``last_checkpoint``) does not list
    it either: until then it is kept under the name of its iteration. So a run that is killed and resumed finds every
    file of the list it goes on with; an entry whose file is gone all the same is dropped, with a warning.

    A resume may start before the best file on disk was written. The list is then what it was at that point; the file
    counts when the run comes to its iteration again with the same value. Should the run have another value there, or
    another best before, the better file is kept as ``<file_prefix>_<iteration>_aside.pth``, with a warning, until the
    run has one that is as good, and ``<file_prefix>.pth`` is the best of the list again.

    Args:
        eval_period: a duration; 0: only after evaluations.
        checkpointer: saves the weights.
        val_metric: the metric's full name in the storage, such as ``"digits_test/accuracy"``.
        mode: whether more ("max") or less ("min") is better.
        file_prefix: name of the file, without its extension.
        keep: how many to keep.
        load_at_end: load the best weights into the model when the run has ended, not by a failure or an interruption;
            all is written before.

    Raises:
        ConfigError: ``mode`` or ``keep`` makes no sense.
    """

    def __init__(
        self,
        eval_period: "Duration | int | str",
        checkpointer: Any,
        val_metric: str,
        mode: Literal["max", "min"] = "max",
        file_prefix: str = "model_best",
        keep: int = 1,
        load_at_end: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f'BestCheckpointer: mode must be "max" or "min", not {mode!r}')
        if keep < 1:
            raise ConfigError(f"BestCheckpointer: keep must be at least 1, not {keep}")
        self._every = Every(eval_period)
        self._period = eval_period
        self._val_metric = val_metric
        self._mode = mode
        self._better = operator.gt if mode == "max" else operator.lt
        self._checkpointer = adapt(checkpointer)
        self._keep = keep
        self._load_at_end = load_at_end
        self._files = BestFiles(checkpointer, file_prefix, val_metric)
        self.best: list[Entry] = []
        """The best ones as (value, iteration), in order."""
        # The rest is of the process that writes: what <file_prefix>.pth holds, what was put aside, iterations of the
        # files that have one in their names, what the last checkpoint lists, and what those to come will, by path.
        self._file: Entry | None = None
        self._aside: Entry | None = None
        self._named: set[int] = set()
        self._counted: frozenset[Entry] = frozenset()
        self._saving: dict[str, frozenset[Entry]] = {}
        self._checked_iter: int | None = None
        self._first_iter = 0  # values of before, whose weights are gone, do not count
        # What the list of the checkpoint was chosen by, and that list, if it was something else.
        self._judged_otherwise: tuple[str, list[Entry]] | None = None
        self._warned = False
        self.loaded_iter: int | None = None
        """The iteration whose weights were loaded at the end; None: none were."""

    @property
    def best_metric(self) -> float | None:
        """The best value so far."""
        return self.best[0][0] if self.best else None

    @property
    def best_iter(self) -> int | None:
        """The iteration it was put at."""
        return self.best[0][1] if self.best else None

    # ------------------------------------------------------------------ events

    def before_train(self) -> None:
        self._every.start()
        self._checked_iter = self.loaded_iter = None
        self._first_iter = self.trainer.start_iter if self._judged_otherwise else 0
        self._saving.clear()
        if not self.trainer.start_iter:
            return
        if self._files.writes:
            self._look_around()
        self._judged_otherwise = None
        if self._checkpointer.needs_all_ranks:  # all must choose alike
            self.best, self._first_iter = self.trainer.comm.broadcast_object((self.best, self._first_iter))

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if has_event_storage():  # an evaluation beside training is not for keeping weights by
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    def before_save(self, path: str) -> None:
        if not self._files.owns(path):
            self._saving[path] = frozenset(self.best)

    def after_save(self, path: str) -> None:
        listed = self._saving.pop(path, None)
        if listed is None or not self._files.writes:
            return
        if os.path.basename(self._checkpointer.get_checkpoint_file()) != os.path.basename(path):
            return  # a resume will not go on from it
        self._counted = listed
        for iteration in self._unneeded():
            self._files.remove(self._files.path(iteration))
            self._named.discard(iteration)

    def after_run(self) -> None:
        trainer = self.trainer
        self._checkpointer.wait()
        if self._load_at_end and not trainer.failed and not trainer.interrupted:
            trainer.comm.synchronize()  # another rank writes
            self.load_best()

    def load_best(self) -> None:
        """Load the best weights into the model, if that is to be done at the end of a run."""
        if not self._load_at_end:
            return
        path = self._files.path()
        if not self._checkpointer.path_manager.exists(path):
            logger.warning("There is no %s to load at the end: %s was never seen", path, self._val_metric)
            return
        # What was judged: the averaged weights, where a hook had those evaluated.
        self._checkpointer.load(path, checkpointables=[], weights_from="auto")
        value, self.loaded_iter = self._files.read(path) or (math.nan, self.best_iter)
        logger.info(
            "The model has the best weights now: %s, of iteration %s, %s: %.5g",
            path,
            self.loaded_iter,
            self._val_metric,
            value,
        )

    # ------------------------------------------------------------------ choosing

    def _best_checking(self) -> None:
        latest = self.trainer.storage.latest()
        if self._val_metric not in latest:
            self._warn(latest)
            return
        value, iteration = latest[self._val_metric]
        if self._val_metric in self.trainer.storage.over_ranks and getattr(self.trainer, "ranks_in_sync", False):
            values = self.trainer.comm.all_gather(value)  # a loss is this rank's part so far
            value = sum(values) / len(values)
        if iteration != self._checked_iter and all(iteration != it for _, it in self.best):
            self._checked_iter = iteration
            if math.isfinite(value) and iteration >= self._first_iter:
                self._consider(value, iteration)
        self._settle(iteration)

    def _consider(self, value: float, iteration: int) -> None:
        if self._place(value) >= self._keep:
            logger.debug("%s is %.5f; the best so far: %s", self._val_metric, value, self.best)
            return
        self._checkpointer.wait()  # a save that failed takes its entry out of the list
        place, former = self._place(value), self.best
        self.best = [*former[:place], (value, iteration), *former[place:]][: self._keep]
        path = self._save(place, former)
        if place == 0:
            before = f" (before: {former[0][0]:.5g})" if former else ""
            logger.info("Best %s so far: %.5g%s, saved %s", self._val_metric, value, before, path)
        else:
            logger.info("%s is %.5g, number %d of the best, saved %s", self._val_metric, value, place + 1, path)

    def _place(self, value: float) -> int:
        """Where a value stands in the list; a later equal one stands behind."""
        return sum(not self._better(value, other) for other, _ in self.best)

    def _save(self, place: int, former: list[Entry]) -> str:
        """Save the entry at ``place``; ``former`` was the list before it was there."""
        trainer, files, (value, iteration) = self.trainer, self._files, self.best[place]
        held = self._file
        if place == 0:
            self._keep_file()
            self._file = self.best[0]
        path = files.path(None if place == 0 else iteration)
        unneeded = self._unneeded()
        outdated = [files.path(it) for it in unneeded]
        overtaken = self._aside if self._aside and not self._better(self._aside[0], self.best[0][0]) else None
        if overtaken:
            outdated.append(files.path(overtaken[1], aside=True))
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is not None:  # nothing was removed
                self.best = former
                self._file = held
                return
            self._named.difference_update(unneeded)
            if place:
                self._named.add(iteration)
            if overtaken and self._aside == overtaken:
                self._aside = None
            trainer.emit("after_save", path)

        self._checkpointer.save(
            os.path.basename(path).removesuffix(".pth"),
            then=saved,
            tag_last=False,
            outdated=outdated if files.writes else (),
            iteration=iteration,
            best_metric={"name": self._val_metric, "value": value, "mode": self._mode},
        )
        return path

    # ------------------------------------------------------------------ what the files hold

    def _look_around(self) -> None:
        """A run goes on: find which files there are, and bring the list and them together."""
        files = self._files
        chosen_by, listed = self._judged_otherwise or ("", self.best)
        if chosen_by:
            self._keep_what_was_best(chosen_by)
        self._file = files.read(files.path(), untold=self.best[0] if self.best else None)
        self._named, aside = files.find(it for _, it in self.best)
        known = {it: entry for it in aside if (entry := files.read(files.path(it, aside=True)))}
        self._aside = None
        for iteration, entry in known.items():  # a kill may have left two
            if self._aside is None or self._better(entry[0], self._aside[0]):
                self._aside = (entry[0], iteration)
        for entry in list(self.best):
            if entry != self._file and entry[1] not in self._named:
                self.best.remove(entry)
                self._first_iter = self.trainer.start_iter
                logger.warning(
                    "There is no file of iteration %d any more (%s: %.5g): it is no longer counted among the best",
                    entry[1],
                    self._val_metric,
                    entry[0],
                )
        self._counted = frozenset(self.best or listed)
        if self._file is not None and self._file[1] >= self.trainer.start_iter and self._file not in self.best:
            logger.info(
                "%s holds iteration %d (%s: %.5g), which this run has yet to come to again: it is kept until then",
                files.path(),
                self._file[1],
                self._val_metric,
                self._file[0],
            )
        self._settle(-1)

    def _keep_what_was_best(self, chosen_by: str) -> None:
        """The config was changed: give the best file of before, which this run would soon replace, a second name."""
        kept, held = "", self._files.content(self._files.path())
        if held is not None and "iteration" in held and self._judged_by(held) != (self._val_metric, self._mode):
            path = self._files.path(int(held["iteration"])).removesuffix(".pth") + "_before.pth"
            self._files.name(self._files.path(), path)
            kept = f"; what was the best is kept as {path}"
        logger.warning(
            "The best weights were chosen by %s, and are by %s (%s) from now on, starting anew%s",
            chosen_by,
            self._val_metric,
            self._mode,
            kept,
        )

    def _judged_by(self, content: Mapping[str, Any]) -> tuple[str | None, str]:
        """The metric and the mode that a best file says it was chosen by."""
        told = content.get("best_metric", {})
        return told.get("name"), told.get("mode", self._mode)

    def _unneeded(self) -> list[int]:
        """Iterations of named files that neither the list nor the last checkpoint's has a use for."""
        needed = {entry[1] for entry in (*self.best, *self._counted) if entry != self._file}
        return [it for it in self._named if it not in needed and it <= self.trainer.iter]  # or it may come again

    def _keep_file(self) -> None:
        """Before <file_prefix>.pth is replaced: keep what it holds, if it is still needed or better."""
        if self._file is None or not self._files.writes:
            return
        value, iteration = self._file
        if self._file in self.best or self._file in self._counted:
            self._files.name(self._files.path(), self._files.path(iteration))
            self._named.add(iteration)
        elif self._better(value, self.best[0][0]):
            self._put_aside()

    def _put_aside(self) -> None:
        """Keep <file_prefix>.pth, which is better than all this run has, unless an even better one is kept already."""
        assert self._file is not None
        if self._aside is not None and not self._better(self._file[0], self._aside[0]):
            return
        files, (value, iteration), former = self._files, self._file, self._aside
        path = files.path(iteration, aside=True)
        files.name(files.path(), path)
        self._aside = self._file
        if former is not None and former[1] != iteration:
            files.remove(files.path(former[1], aside=True))
        logger.warning(
            "%s of iteration %d is better (%s: %.5g) than the best of this run, but %s: it is kept as %s",
            files.path(),
            iteration,
            self._val_metric,
            value,
            "ahead of it" if iteration > self.trainer.iter else "of a course that this run has left",
            path,
        )

    def _settle(self, iteration: int) -> None:
        """Have <file_prefix>.pth be the best of the list, once the run has passed, with another value, what it holds.

        Args:
            iteration: of the value that was looked at last.
        """
        if not self.best or self._file == self.best[0] or not self._files.writes:
            return
        if self._file is not None:
            if self._file[1] > iteration and self._file[1] >= self.trainer.iter:
                return  # it may come yet
            if self._better(self._file[0], self.best[0][0]):
                self._put_aside()
        value, best_iter = self.best[0]
        if best_iter in self._named:
            self._files.name(self._files.path(best_iter), self._files.path())
            self._file = self.best[0]
            logger.info("%s is of iteration %d again (%.5g)", self._files.path(), best_iter, value)

    # ------------------------------------------------------------------ the rest

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
        return {
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
            "best": [list(b) for b in self.best],
            "judged_by": [self._val_metric, self._mode],
        }

    def reset_state(self) -> None:
        self.best, self._judged_otherwise = [], None
        # Files of the earlier run are replaced as those of a run in the same folder are.
        self._file = self._aside = None
        self._named, self._counted = set(), frozenset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded_iter = None
        best = state_dict.get("best")
        if best is None:  # detectron2's
            value, iteration = state_dict["best_metric"], state_dict["best_iter"]
            best = [] if value is None else [(value, iteration)]
        self.best = [(float(value), int(iteration)) for value, iteration in best]
        self._judged_otherwise = None
        name, mode = state_dict.get("judged_by", (self._val_metric, self._mode))
        if (name, mode) != (self._val_metric, self._mode):
            self._judged_otherwise = f"{name} ({mode})", self.best
            self.best = []
