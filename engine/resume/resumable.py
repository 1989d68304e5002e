"""What happens when a run is resumed, extended, or trained a second time."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from ... import hooks
from ...config import CfgNode, ConfigError
from ...hooks.common.models import unwrap_model
from ...hooks.common.rng import capture_rng
from ...hooks.host import arguments_of
from ...hooks.storage.event_storage import EventStorage
from .. import comm
from ..compat.ported_trainer import PortedTrainer
from ..data.given import NoTrainData
from ..ranks.agreement import StopRequest
from ..ranks.torchrun import note_training
from ..setup.curves import draw_at_end
from ..setup.ignored import check_resumes
from ..setup.next_steps import name_replay, replay_command
from ..setup.screen import log_start
from ..setup.seeding import set_seed
from ..setup.start import RunStart, take_start
from ..solver import LRMultiplier
from ..solver.frozen_model import NothingToTrainError, empty_optimizer
from ..solver.several import schedulers_of
from ..train_loop import TrainResult
from .changes import (
    adopt_rates,
    apply_changes,
    changes_since,
    check_changes,
    describe_changes,
    hyperparameters,
    kinds,
    rates_of,
)
from .lengths import Segment, epochs_at, loader_length, resolve_lengths, segments_since
from .schedule_length import Position, rebuilt_schedule

__all__ = ["ResumableTrainer"]

logger = logging.getLogger(__name__)

# Keys that decide what training computes. If one changes, the reason for a stop may no longer hold.
_COMPUTATION = ("SOLVER.", "MODEL.", "DATASETS.", "DATALOADER.BATCH_SIZE", "SEED")

# Keys that are read when the trainer is built.
_BUILT = ("SOLVER.", "MODEL.", "DATASETS.TRAIN", "DATALOADER.", "SEED")

# Keys that may change a schedule.
_SCHEDULE = ("SOLVER.BASE_LR", "SOLVER.MAX_ITER", "SOLVER.LR_SCHEDULER_ARGS", "SOLVER.OPTIMIZERS")


class ResumableTrainer(PortedTrainer):
    """A trainer that saves its config with its state, and applies changes of the config when it resumes.

    Subclasses set ``cfg``, ``scheduler`` and ``checkpointer``, call :meth:`_record_build`, and define
    ``build_lr_scheduler``. If :meth:`_record_build` was not called, the config is not saved, and its changes are not
    applied.
    """

    cfg: CfgNode
    scheduler: Any
    checkpointer: Any
    _config: str  # cfg as YAML
    _unresolved: CfgNode  # cfg before lengths were resolved
    _built: list[dict[str, Any]] | None = None  # hyperparameters as the config set them
    _segments: list[Segment] = []
    _saved_run: Mapping[str, Any] = {}  # the "run" entry of the loaded checkpoint
    _last_eval_results: Mapping[str, Any] = {}
    _result: TrainResult | None = None  # of the last train()
    _passes: Mapping[str, Any] | None = None  # of the sanity check, for the table of the model
    _length_key = "SOLVER.MAX_ITER"  # where users set the length of a run
    _start: RunStart | None = None
    _given: Callable[[], CfgNode | None] = staticmethod(lambda: None)  # the config that the trainer was made with
    _resume: bool | None = None
    _rng_after_train: dict[str, Any] | None = None
    _texts_after_train: Sequence[str] = ()  # see _texts()
    _rates: Sequence[tuple[dict[str, Any], float]] = ()  # learning rates as built, or after the last train()
    _nothing_to_train = ""  # why there is no optimizer

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Any) -> Any:
        """Build the learning-rate scheduler."""
        raise NotImplementedError

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Build the loader of training batches."""
        raise NotImplementedError

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Any:
        """Build the optimizer."""
        raise NotImplementedError

    def _optimizer_of(self, cfg: CfgNode, model: nn.Module) -> Any:
        """Build the optimizer. Without training data, a model with frozen parameters only is allowed."""
        try:
            return self.build_optimizer(cfg, model)
        except NothingToTrainError as error:
            self._nothing_to_train = str(error)
            return empty_optimizer()

    def _record_build(self, unresolved: CfgNode) -> None:
        """Record what was built, to detect changes when the run resumes."""
        if self._nothing_to_train and not isinstance(self.data_loader, NoTrainData):
            raise ConfigError(f"{self._nothing_to_train}, and there is training data")
        self._unresolved, self._config, self._built = unresolved, self.cfg.dump(), hyperparameters(self.optimizer)
        self._segments = segments_since((), 0, 0, 0, self.iters_per_epoch)
        self._rates = rates_of(self.optimizer)

    def _set_resume(self, resume: bool) -> None:
        """Record whether the run resumes. If the seed was drawn before that was known, use the saved run's."""
        self._resume = resume
        seed = self._start.take_saved_seed() if resume and self._start is not None else -1
        if seed >= 0:
            self.cfg, self._unresolved = self.cfg.clone(), self._unresolved.clone()
            for cfg in (self.cfg, self._unresolved):
                set_seed(cfg, seed)
            self._config = self.cfg.dump()
            self.reset_data_loader(lambda: self.build_train_loader(self.cfg))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Add to the trainer's state what :meth:`_apply_changes` needs."""
        if self._built is None:
            return super().state_dict()
        run = {
            "config": self._config,
            "built": self._built,
            "kinds": kinds(self.optimizer, self.scheduler, unwrap_model(self.model)),
            "stretches": self._segments,
            "world_size": comm.get_world_size(),
            "results": self._last_eval_results,
        }
        return {**super().state_dict(), "run": run}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._running:
            return super().load_state_dict(state_dict)
        self._saved_run = {} if self._built is None else state_dict.get("run", {})
        self._last_eval_results = self._saved_run.get("results", {})
        self._result, self._rng_after_train, self._texts_after_train = None, None, ()
        if self._saved_run:
            report = getattr(self.checkpointer, "load_report", None)  # fvcore's Checkpointer has none
            check_changes(
                getattr(self.checkpointer, "loaded_from", "the checkpoint"),
                self._saved_run.get("kinds", {}),
                kinds(self.optimizer, self.scheduler, unwrap_model(self.model)),
                self.cfg,
                report.differences() if report else [],
            )
        super().load_state_dict(state_dict)

    def _continue_without_state(self, content: Mapping[str, Any]) -> None:
        """Continue after the iteration of a checkpoint that does not hold the trainer's state."""
        self.iter = self._finished = content.get("iteration", -1)
        logger.warning(
            "The checkpoint holds no state of the trainer: training continues at iteration %d, but the optimizer (if "
            "the checkpointer does not save it), hooks, data and random numbers start fresh. To save them, build the "
            "checkpointer with trainer=weakref.proxy(self)",
            self.finished_iter + 1,
        )

    def _apply_changes(self, saved: Mapping[str, Any]) -> None:
        """Apply the config where it differs from the checkpoint's."""
        segments = segments_since(
            saved.get("stretches", ()), self.start_iter, self.epoch, self._batches.position, self.iters_per_epoch
        )
        if len(segments) > 1:
            # The epoch length has changed: lengths in epochs are other numbers of iterations now.
            self._segments = segments
            cfg = resolve_lengths(self._unresolved, self.iters_per_epoch, segments)
            self.max_iter, self._config = cfg.SOLVER.MAX_ITER, cfg.dump()
            for hook in self.find_hooks(hooks.PeriodicWriter):
                hook.set_max_iter(self.max_iter)
            self._rebuild_schedule(cfg)
            self.cfg = cfg
        changes = changes_since(saved["config"], self.cfg)
        for text in describe_changes(changes, (saved.get("world_size", 1), comm.get_world_size())):
            logger.warning("%s", text)
        apply_changes(self.optimizer, self.scheduler, self._built or [], saved["built"], changes)
        if any(key.startswith(_SCHEDULE) for key in changes):
            self._change_schedule(changes.get("SOLVER.MAX_ITER", (self.max_iter,))[0])

    def _change_schedule(self, length_before: int) -> None:
        """Rebuild torch's and timm's schedules after a resume with another config."""
        before = [one for one in schedulers_of(self.scheduler) if not isinstance(one, LRMultiplier)]
        if not before:
            return
        cfg, earlier = self.cfg, self.cfg.clone()
        earlier.defrost()
        earlier.SOLVER.MAX_ITER = length_before
        self.cfg = earlier
        try:
            self._rebuild_schedule(cfg)
        finally:
            self.cfg = cfg
        for one in before:
            if any(one is kept for kept in schedulers_of(self.scheduler)):
                logger.warning("%s keeps the checkpoint's schedule", type(one).__name__)

    # ------------------------------------------------------------------ training

    def _in_output_dir(self, trains: bool = True) -> AbstractContextManager[None]:
        if self._start is None:  # a subclass that does not call __init__
            self._start = take_start(self.cfg)
        if trains:
            self._check_changes_by_hand()
        for check in self.find_hooks(hooks.SanityCheck) if trains else ():
            check.run()  # before an earlier run is moved away
        if self._start is None:
            return nullcontext()
        loaded = self._resume is not None or self.start_iter > 0 or bool(getattr(self.checkpointer, "resumed_from", ""))
        if not loaded and self.checkpointer.has_checkpoint():
            check_resumes(self._start.args)
        return self._start.running(self._resume, trains)

    def _first_step_done(self) -> None:
        super()._first_step_done()
        self._begin_after_step()

    def _begin_after_step(self) -> None:
        if self._start is not None:
            self._start.begin_after_step()

    def _train_to_end(self, end: Mapping[str, Any] | None) -> TrainResult:
        """Train.

        Args:
            end: see :meth:`_previous_end`. If the run had ended completely, nothing is trained; if only the work after
                the last step is not done, that is repeated.
        """
        if end is not None and end["complete"]:
            self._log_nothing_to_train(end)
            return self._result or self._previous_result(end)
        self._continue_run()
        if self._built is not None and self.max_iter != self.cfg.SOLVER.MAX_ITER:
            self._apply_max_iter()
        epochs = f" ({epochs_at(self.max_iter, self._segments):.4g} epochs)" if self._segments else ""
        log_start(self, f"{self.max_iter} iterations{epochs}", first=self._result is None)
        stop = None
        if end is not None and end["reason"] != "completed":
            stop = StopRequest(end["reason"], by=end["by"])
        note_training(self.cfg.OUTPUT_DIR)
        begin = time.monotonic()
        result = self._train(self.start_iter, self.max_iter, stop)
        if not result.exit_code:  # else the process should end soon
            draw_at_end(self.cfg, time.monotonic() - begin)
        self._evaluate_best(result)
        return result

    def _fail(self, error: BaseException) -> BaseException:
        if self._error is None and not (self._start is not None and self._start.waits):  # else nothing to replay
            name_replay(self, error)
        return super()._fail(error)

    def replay_command(self, iteration: int) -> str:
        return replay_command(self, iteration)

    # ------------------------------------------------------------------ a run that has ended

    def _previous_end(self) -> Mapping[str, Any] | None:
        """Return how the run ended if there is nothing left to train, else None. See :meth:`RunState._end`."""
        end = self._loaded_end
        if self._result is not None and end is None:  # trained by this trainer: only a complete run has ended
            end = self._end() if self.finished_iter + 1 >= self.max_iter else None
            return None if end is None else {**end, "complete": True}
        if end is None or end["iteration"] >= self.max_iter:
            return end
        if self.max_iter > end["max_iter"]:
            return None
        change = self._change_since_stop(end["by"])
        if not change:
            return end
        logger.info(
            "The run was stopped at iteration %d: %s. It continues: %s", end["iteration"], end["reason"], change
        )
        return None

    def _change_since_stop(self, by: Mapping[str, Any] | None) -> str:
        """Describe what has changed about the cause of a stop; empty if nothing has.

        Args:
            by: the hook that stopped the run; None if no hook did, for example if the loss was not finite.
        """
        if by is None:
            changes = changes_since(self._saved_run["config"], self.cfg) if self._saved_run else {}
            keys = [key for key in changes if key.startswith(_COMPUTATION) and key != "SOLVER.MAX_ITER"]
            return f"{', '.join(keys)} changed" if keys else ""
        hook = self._keyed_hooks().get(by["hook"])
        if hook is None:
            return f"{by['hook']} was removed"
        return "" if arguments_of(hook) == by["arguments"] else f"{by['hook']} has other arguments"

    def _previous_result(self, end: Mapping[str, Any]) -> TrainResult:
        """Return the result of a run that had ended before it was resumed; load the best weights if the run did so."""
        storage = EventStorage(end["iteration"])
        if self._storage_state is not None:
            storage.load_state_dict(self._storage_state)
        metrics = {name: value for name, (value, _) in storage.latest().items()}
        result = TrainResult(end["reason"], end["iteration"], metrics)
        for writer in self.find_hooks(hooks.PeriodicWriter):
            writer.check_files()
        for hook in self.find_hooks(hooks.BestCheckpointer):
            hook.load_best()
        self._evaluate_best(result)
        return result

    def _evaluate_best(self, result: TrainResult) -> None:
        for hook in self.find_hooks(hooks.BestCheckpointer):
            if hook.loaded_iter not in (None, result.iteration):  # the last evaluation was of other weights
                logger.info("Evaluating the best weights, of iteration %d", hook.loaded_iter)
                self._test()

    def _test(self, cfg: CfgNode | None = None) -> Mapping[str, Any]:
        raise NotImplementedError

    def _log_nothing_to_train(self, end: Mapping[str, Any]) -> None:
        cause = ""
        if end["iteration"] < self.max_iter:
            cause = f", or change or remove {end['by']['hook']}" if end["by"] else ", or change what the run computes"
        key = self._length_key if self._result is None else "trainer.max_iter"
        logger.info(
            "Nothing to train: the run ended at iteration %d (%s). To continue, raise %s, now %d%s",
            end["iteration"],
            end["reason"],
            key,
            self.max_iter,
            cause,
        )

    # ------------------------------------------------------------------ a second train()

    def after_train(self) -> None:
        if self._error is None:
            self._attempt(self._begin_after_step)  # no step was trained
        try:
            super().after_train()
        finally:
            self._rng_after_train, self._texts_after_train = capture_rng(), self._texts()
            self._rates = rates_of(self.optimizer)

    def reset_data_loader(self, data_loader_builder: Callable[[], Any]) -> None:
        super().reset_data_loader(data_loader_builder)
        if self._texts_after_train:  # the loader may be that of a changed config
            self._texts_after_train = self._texts()

    def _texts(self) -> list[str]:
        """Return the trainer's config and the one it was made with, as YAML."""
        return [] if self._built is None else [cfg.dump() for cfg in (self.cfg, self._given()) if cfg is not None]

    def _check_changes_by_hand(self) -> None:
        """Use learning rates that were set by hand.

        Raises:
            ConfigError: a rate cannot be used, or a config was changed after an earlier ``train()``.
        """
        for before, now in zip(self._texts_after_train, self._texts(), strict=False):
            changes = CfgNode.load_cfg(now).diff(CfgNode.load_cfg(before)) if now != before else {}
            keys = ", ".join(key for key in changes if key.startswith(_BUILT))
            if keys:
                raise ConfigError(
                    f"{keys}: was changed between two train() calls, and this trainer was built with the former value. "
                    "Change it back; to train on with it, make a new trainer and resume. For the length, set "
                    "trainer.max_iter"
                )
        adopt_rates(getattr(self, "scheduler", None), self._rates)

    def _continue_run(self) -> None:
        """If this trainer has trained before, continue that run, as a resume from its last checkpoint would.

        Raises:
            ConfigError: the model has the best weights in place of the last ones.
        """
        for hook in self.find_hooks(hooks.BestCheckpointer):
            if hook.loaded_iter is not None:
                raise ConfigError(
                    f"CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration {hook.loaded_iter}, and "
                    "training cannot continue with them. Make a new trainer, and call resume_or_load(resume=True)"
                )
        if self._rng_after_train is None:
            return
        self.start_iter = self.finished_iter + 1
        self._random_state.pending = self._rng_after_train

    # ------------------------------------------------------------------ the length of the run

    def _length_changed(self) -> None:
        self._apply_max_iter()
        super()._length_changed()

    def _apply_max_iter(self) -> None:
        """Put a new ``max_iter`` into the config, the schedule and the writers.

        Raises:
            ConfigError: the run cannot be longer, since its schedule has a fixed length. ``max_iter`` is as before.
        """
        before, cfg = self.cfg, self._config_of_length(self.max_iter)
        try:
            self._rebuild_schedule(cfg)
        except ConfigError:
            self._max_iter = before.SOLVER.MAX_ITER
            raise
        self.cfg, self._config = cfg, cfg.dump()
        for hook in self.find_hooks(hooks.PeriodicWriter):
            hook.set_max_iter(self.max_iter)

    def _config_of_length(self, max_iter: int) -> CfgNode:
        """Return the config with another MAX_ITER, and what depends on it."""
        frozen, cfg = self.cfg.is_frozen(), self.cfg.clone()
        cfg.defrost()
        cfg.SOLVER.MAX_ITER = max(1, max_iter)
        given = self._unresolved.clone()
        given.defrost()
        given.SOLVER.MAX_ITER = cfg.SOLVER.MAX_ITER
        resolved = resolve_lengths(given, self.iters_per_epoch, self._segments).SOLVER
        cfg.SOLVER.LR_SCHEDULER_ARGS, cfg.SOLVER.OPTIMIZERS = resolved.LR_SCHEDULER_ARGS, resolved.OPTIMIZERS
        if frozen:
            cfg.freeze()
        return cfg

    def _rebuild_schedule(self, cfg: CfgNode) -> None:
        """Replace the schedule by that of ``cfg``, at the present position.

        Raises:
            ConfigError: the schedule has a fixed length. Nothing has changed.
        """
        done = self.finished_iter + 1
        own = all(isinstance(one, LRMultiplier) for one in schedulers_of(self.scheduler))
        if not own and self.max_iter <= done:  # torch's cannot be stepped beyond their end
            return
        epochs = self.epoch + (self.epoch_ended and not self._running)  # the next one begins with the next step
        position = Position(done, epochs, self.iters_per_epoch)
        build = partial(self.build_lr_scheduler, cfg, self.optimizer)
        self.scheduler = rebuilt_schedule(self.scheduler, build, self.optimizer, position, self.cfg, cfg)

    def _length_of_epoch(self, data_loader: Any) -> int | None:
        return self.cfg.DATALOADER.ITERS_PER_EPOCH or loader_length(data_loader)
