"""Keeping the best weights of a run."""

import logging
import math
import operator
import os
import shutil
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..config import ConfigError, Duration, suggest
from .base import HOOK_REGISTRY, Every, HookBase
from .checkpoint import drain, save_with
from .events import has_event_storage

__all__ = ["BestCheckpointer"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class BestCheckpointer(HookBase):
    """Keeps the weights with the best value of a metric as ``<file_prefix>.pth``, and the next best ones if asked to.

    Looks at the metric after each evaluation, and every ``eval_period``. NaN and infinity are never best. The
    ``keep - 1`` next best are ``<file_prefix>_<iteration>.pth``. ``last_checkpoint`` is left alone: a resume goes on
    from where training was, not from the best. Saves the list of the best.

    A resume may start before the best file on disk was written. The list is then what it was at that point; the file
    counts when the run comes to its iteration again. Should a value be best by the list, but worse than the file's,
    the file is kept under the name of its iteration.

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
        self._better = operator.gt if mode == "max" else operator.lt
        self._checkpointer = checkpointer
        self._file_prefix = file_prefix
        self._keep = keep
        self._load_at_end = load_at_end
        # The best ones as (value, iteration), in order.
        self.best: list[tuple[float, int]] = []
        # What <file_prefix>.pth holds, as (value, iteration), and the same of files that a resumed run has yet to
        # come to, and has put aside.
        self._file: tuple[float, int] | None = None
        self._aside: dict[int, float] = {}
        self._checked_iter: int | None = None
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
        if self.trainer.start_iter and self._writes:
            self._file = self._read_file()
            if self._file is not None and self._file[1] >= self.trainer.start_iter and self._file not in self.best:
                logger.info(
                    "%s holds iteration %d (%s: %.5g), which this run has yet to come to again: it is kept until then",
                    self._path(),
                    self._file[1],
                    self._val_metric,
                    self._file[0],
                )

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if has_event_storage():  # an evaluation beside training is not for keeping weights by
            self._best_checking()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._best_checking()

    def after_run(self) -> None:
        trainer = self.trainer
        drain(self._checkpointer)
        if not self._load_at_end or trainer.failed or trainer.interrupted:
            return
        trainer.comm.synchronize()  # another rank writes
        path = self._path()
        if not self._checkpointer.path_manager.exists(path):
            logger.warning("There is no %s to load at the end: %s was never seen", path, self._val_metric)
            return
        # What was judged: the averaged weights, where a hook had those evaluated.
        options = {"weights_from": "auto"} if hasattr(self._checkpointer, "poll") else {}
        self._checkpointer.load(path, checkpointables=[], **options)
        value, self.loaded_iter = self._read_file() or (math.nan, self.best_iter)
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
        if iteration == self._checked_iter or any(iteration == it for _, it in self.best):
            return
        self._checked_iter = iteration
        if not math.isfinite(value):
            return
        place = sum(not self._better(value, other) for other, _ in self.best)
        if place >= self._keep:
            logger.debug("%s is %.5f; the best so far: %s", self._val_metric, value, self.best)
            return
        before = f" (before: {self.best[0][0]:.5g})" if self.best else ""
        self.best.insert(place, (value, iteration))
        dropped, self.best = self.best[self._keep :], self.best[: self._keep]
        path = self._save(place, value, iteration, [it for _, it in dropped])
        if place == 0:
            logger.info("Best %s so far: %.5g%s, saved %s", self._val_metric, value, before, path)
        else:
            logger.info("%s is %.5g, number %d of the best, saved %s", self._val_metric, value, place + 1, path)

    def _save(self, place: int, value: float, iteration: int, dropped: list[int]) -> str:
        outdated = [self._path(it) for it in dropped]
        if place == 0:
            self._put_aside(value, iteration)
            if self._aside.get(iteration, value) == value or not self._better(self._aside[iteration], value):
                outdated.append(self._path(iteration))  # of an earlier course of the run, and made anew
                self._aside.pop(iteration, None)
        path = self._path(None if place == 0 else iteration)
        trainer, former = self.trainer, self._file
        if place == 0:
            self._file = (value, iteration)
        trainer.emit("before_save", path)

        def saved(error: OSError | None) -> None:
            if error is None:
                trainer.emit("after_save", path)
                return
            self.best = [entry for entry in self.best if entry != (value, iteration)]
            if place == 0:
                self._file = former

        save_with(
            self._checkpointer,
            os.path.basename(path).removesuffix(".pth"),
            saved,
            tag_last=False,
            outdated=outdated if self._writes else (),
            iteration=iteration,
            best_metric={"name": self._val_metric, "value": value},
        )
        return path

    def _put_aside(self, value: float, now: int) -> None:
        """Before <file_prefix>.pth is replaced: keep what it holds, if it is still one of the best that are known."""
        drain(self._checkpointer)
        if self._file in (None, (value, now)) or not self._writes:
            return
        held, iteration = self._file
        ahead = iteration >= self.trainer.iter and self._better(held, value)
        if self._file not in self.best and not ahead:
            return
        self._link(self._path(), self._path(iteration))
        if ahead:
            self._aside[iteration] = held
            logger.warning(
                "%s of iteration %d is better (%s: %.5g), but ahead of this run: it is kept as %s",
                self._path(),
                iteration,
                self._val_metric,
                held,
                self._path(iteration),
            )

    # ------------------------------------------------------------------ files

    @property
    def _writes(self) -> bool:
        """Whether this process writes files."""
        return bool(self._checkpointer.save_dir) and self._checkpointer.save_to_disk

    def _path(self, iteration: int | None = None) -> str:
        """Of the best one's file; given an iteration, of what is kept under its name."""
        name = self._file_prefix if iteration is None else f"{self._file_prefix}_{iteration:07d}"
        return os.path.join(self._checkpointer.save_dir, f"{name}.pth")

    def _link(self, source: str, target: str) -> None:
        """Give a file a second name. It is replaced, never changed, so one copy of its bytes is enough."""
        if "://" in source:
            self._checkpointer.path_manager.copy(source, target, overwrite=True)
            return
        if not os.path.exists(source):
            return
        if os.path.isdir(source):  # of a sharded run
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, copy_function=_link_file)
            return
        if os.path.exists(target):
            os.remove(target)
        _link_file(source, target)

    def _read_file(self) -> tuple[float, int] | None:
        """What <file_prefix>.pth says it holds; None if that is nothing of this metric's."""
        path = self._path()
        if not self._checkpointer.path_manager.exists(path):
            return None
        try:
            local = self._checkpointer.path_manager.get_local_path(path)
            local = os.path.join(local, "state.pth") if os.path.isdir(local) else local
            content = torch.load(local, map_location="cpu", weights_only=True, mmap=True)
            told, iteration = content["best_metric"], int(content["iteration"])
            return (float(told["value"]), iteration) if told["name"] == self._val_metric else None
        except Exception as error:  # of any kind, as the bytes happen to be
            logger.warning("%s cannot be read, and will be replaced: %s", path, error)
            return None

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
        return {"best_metric": self.best_metric, "best_iter": self.best_iter, "best": [list(b) for b in self.best]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict.get("best")
        if best is None:  # detectron2's
            value, iteration = state_dict["best_metric"], state_dict["best_iter"]
            best = [] if value is None else [(value, iteration)]
        self.best = [(float(value), int(iteration)) for value, iteration in best]


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
