"""``DefaultTrainer``: from a config to a run.

- After Ctrl-C the step is finished, metrics are written, a checkpoint ``model_<iteration>.pth`` is saved, and the exit
  code is 130. A second Ctrl-C raises KeyboardInterrupt: nothing more is saved.
- A file of a checkpoint gets its name when it is complete, and ``last_checkpoint`` is replaced after that. So a process
  that is killed in a save leaves the checkpoint before as the last one.
- ``--resume`` loads the last checkpoint that is intact, and training goes on with the iteration after it. Where the
  config differs from the checkpoint's, the config decides. Of a complete run nothing is left to do.
"""

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import hooks
from ..config import CfgNode, Config, ConfigError, Duration
from ..config.components import mode_of_result
from ..hooks.builtin.interruption import INTERRUPTED_BY, StopSignals, is_session
from ..hooks.common import capture_rng
from ..hooks.evaluation import flatten_names
from ..hooks.fvcore_adapter import checked
from ..hooks.writers.periodic import smoothing_window
from . import comm, differences
from .checkpoint import checkpointer_for
from .checkpoint.checkpointer import unwrap_model
from .checkpoint.resume_state import load_optimizer
from .data.build import NoTrainData, build_test_loader, build_train_loader, check_same_length
from .evaluation import DatasetEvaluator, build_evaluator, evaluation_context, testing, verify_results
from .evaluation.evaluator import initialized
from .inner_trainer import get_inner, set_inner
from .modeling import ModelAdapter, build_adapter, build_model, resolve_device
from .modeling.build import attached_to
from .parallel.base import build_strategy, build_wrapped
from .run import Run, begin_run
from .run import default_setup as default_setup
from .setup.check import HOOK_KEY, WRITER_KEY, best_metric, check_handled, overridden_builders
from .setup.report import log_end, log_start, name_replay, replay_command
from .setup.seeds import seed_all_rng
from .simple_trainer import SimpleTrainer
from .solver import build_lr_scheduler, build_optimizer
from .solver.clipping import build_grad_clipper
from .solver.lengths import Lengths, apply_max_iter, loader_length, scale_config
from .solver.multi_optimizer import SchedulerList
from .solver.schedules import scheduler_hooks
from .train_loop import TrainResult

logger = logging.getLogger(__name__)

_NO_STATE = (
    "The checkpoint holds no state of the trainer: training continues at iteration %d, but the optimizer (if "
    "the checkpointer does not save it), hooks, data and random numbers start fresh. To save them, build the "
    "checkpointer with trainer=weakref.proxy(self)"
)
_HAS_BEST = (
    "CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration %d, and training cannot continue with them. "
    "Make a new trainer, and call resume_or_load(resume=True)"
)


class DefaultTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` whose parts are built from a config, with the hooks of a usual run.

    Each ``build_*`` is a method that a subclass can replace. For other kinds of runs use :class:`SimpleTrainer`, or
    your own loop as in ``tools/plain_train_net.py``.

    Args:
        cfg: the full config.

    Attributes:
        cfg: the config, with lengths in iterations.
        lengths: the config with lengths as they were given, and what they are in iterations. None in a subclass that
            does not call ``__init__``: there the config does not decide.
        current_run: the run in its folder; None until a subclass that does not call ``__init__`` trains.
        scheduler: the learning-rate scheduler.
        checkpointer: saves and loads model and trainer.

    Example::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=False)
        trainer.train()
    """

    # What a subclass that skips __init__ has not set.
    lengths: Lengths = None  # type: ignore[assignment]
    current_run: Run | None = None
    _resume: bool | str | None = None  # the argument of resume_or_load(); None: it was not called
    _last_eval_results: Mapping[str, Any] = {}
    _length_key = "SOLVER.MAX_ITER"  # where users set the length of a run
    _trainer = property(get_inner, set_inner)
    replay_command = replay_command

    def __init__(self, cfg: CfgNode) -> None:
        cfg, self.current_run = Run.of(cfg, overridden_builders(type(self), DefaultTrainer))
        device, strategy = resolve_device(cfg.MODEL.DEVICE), build_strategy(cfg)
        if (ranks := comm.get_world_size()) > 1:
            comm.set_data_ranks(strategy.data_rank, strategy.data_size)
            if strategy.data_size < ranks:  # ranks that share a batch need equal random numbers
                seed_all_rng((cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()) + strategy.data_rank)
        cfg = self.auto_scale_workers(cfg, strategy.data_size)
        model = build_wrapped(lambda: initialized(self.build_model(cfg), cfg, self), strategy, device)
        adapter, plain = self.build_adapter(cfg), unwrap_model(model)
        data_loader = check_same_length(self.build_train_loader(cfg), "DATASETS.TRAIN")
        with attached_to(plain, getattr(adapter, "loss", None)):
            if not isinstance(data_loader, NoTrainData) or any(one.requires_grad for one in plain.parameters()):
                optimizer = self.build_optimizer(cfg, plain)
            else:  # a frozen model that is only evaluated
                optimizer = torch.optim.SGD([{"params": []}], lr=0.0)
        length = partial(loader_length, limit=cfg.DATALOADER.ITERS_PER_EPOCH)
        self.lengths = Lengths(cfg, length(data_loader))
        cfg = self.lengths.cfg.clone()
        self.cfg: Config = cfg
        super().__init__(
            model,
            data_loader,
            optimizer,
            gather_metric_period=cfg.LOG.GATHER_METRIC_PERIOD,
            adapter=adapter,
            accumulation_steps=cfg.SOLVER.ACCUMULATION_STEPS,
            # "full_model" is the work of the optimizer, which a subclass's build_optimizer() may build.
            clip_gradients=None if cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE == "full_model" else build_grad_clipper(cfg),
            precision=getattr(torch, cfg.SOLVER.AMP.DTYPE) if cfg.SOLVER.AMP.ENABLED else None,
            device=device,
            iters_per_epoch=length,
            nonfinite=cfg.SOLVER.NONFINITE_LOSS,
            nonfinite_limit=cfg.SOLVER.NONFINITE_LIMIT,
            strategy=strategy,
        )
        # It sets the rate of the first step, and the hook LRScheduler those of the others.
        scheduler = self.build_lr_scheduler(cfg, self.optimizer)
        self.scheduler = SchedulerList(scheduler) if isinstance(scheduler, list | tuple | Mapping) else scheduler
        left_out = {"optimizer": self.optimizer} if cfg.CHECKPOINT.TRAINABLE_ONLY else {}
        self.checkpointer = checkpointer_for(
            model,
            "" if cfg.FAST_DEV_RUN else cfg.OUTPUT_DIR,
            **left_out,
            asynchronous=cfg.CHECKPOINT.ASYNC,
            on_error=cfg.CHECKPOINT.ON_ERROR,
            trainer=weakref.proxy(self),  # weak, since the trainer holds the checkpointer
        )
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.register_hooks(self.build_hooks())
        self.current_run.create_folder()

    def resume_or_load(self, resume: "bool | str | os.PathLike[str]" = True) -> None:
        """Load the last checkpoint in OUTPUT_DIR if ``resume`` is True and there is one; otherwise MODEL.WEIGHTS.

        A resumed run continues exactly: model, optimizer, schedule, hooks, metrics, data, random numbers are restored.
        If ``resume`` is a path, that checkpoint is loaded. When training begins, ``last_checkpoint`` names it if it is
        in OUTPUT_DIR, and an earlier run in OUTPUT_DIR is moved away if it is not.

        Raises:
            ConfigError: the named file does not exist or is corrupt, no checkpoint of the run is intact, or the
                checkpoint does not fit the config.
        """
        self._use_present_weights()
        self._resume = resume = resume if isinstance(resume, bool) else os.fspath(resume)
        model, checkpointer = self.cfg.MODEL, checked(self.checkpointer)
        content = checkpointer.resume_or_load(
            model.WEIGHTS, resume=resume, strict=model.WEIGHTS_STRICT, weights_from=model.WEIGHTS_FROM
        )
        if checkpointer.resumed_from:
            if isinstance(resume, str):
                self._resume = os.path.abspath(checkpointer.resumed_from)  # the program may change its folder
            if "trainer" not in checkpointer.checkpointables:
                self.iter = self.finished_iter = content.get("iteration", -1)
                logger.warning(_NO_STATE, self.iter + 1)
            self.start_iter = self.finished_iter + 1
            self.emit("after_load", checkpointer.resumed_from)
            if self.start_iter > self.max_iter:
                key, last = self._length_key, self.max_iter
                logger.warning("Nothing to train: %s is %d, the checkpoint is of iteration %d", key, last, self.iter)
        elif self.loss_module is not None:
            self.loss_module.load_from(content, strict=False)
        if model.WEIGHTS_OPTIMIZER and not checkpointer.resumed_from:
            load_optimizer(self.optimizer, self.model, checkpointer.fetch(model.WEIGHTS))
        if resume and not checkpointer.resumed_from:
            logger.info("No checkpoint to resume in %s: starting from the beginning", self.cfg.OUTPUT_DIR)

    def _use_present_weights(self) -> None:
        """Use MODEL.WEIGHTS as the config that the trainer was made with has it now: scripts set it afterwards."""
        if self.lengths is None or self.current_run is None:
            return
        before, now = self.lengths.user_cfg.MODEL, self.current_run.user_cfg.MODEL
        for key in before:
            if key.startswith("WEIGHTS") and now[key] != before[key] == self.cfg.MODEL[key]:
                self.cfg = self.cfg.thawed()
                self.cfg.MODEL[key] = now[key]

    def train(self) -> TrainResult:  # type: ignore[override]
        """Train from ``start_iter`` to ``max_iter``, and check TEST.EXPECTED_RESULTS.

        A second call continues where the first one stopped, as a resume does. Of a complete run nothing is left until
        ``max_iter`` is raised: nothing is trained, no file changes, and the result is that of the complete run.

        Returns:
            How the run ended.

        Raises:
            ConfigError: OUTPUT_DIR is in use by another run or not writable; or the model has the best weights
                (CHECKPOINT.LOAD_BEST_AT_END), with which training cannot continue.
            SystemExit: an expected result was missed; or a signal (Ctrl-C) ended a run outside of a session.
        """
        best = self.find_hooks(hooks.BestCheckpointer)
        if 0 <= self.finished_iter < self.iter:  # not the first train(); a resume leaves iter == finished_iter
            self.start_iter = self.finished_iter + 1
        if self.run_complete and self.finished_iter + 1 >= self.max_iter:
            done, key = self.finished_iter + 1, self._length_key
            logger.info("Nothing to train: the run is complete, with %d iterations. To continue, raise %s", done, key)
            result = TrainResult.of(None, done, self.storage)
            for hook in best:
                hook.load_best()
        else:
            for hook in best:
                if hook.loaded_iter is not None:
                    raise ConfigError(_HAS_BEST % hook.loaded_iter)
            if self.lengths is not None and self.max_iter != self.lengths.cfg.SOLVER.MAX_ITER:
                apply_max_iter(self)
            result = super().train(self.start_iter, self.max_iter)
        with StopSignals():  # the run has ended: they have no effect
            for hook in best:
                if hook.loaded_iter not in (None, result.iteration):  # the last evaluation was of other weights
                    logger.info("Evaluating the best weights, of iteration %d", hook.loaded_iter)
                    result.metrics.update({name: float(value) for name, value in flatten_names(self._test()).items()})
        log_end(self, result)
        if self.current_run is not None:
            self.current_run.end()
        if self._last_eval_results and result.reason == "completed":  # the same on all ranks
            verify_results(self.cfg, self._last_eval_results)
        if result.exit_code and result.reason.startswith(INTERRUPTED_BY) and not is_session():
            raise SystemExit(result.exit_code)  # as the signal would have done; a session goes on
        return result

    def _begin(self) -> None:
        testing.sanity_check(self, overridden_builders(type(self), DefaultTrainer))  # before an earlier run is moved
        try:
            self._take_folder()
            super()._begin()
        except BaseException:
            self._run_ended()
            raise

    def _take_folder(self) -> None:
        if self.current_run is None:  # a subclass that does not call __init__
            self.current_run = Run.opened_for(self.cfg)
        if (run := self.current_run) is None:
            return
        loaded = self._resume is not None or self.start_iter > 0 or bool(getattr(self.checkpointer, "resumed_from", ""))
        if run.args is not None:
            check_handled(run.args, self._resume, not loaded and self.checkpointer.has_checkpoint())
        again = run.begun
        run.begin(self._resume)
        log_start(self, again)

    def _run_ended(self) -> None:
        self._pending_rng = capture_rng()
        if self.current_run is not None:
            self.current_run.end()

    def _fail(self, error: BaseException) -> None:
        name_replay(self, error)
        super()._fail(error)

    def _length_changed(self) -> None:
        if self.lengths is not None:
            apply_max_iter(self)
        super()._length_changed()

    # ------------------------------------------------------------------ parts
    # Their cfg is Any, so that type checkers accept cfg: CfgNode and cfg: Config in a subclass.

    def build_hooks(self) -> list[hooks.HookBase | None]:
        """Build the hooks of a usual run and those of the config's HOOKS, in the order they are called."""
        cfg = self.cfg
        # First, so that a step's measured time includes no other hook. At Ctrl-C SignalHandler requests a stop.
        ret: list[hooks.HookBase | None] = [hooks.IterationTimer(), hooks.SignalHandler()]
        ret += scheduler_hooks(cfg, self.scheduler)  # they set the learning rate after each step
        # All ranks have the same hooks, so that they act at the same step. Only rank 0 writes files.
        max_to_keep = cfg.CHECKPOINT.MAX_TO_KEEP or None
        ret.append(hooks.PeriodicCheckpointer(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD, max_to_keep=max_to_keep))
        if rolling := Duration.parse(cfg.CHECKPOINT.ROLLING.PERIOD):
            ret.append(hooks.RollingCheckpointer(self.checkpointer, rolling, cfg.CHECKPOINT.ROLLING.KEEP))
        if cfg.CHECKPOINT.ON_EXCEPTION:
            ret.append(hooks.ExceptionCheckpointer(self.checkpointer))
        if Duration.parse(cfg.SOLVER.TIME_LIMIT):
            ret.append(hooks.TimeLimit(cfg.SOLVER.TIME_LIMIT, since="process"))
        this = weakref.proxy(self)  # weak: a reference cycle would keep loader workers and GPU memory alive
        if cfg.TEST.PRECISE_BN.ENABLED:  # before each evaluation
            model, num_iter, period = unwrap_model(self.model), cfg.TEST.PRECISE_BN.NUM_ITER, cfg.TEST.EVAL_PERIOD
            ret.append(hooks.PreciseBN(period, model, lambda: this.build_train_loader(this.cfg), num_iter))
        ret.append(hooks.EvalHook(cfg.TEST.EVAL_PERIOD, lambda: this._test(), on_start=cfg.TEST.EVAL_ON_START))
        ret += HOOK_KEY.build(
            cfg,
            checkpointer=self.checkpointer,
            model=unwrap_model(self.model),
            optimizer=self.optimizer,
            eval_function=lambda: this._test(),
            output_dir=cfg.OUTPUT_DIR,
        )
        if (metric := best_metric(cfg)) and not cfg.FAST_DEV_RUN:  # after all hooks that evaluate
            best = cfg.CHECKPOINT.BEST
            mode = mode_of_result(cfg, metric, best.MODE)
            if best.MODE == "auto":
                logger.info('CHECKPOINT.BEST: %s has the mode "%s", by its class or name (MODE)', metric, mode)
            args = (best.PERIOD, self.checkpointer, metric, mode)
            ret.append(hooks.BestCheckpointer(*args, keep=best.KEEP, load_at_end=cfg.CHECKPOINT.LOAD_BEST_AT_END))
        # After HOOKS, which may have a ProgressBar with other arguments: only the first one is shown.
        if cfg.LOG.PROGRESS_BAR:
            ret.append(hooks.ProgressBar())
        # Writes after all hooks of the step, so that their metrics belong to the same row.
        writers = self.build_writers() if comm.is_main_process() else []
        ret.append(hooks.PeriodicWriter(writers, period=cfg.LOG.PERIOD, on_error=cfg.CHECKPOINT.ON_ERROR))
        return ret

    def build_writers(self) -> Sequence[hooks.EventWriter]:
        """Build the writers of LOG.WRITERS."""
        # A subclass that skips __init__ has no epochs yet.
        window = smoothing_window(self.cfg.LOG.PERIOD, getattr(self, "iters_per_epoch", None))
        options = {"output_dir": self.cfg.OUTPUT_DIR, "max_iter": self.max_iter, "window_size": window}
        return list(WRITER_KEY.build(self.cfg, **options))

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """Build the model of MODEL.NAME on MODEL.DEVICE."""
        return build_model(cfg)

    @classmethod
    def build_adapter(cls, cfg: Any) -> ModelAdapter:
        """Build the adapter that calls the model and reads its losses."""
        return build_adapter(cfg)

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> Any:
        """Build the optimizer of SOLVER.OPTIMIZER, or those of SOLVER.OPTIMIZERS. May return a list or dict."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: Any) -> Any:
        """Build the schedule of SOLVER.LR_SCHEDULER_NAME, for each of several optimizers one. Lengths in ``cfg`` are in
        iterations."""
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        """Build the loader of DATASETS.TRAIN."""
        return build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: Any, dataset_name: str) -> Any:
        """Build the loader of one of DATASETS.TEST."""
        return build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
        """Build the evaluator for one of DATASETS.TEST."""
        return build_evaluator(cfg, dataset_name, targets_of=cls.build_adapter(cfg).targets)

    # ------------------------------------------------------------------ evaluation and state

    @classmethod
    def test(
        cls,
        cfg: Any,
        model: nn.Module,
        evaluators: "DatasetEvaluator | Sequence[DatasetEvaluator] | None" = None,
    ) -> dict[str, Any]:
        """Evaluate a model on each of DATASETS.TEST, and log the results: a table, and lines for a spreadsheet.

        Args:
            cfg: the config.
            model: the model.
            evaluators: one for each set. Default: :meth:`build_evaluator`.

        Returns:
            Rank 0's results, on all ranks: metrics by test set. With a single set, an evaluator of your own returns
            its dict unchanged.

        Raises:
            ConfigError: the number of evaluators is not the number of test sets.
        """
        begin_run(cfg, "inference")
        return testing.evaluate_test_sets(cfg, model, evaluators, parts=cls)

    def evaluate(self, max_batches: int | None = None) -> Mapping[str, Any]:
        """Evaluate the model on DATASETS.TEST, during training or not, and emit the events of an evaluation.

        Args:
            max_batches: a trial with at most this many batches of each set. Hooks get no events, random numbers stay as
                they are, and evaluators other than ``MetricsEvaluator`` do not have to return results.

        Returns:
            As for :meth:`test`.
        """
        return testing.evaluate(self, self._test, max_batches)

    @property
    def last_eval_results(self) -> Mapping[str, Any]:
        """The results of the last evaluation of DATASETS.TEST."""
        return self._last_eval_results  # detectron2's name, which subclasses set

    def _test(self) -> Mapping[str, Any]:
        with evaluation_context(self.emit):
            self._last_eval_results = testing.results_of(self, self.cfg)
        return self._last_eval_results

    @staticmethod
    def auto_scale_workers(cfg: Any, num_workers: int) -> Any:
        """Scale a config made for SOLVER.REFERENCE_WORLD_SIZE processes to ``num_workers`` processes.

        Batch size and learning rate grow with the number of processes; lengths and periods in iterations shrink.
        """
        return scale_config(cfg, num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Add to the trainer's state what a resume with another config needs."""
        state = super().state_dict()
        if self.inner_trainer is not None:
            state |= self.inner_trainer.state_dict(self)
        return state if self.lengths is None else {**state, "run": differences.run_record(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.hooks.running:
            return super().load_state_dict(state_dict)
        run = {} if self.lengths is None else state_dict.get("run", {})
        self._last_eval_results = run.get("results", {})
        if run:
            config, built = CfgNode.load_cfg(run["config"]), differences.settings(self)
            differences.check_fits(self, run, config)
            differences.use_saved_seed(self, config)
        super().load_state_dict(state_dict)
        if self.inner_trainer is not None:
            self.inner_trainer.load_state_dict(self, state_dict)
        if run:
            differences.apply_config(self, run, config, built)
