"""Where a config becomes a run."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import hooks
from ..config import CfgNode, ConfigError, Duration, component
from ..hooks.common.rng import capture_rng
from ..hooks.host import arguments_of
from ..hooks.storage.event_storage import EventStorage
from ..hooks.writers.progress_bar import rich_is_installed
from . import comm
from .checkpoint import Checkpointer, unwrap_model
from .checkpoint.sharded import is_sharded
from .checkpoint.sharded_checkpointer import ShardedCheckpointer
from .compat.inner_trainer import PortedTrainer
from .compat.writers import default_writers
from .data import build_test_loader, build_train_loader
from .evaluation import (
    DatasetEvaluator,
    build_evaluator,
    check_metrics,
    evaluation_context,
    format_results,
    inference_on_dataset,
    verify_results,
)
from .export.predictor import DefaultPredictor
from .modeling import ModelAdapter, build_adapter, build_model, model_summary, resolve_device
from .parallel.base import build_strategy, share_weights
from .ranks.agreement import StopRequest
from .ranks.torchrun import note_training
from .resume.changes import (
    Stretch,
    apply_changes,
    changes_since,
    check_changes,
    describe_changes,
    epochs_at,
    hyperparameters,
    iteration_of,
    kinds,
    set_rates,
    stretches_since,
)
from .setup.check import HOOK_SLOT, WRITER_SLOT
from .setup.command_line import default_argument_parser
from .setup.seeding import seed_all_rng
from .setup.start import RunStart, begin_look, default_setup, prepared_start
from .solver import LRMultiplier, build_grad_clipper, build_lr_scheduler, build_optimizer
from .train_loop import TrainResult

__all__ = [
    "DefaultPredictor",
    "DefaultTrainer",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "resolve_lengths",
]

logger = logging.getLogger(__name__)

# Keys that decide what training computes: with another value, what stopped a run may not happen again.
_STEERING = ("SOLVER.", "MODEL.", "DATASETS.", "DATALOADER.BATCH_SIZE", "SEED")


class DefaultTrainer(PortedTrainer):
    """A :class:`SimpleTrainer` whose parts are built from a config, with the hooks that runs usually have.

    Each ``build_*`` is a method to replace in a subclass. To do something else than a usual run, write your own with
    :class:`SimpleTrainer`, or your own loop as ``tools/plain_train_net.py`` does.

    Args:
        cfg: the full config.

    Attributes:
        cfg: the config, with lengths resolved to iterations.
        scheduler: the learning-rate scheduler.
        checkpointer: saves and loads model and trainer.

    Example::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=False)
        trainer.train()
    """

    _start: RunStart | None = None
    _resume: bool | None = None

    def __init__(self, cfg: CfgNode) -> None:
        cfg, self._start = prepared_start(cfg, self._overridden())
        if cfg.DATASETS.TEST and self._overridden().isdisjoint({"build_evaluator", "test"}):
            check_metrics(cfg)
        device, strategy = resolve_device(cfg.MODEL.DEVICE), build_strategy(cfg)
        comm.set_data_ranks(strategy.data_rank, strategy.data_size)
        if strategy.data_size < comm.get_world_size():  # ranks that share a batch draw the same, in dropout too
            seed_all_rng((cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()) + strategy.data_rank)
        cfg = self.auto_scale_workers(cfg, strategy.data_size)
        model = self.build_model(cfg)
        share_weights(model)
        model = strategy.wrap(model, device)
        optimizer = self.build_optimizer(cfg, unwrap_model(model))
        data_loader = self.build_train_loader(cfg)
        iters_per_epoch = cfg.DATALOADER.ITERS_PER_EPOCH or _iters_per_epoch(data_loader)
        unresolved, cfg = cfg, resolve_lengths(cfg, iters_per_epoch)
        super().__init__(
            model,
            data_loader,
            optimizer,
            gather_metric_period=cfg.LOG.GATHER_METRIC_PERIOD,
            adapter=self.build_adapter(cfg),
            accumulation_steps=cfg.SOLVER.ACCUMULATION_STEPS,
            clip_gradients=build_grad_clipper(cfg),
            precision=getattr(torch, cfg.SOLVER.AMP.DTYPE) if cfg.SOLVER.AMP.ENABLED else None,
            device=device,
            iters_per_epoch=iters_per_epoch,
            nonfinite=cfg.SOLVER.NONFINITE_LOSS,
            nonfinite_limit=cfg.SOLVER.NONFINITE_LIMIT,
            strategy=strategy,
            compile_step=dict(cfg.SOLVER.COMPILE_STEP_ARGS) if cfg.SOLVER.COMPILE_STEP else False,
            cuda_graph=cfg.SOLVER.CUDA_GRAPH,
        )
        self.cfg = cfg
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self._unresolved, self._config, self._built = unresolved, cfg.dump(), hyperparameters(optimizer)
        self._stretches = stretches_since((), 0, 0, 0, iters_per_epoch)
        self._saved_run: Mapping[str, Any] = {}
        # A weak reference, since the trainer holds the checkpointer.
        make = ShardedCheckpointer if is_sharded(model) else Checkpointer
        self.checkpointer = make(
            model,
            cfg.OUTPUT_DIR,
            asynchronous=cfg.CHECKPOINT.ASYNC,
            on_error=cfg.CHECKPOINT.ON_ERROR,
            trainer=weakref.proxy(self),
        )
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self._last_eval_results: Mapping[str, Any] = {}
        self._result: TrainResult | None = None  # of the last train()
        self._rng_after_train: dict[str, Any] = {}
        self.register_hooks(self.build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Load MODEL.WEIGHTS, or with ``resume`` the last checkpoint in OUTPUT_DIR, if there is one.

        After a resume training goes on where it was: model, optimizer, schedule, hooks, data and random numbers.

        Raises:
            ConfigError: there is no such file, or none that is whole.
        """
        self._saved_run = {}
        self._resume = resume
        model = self.cfg.MODEL
        self.checkpointer.resume_or_load(
            model.WEIGHTS, resume=resume, strict=model.WEIGHTS_STRICT, weights_from=model.WEIGHTS_FROM
        )
        if self.checkpointer.resumed_from:
            # The checkpoint holds the last finished iteration.
            self.start_iter = self.finished_iter + 1
            if self._saved_run:
                self._apply_changes(self._saved_run)
            self.emit("after_load", self.checkpointer.loaded_from)
            if self.start_iter > self.max_iter:
                logger.warning(
                    "The checkpoint is of iteration %d, beyond SOLVER.MAX_ITER, %d: there is nothing to train",
                    self.finished_iter,
                    self.max_iter,
                )
        elif resume:
            logger.info("Nothing to resume in %s: starting from the beginning", self.cfg.OUTPUT_DIR)

    def _apply_changes(self, saved: Mapping[str, Any]) -> None:
        """The config wins where it was changed since the checkpoint was written."""
        stretches = stretches_since(
            saved.get("stretches", ()), self.start_iter, self.epoch, self._batches.position, self.iters_per_epoch
        )
        if len(stretches) > 1:
            # Epochs have other numbers of iterations than before: lengths in epochs end where the epochs do.
            self._stretches = stretches
            self.cfg = resolve_lengths(self._unresolved, self.iters_per_epoch, stretches)
            self.max_iter, self._config = self.cfg.SOLVER.MAX_ITER, self.cfg.dump()
            for hook in self.find_hooks(hooks.PeriodicWriter):
                hook.set_max_iter(self.max_iter)
            self._rebuild_schedule()
        changes = changes_since(saved["config"], self.cfg)
        for text in describe_changes(changes, (saved.get("world_size", 1), comm.get_world_size())):
            logger.warning("%s", text)
        apply_changes(self.optimizer, self.scheduler, self._built, saved["built"], changes)

    def train(self) -> TrainResult:  # type: ignore[override]
        """Train from ``start_iter`` to ``max_iter``, and check TEST.EXPECTED_RESULTS.

        A second call continues a run that was stopped, exactly where it was; a complete run only if ``max_iter`` was
        raised. A resumed run that had ended trains only if MAX_ITER grew or what had stopped it has changed. If there
        is nothing to train, the result is that of the run that ended.

        Returns:
            How the run ended.

        Raises:
            ConfigError: the model has the best weights, of CHECKPOINT.LOAD_BEST_AT_END: training cannot continue.
            SystemExit: an expected result was missed.
            ConfigError: OUTPUT_DIR is in use by another run, or cannot be written.
        """
        if self._start is None:  # a subclass that does not call __init__
            return self._train_and_verify()
        self._start.begin(self._resume)
        try:
            return self._train_and_verify()
        finally:
            self._start.end()

    def _train_and_verify(self) -> TrainResult:
        end = self._end_that_holds()
        if end is None or not end["complete"]:
            self._result = self._train_on(end)
        elif self._result is None:
            self._result = self._ended_before(end)
        else:
            self._log_nothing_to_train(end)
        result = self._result
        if self._last_eval_results:  # the same on all ranks
            if comm.is_main_process():
                logger.info("Results:\n%s", format_results(self._last_eval_results))
            if result.reason == "completed" and not verify_results(self.cfg, self._last_eval_results):
                raise SystemExit(1)
        return result

    def _train_on(self, end: Mapping[str, Any] | None) -> TrainResult:
        """Train; a run with an ``end`` has no step left, and what comes after the last step is done."""
        for hook in self.find_hooks(hooks.BestCheckpointer):
            if hook.loaded_iter is not None:
                raise ConfigError(
                    f"CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration {hook.loaded_iter}, and "
                    "training cannot continue with them. Make a new trainer, and call resume_or_load(resume=True)"
                )
        if self._rng_after_train and hasattr(self, "storage"):
            self._continue_run()
        if self.max_iter != self.cfg.SOLVER.MAX_ITER:
            self._follow_length()
        logger.info("Model:\n%s", model_summary(unwrap_model(self.model)))
        epochs = f" ({epochs_at(self.max_iter, self._stretches):.4g} epochs)" if self._stretches else ""
        logger.info(
            "Training for %d iterations%s, %d samples each, on %s",
            self.max_iter,
            epochs,
            self.cfg.DATALOADER.BATCH_SIZE,
            self.device,
        )
        stop = None
        if end is not None and end["reason"] != "completed":
            stop = StopRequest(end["reason"], by=end["by"])
        note_training(self.cfg.OUTPUT_DIR)
        try:
            result = self._train(self.start_iter, self.max_iter, stop)
        finally:
            self._rng_after_train = capture_rng()
        self._evaluate_best(result)
        return result

    def _evaluate_best(self, result: TrainResult) -> None:
        for hook in self.find_hooks(hooks.BestCheckpointer):
            if hook.loaded_iter not in (None, result.iteration):  # the last evaluation was of other weights
                logger.info("Evaluating the best weights, of iteration %d", hook.loaded_iter)
                self._test_and_keep_results()

    # ------------------------------------------------------------------ training again

    def _end_that_holds(self) -> Mapping[str, Any] | None:
        """How the run has ended, if there is nothing left to train; None if there is."""
        end = self._loaded_end
        if self._result is not None and end is None:  # this trainer has trained: only a complete run has ended
            end = self._end() if self._finished + 1 >= self.max_iter else None
            return None if end is None else {**end, "complete": True}
        if end is None or end["iteration"] >= self.max_iter:
            return end
        if self.max_iter > end["max_iter"]:
            return None
        changed = self._what_stopped_has_changed(end["by"])
        if changed:
            logger.info(
                "The run was stopped at iteration %d: %s. It continues: %s", end["iteration"], end["reason"], changed
            )
            return None
        return end

    def _what_stopped_has_changed(self, by: Mapping[str, Any] | None) -> str:
        """What is different about the cause of a stop; empty if nothing is."""
        if by is None:  # no hook: a loss that was not finite, or the model itself
            changes = changes_since(self._saved_run["config"], self.cfg) if self._saved_run else {}
            keys = [key for key in changes if key.startswith(_STEERING) and key != "SOLVER.MAX_ITER"]
            return f"{', '.join(keys)} changed" if keys else ""
        hook = self._keyed_hooks().get(by["hook"])
        if hook is None:
            return f"there is no {by['hook']} any more"
        return "" if arguments_of(hook) == by["arguments"] else f"{by['hook']} has other arguments"

    def _ended_before(self, end: Mapping[str, Any]) -> TrainResult:
        """The result of a run that had ended before it was resumed."""
        self._log_nothing_to_train(end)
        storage = EventStorage(end["iteration"])
        if self._storage_state is not None:
            storage.load_state_dict(self._storage_state)
        metrics = {name: value for name, (value, _) in storage.latest().items()}
        result = TrainResult(end["reason"], end["iteration"], metrics)
        for hook in self.find_hooks(hooks.BestCheckpointer):
            hook.load_best()
        self._evaluate_best(result)
        return result

    def _log_nothing_to_train(self, end: Mapping[str, Any]) -> None:
        cause = ""
        if end["iteration"] < self.max_iter:
            cause = f", or change or remove {end['by']['hook']}" if end["by"] else ", or change what the run computes"
        logger.info(
            "Nothing to train: the run ended at iteration %d (%s). To train on, raise SOLVER.MAX_ITER, now %d%s",
            end["iteration"],
            end["reason"],
            self.max_iter,
            cause,
        )

    def _continue_run(self) -> None:
        """Have the next run of this trainer continue the last one, as a resume from its last checkpoint does."""
        self.start_iter = self.finished_iter + 1
        self._random_state.pending = self._rng_after_train
        self._storage_state = self.storage.state_dict()
        for hook in self.find_hooks(hooks.PeriodicWriter):
            state = hook.state_dict()
            if state:
                hook.load_state_dict(state)

    # ------------------------------------------------------------------ the length of the run

    def _length_changed(self) -> None:
        self._follow_length()
        super()._length_changed()

    def _follow_length(self) -> None:
        """``max_iter`` was set: config, schedule and writers are those of a run of that length from now on."""
        frozen, cfg = self.cfg.is_frozen(), self.cfg.clone()
        cfg.defrost()
        longer = self.max_iter > cfg.SOLVER.MAX_ITER
        cfg.SOLVER.MAX_ITER = max(1, self.max_iter)
        if frozen:
            cfg.freeze()
        self.cfg, self._config = cfg, cfg.dump()
        for hook in self.find_hooks(hooks.PeriodicWriter):
            hook.set_max_iter(self.max_iter)
        if self._rebuild_schedule():
            set_rates(self.optimizer, self.scheduler)
        elif longer:
            logger.warning("%s goes on as it is: it cannot be moved to a longer run", type(self.scheduler).__name__)

    def _rebuild_schedule(self) -> bool:
        """Build the schedule of the present config at the present position; False if it cannot be moved."""
        if not isinstance(self.scheduler, LRMultiplier):
            return False
        position = self.scheduler.state_dict()
        self.scheduler = self.build_lr_scheduler(self.cfg, self.optimizer)
        self.scheduler.load_state_dict(position)
        return True

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        # The config, so that a resume can tell what was changed in between.
        run = {
            "config": self._config,
            "built": self._built,
            "kinds": kinds(self.optimizer, self.scheduler),
            "stretches": self._stretches,
            "world_size": comm.get_world_size(),
            "results": self._last_eval_results,
        }
        return {**super().state_dict(), "run": run}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._saved_run = state_dict.get("run", {})
        self._last_eval_results = self._saved_run.get("results", {})
        self._result, self._rng_after_train = None, {}
        if self._saved_run:
            check_changes(
                self.checkpointer.loaded_from,
                self._saved_run.get("kinds", {}),
                kinds(self.optimizer, self.scheduler),
                self.cfg,
                self.checkpointer.load_report.differences(),
            )
        super().load_state_dict(state_dict)

    def _length_of_epoch(self, data_loader: Any) -> int | None:
        return self.cfg.DATALOADER.ITERS_PER_EPOCH or _iters_per_epoch(data_loader)

    # ------------------------------------------------------------------ parts

    def build_hooks(self) -> list[hooks.HookBase | None]:
        """The hooks of a usual run, in the order they are called in, those of the config's HOOKS among them."""
        cfg = self.cfg
        # The time of a step ends where the other hooks begin.
        ret: list[hooks.HookBase | None] = [hooks.IterationTimer(), hooks.SignalHandler()]
        ret.append(hooks.LRScheduler(metric=cfg.SOLVER.LR_SCHEDULER_METRIC or None))
        # All ranks have the same hooks, and so do the same at the same step; only the first has files to write.
        # Acts at the end of the step, when all hooks are done, wherever it stands.
        max_to_keep = cfg.CHECKPOINT.MAX_TO_KEEP or None
        ret.append(hooks.PeriodicCheckpointer(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD, max_to_keep=max_to_keep))
        if cfg.CHECKPOINT.ON_EXCEPTION:
            ret.append(hooks.ExceptionCheckpointer(self.checkpointer))
        if Duration.parse(cfg.SOLVER.TIME_LIMIT):
            ret.append(hooks.TimeLimit(cfg.SOLVER.TIME_LIMIT, since="process"))
        # Weakly, or trainer and hook would keep each other alive, and with them workers and GPU memory.
        this = weakref.proxy(self)

        def evaluate() -> Mapping[str, Any]:
            return this._test_and_keep_results()

        if cfg.TEST.PRECISE_BN.ENABLED:  # as often as evaluations, and before them

            def training_data() -> Any:
                return this.build_train_loader(this.cfg)

            num_iter = cfg.TEST.PRECISE_BN.NUM_ITER
            ret.append(hooks.PreciseBN(cfg.TEST.EVAL_PERIOD, unwrap_model(self.model), training_data, num_iter))
        ret.append(hooks.EvalHook(cfg.TEST.EVAL_PERIOD, evaluate))
        ret += HOOK_SLOT.build(
            cfg,
            checkpointer=self.checkpointer,
            model=unwrap_model(self.model),
            optimizer=self.optimizer,
            eval_function=evaluate,
            output_dir=cfg.OUTPUT_DIR,
        )
        if cfg.CHECKPOINT.BEST.METRIC:  # after all evaluations, those of the config's HOOKS too
            best = cfg.CHECKPOINT.BEST
            ret.append(
                hooks.BestCheckpointer(
                    best.PERIOD,
                    self.checkpointer,
                    best.METRIC,
                    best.MODE,
                    keep=best.KEEP,
                    load_at_end=cfg.CHECKPOINT.LOAD_BEST_AT_END,
                )
            )
        # After those of HOOKS, where one with other arguments may stand: the first to start is the one that is shown.
        if cfg.LOG.PROGRESS_BAR is True or (cfg.LOG.PROGRESS_BAR == "auto" and rich_is_installed()):
            ret.append(hooks.ProgressBar())
        # Acts at the end of the step too: what any hook puts is written with the step.
        writers = self.build_writers() if comm.is_main_process() else []
        ret.append(hooks.PeriodicWriter(writers, period=cfg.LOG.PERIOD, on_error=cfg.CHECKPOINT.ON_ERROR))
        return ret

    def build_writers(self) -> Sequence[hooks.EventWriter]:
        """The writers of the config's LOG.WRITERS."""
        period = Duration.parse(self.cfg.LOG.PERIOD)
        writers: list[hooks.EventWriter] = WRITER_SLOT.build(
            self.cfg,
            output_dir=self.cfg.OUTPUT_DIR,
            max_iter=self.max_iter,
            window_size=int(period.value) if period and period.unit == "it" else 20,
        )
        return writers

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """The model of MODEL.NAME, on MODEL.DEVICE."""
        return build_model(cfg)

    @classmethod
    def build_adapter(cls, cfg: CfgNode) -> ModelAdapter:
        """How the model is called, and how its losses are found."""
        return build_adapter(cfg)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of SOLVER.OPTIMIZER."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of SOLVER.LR_SCHEDULER_NAME; lengths in ``cfg`` are in iterations here."""
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """The batches of DATASETS.TRAIN."""
        return build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        """The batches of one of DATASETS.TEST."""
        return build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """The evaluator for one of DATASETS.TEST."""
        return build_evaluator(cfg, dataset_name, targets_of=cls.build_adapter(cfg).targets)

    # ------------------------------------------------------------------ evaluation

    @classmethod
    def test(
        cls,
        cfg: CfgNode,
        model: nn.Module,
        evaluators: "DatasetEvaluator | Sequence[DatasetEvaluator] | None" = None,
    ) -> dict[str, Any]:
        """Evaluate a model on each of DATASETS.TEST.

        Args:
            cfg: the config.
            model: the model.
            evaluators: one for each set; by default those of :meth:`build_evaluator`.

        Returns:
            Results by test set and metric, those of the first rank on all ranks. If there is a single test set and its
            evaluator names tasks of its own, the results are the evaluator's as they are.

        Raises:
            ConfigError: there are not as many evaluators as sets.
        """
        begin_look(cfg)
        names = [component(entry)[0] for entry in cfg.DATASETS.TEST]
        given = [evaluators] if isinstance(evaluators, DatasetEvaluator) else evaluators
        if given is not None and len(given) != len(names):
            raise ConfigError(f"DATASETS.TEST has {len(names)} sets, but {len(given)} evaluators were given")
        adapter, device = cls.build_adapter(cfg), resolve_device(cfg.MODEL.DEVICE)
        results: dict[str, Any] = {}
        for index, name in enumerate(names):
            loader = cls.build_test_loader(cfg, name)
            evaluator = given[index] if given is not None else cls.build_evaluator(cfg, name)
            found = inference_on_dataset(model, loader, evaluator, predict=adapter.predict, device=device)
            found = comm.broadcast_object(found)  # an evaluator may report on the first rank only
            if set(found) == {name}:
                results.update(found)
            elif len(names) == 1 and found and all(isinstance(value, Mapping) for value in found.values()):
                return dict(found)
            else:
                results[name] = found
        return results

    def evaluate(self, max_batches: int | None = None) -> Mapping[str, Any]:
        """Evaluate the model on DATASETS.TEST; hooks get the events of an evaluation, whether or not it is training.

        Args:
            max_batches: go no further than so many batches of each set. That is a trial, not an evaluation: hooks
                get the events of its batches only.

        Returns:
            Results, as :meth:`test`'s.
        """
        if max_batches is not None:
            return self._test(max_batches)
        try:
            self.emit("before_eval")
            results = self._test()
        finally:
            self.emit("on_eval_end")
        self.emit("after_eval", results)
        return results

    def _test(self, max_batches: int | None = None) -> Mapping[str, Any]:
        if not self.cfg.DATASETS.TEST:
            return {}
        self.strategy.before_evaluation(self.model)
        with evaluation_context(self.emit, max_batches):
            # Not what is wrapped: ranks have different numbers of batches, and must not wait for each other in one.
            results = self.test(self.cfg, unwrap_model(self.model))
        # A subclass's test() may return results on the first rank only. Hooks decide by them on all ranks.
        return comm.broadcast_object(results)

    @classmethod
    def _overridden(cls) -> set[str]:
        """The names of the class methods that a subclass overrides."""
        names = ("model", "optimizer", "lr_scheduler", "train_loader", "test_loader", "evaluator")
        methods = [*(f"build_{name}" for name in names), "test"]
        subclasses = cls.__mro__[: cls.__mro__.index(DefaultTrainer)]
        return {name for name in methods if any(name in vars(one) for one in subclasses)}

    def _test_and_keep_results(self) -> Mapping[str, Any]:
        self._last_eval_results = self._test()
        return self._last_eval_results

    # ------------------------------------------------------------------ lengths

    @staticmethod
    def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
        """Fit a config made for SOLVER.REFERENCE_WORLD_SIZE processes to ``num_workers``.

        Each process keeps its share of the batch: batch size and learning rate grow with their number, lengths and
        periods in iterations shrink with it (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

        Returns:
            A new config; the same one where there is nothing to scale.
        """
        old = cfg.SOLVER.REFERENCE_WORLD_SIZE
        if old in (0, num_workers):
            return cfg
        if cfg.DATALOADER.BATCH_SIZE % old:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE: {cfg.DATALOADER.BATCH_SIZE} is not a multiple of "
                f"SOLVER.REFERENCE_WORLD_SIZE, {old}"
            )
        scale = num_workers / old
        frozen, cfg = cfg.is_frozen(), cfg.clone()
        cfg.defrost()

        def shorter(length: int | str) -> int | str:
            """A length in iterations, over the scale; in epochs or minutes it stays."""
            duration = Duration.parse(length)
            return round(duration.value / scale) if duration.unit == "it" else length

        solver = cfg.SOLVER
        cfg.DATALOADER.BATCH_SIZE = round(cfg.DATALOADER.BATCH_SIZE * scale)
        solver.BASE_LR *= scale
        solver.MAX_ITER = shorter(solver.MAX_ITER)
        solver.WARMUP_ITERS = shorter(solver.WARMUP_ITERS)
        solver.STEPS = tuple(shorter(step) for step in solver.STEPS)
        solver.CHECKPOINT_PERIOD = shorter(solver.CHECKPOINT_PERIOD)
        cfg.TEST.EVAL_PERIOD = shorter(cfg.TEST.EVAL_PERIOD)
        cfg.CHECKPOINT.BEST.PERIOD = shorter(cfg.CHECKPOINT.BEST.PERIOD)
        solver.REFERENCE_WORLD_SIZE = num_workers
        logger.info(
            "Scaled from %d to %d processes: batch size %d, learning rate %g, %s iterations",
            old,
            num_workers,
            cfg.DATALOADER.BATCH_SIZE,
            solver.BASE_LR,
            solver.MAX_ITER,
        )
        if frozen:
            cfg.freeze()
        return cfg


def resolve_lengths(cfg: CfgNode, iters_per_epoch: int | None, stretches: Sequence[Stretch] = ()) -> CfgNode:
    """A copy of ``cfg`` with the solver's lengths in iterations: MAX_ITER, WARMUP_ITERS and STEPS.

    Args:
        cfg: the config.
        iters_per_epoch: batches in one pass over the data; None if that is not known.
        stretches: the parts of the run in which that number was different, if it was.

    Raises:
        ConfigError: a length is in epochs, and the length of an epoch is not known.
    """

    def iterations(key: str, length: Any) -> int:
        try:
            duration = Duration.parse_length(length)
            if stretches and duration.unit == "ep":
                return iteration_of(duration.value, stretches)
            return duration.iterations(iters_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    frozen, cfg = cfg.is_frozen(), cfg.clone()
    cfg.defrost()
    solver = cfg.SOLVER
    solver.MAX_ITER = iterations("SOLVER.MAX_ITER", solver.MAX_ITER)
    solver.WARMUP_ITERS = iterations("SOLVER.WARMUP_ITERS", solver.WARMUP_ITERS)
    solver.STEPS = tuple(iterations("SOLVER.STEPS", step) for step in solver.STEPS)
    if frozen:
        cfg.freeze()
    return cfg


def _iters_per_epoch(loader: Any) -> int | None:
    """Batches in one pass over the loader's data, also where its sampler never ends."""
    try:
        return len(loader)
    except TypeError:
        pass
    batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(
        loader, "batch_size", None
    )
    try:
        size = len(loader.dataset)
    except (AttributeError, TypeError):
        return None
    return max(1, size // batch_size) if batch_size else None
