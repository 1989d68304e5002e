"""``Trainer``: a run in one call, without a config file."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Never

from ..config import CfgNode, ConfigError, name_of
from ..config.components import errors_at
from ..hooks.common import preserve_rng
from . import comm
from .data.build import check_same_length
from .data.loader import move_to_device
from .defaults import DefaultTrainer
from .evaluation import evaluation_context
from .evaluation.evaluator import scratch_storage
from .evaluation.metrics import Predictions, collect
from .evaluation.predictions import prediction_rows, write_predictions
from .evaluation.testing import predictor, results_of, trained_loss
from .modeling.outputs import predictions_of
from .setup.arguments import config_of_arguments, test_entries, unknown_argument
from .train_loop import TrainResult


class Trainer(DefaultTrainer):
    """A :class:`DefaultTrainer` for objects: it puts them into a config, and everything else is the same.

    Most arguments set a key of the config, given in brackets. They take what the config takes, a name or
    ``{"NAME": ..., "ARGS": {...}}``, and also a class or function, which is called like one that a config names, or the
    object itself. A class is built after the random generators are seeded; an object was built before. Keys without an
    argument are set by ``config``; all are documented in ``config/defaults.py``.

    The run's ``config.yaml`` shows objects as ``<object module.Name>``. Only the same script can repeat it.

    Args:
        model: the model (MODEL.NAME). Default: the config's.
        train_data: a data set, a tuple of tensors ``(x, y)``, or a loader of batches (DATASETS.TRAIN). None: only
            evaluate and predict. Data sets are split over ranks, and a resume starts in the middle of an epoch; a
            loader is used as it is.
        test_data: the same, with results named "test"; or several by name (DATASETS.TEST).
        optimizer: the optimizer (SOLVER.OPTIMIZER).
        lr: the learning rate (SOLVER.BASE_LR). Default: that of the optimizer's arguments, or the config's.
        weight_decay: of all parameters but those of normalisation layers (SOLVER.WEIGHT_DECAY). Default: 0.0001.
        lr_scheduler: the schedule (SOLVER.LR_SCHEDULER_NAME). Default: a constant learning rate.
        warmup: length of the warm-up: iterations, "1ep", or a fraction of the run such as 0.1 (SOLVER.WARMUP_ITERS).
            Default: none.
        clip_norm: the largest norm of all gradients together (SOLVER.CLIP_GRADIENTS). Default: no clipping.
        precision: "bf16" or "fp16": forward pass and loss run under autocast (SOLVER.AMP). Default: float32.
        loss: a function or module, called as ``loss(model(x), y)`` (MODEL.LOSS). Without it the model returns its
            losses.
        metrics: metrics of the test data: one, a list, or a dict by name (TEST.METRICS). Default: the loss.
        length: of the run, such as "10ep" or 1000 iterations (SOLVER.MAX_ITER).
        batch_size: samples of an update, over all ranks (DATALOADER.BATCH_SIZE).
        accumulation_steps: micro-batches that a batch is cut into (SOLVER.ACCUMULATION_STEPS).
        num_workers: processes that read data, for each rank (DATALOADER.NUM_WORKERS). Default: none but the rank.
        eval_period: period of evaluations, such as "1ep" (TEST.EVAL_PERIOD). The test data is also evaluated when
            the run is complete.
        monitor: the metric that decides, such as "test/accuracy" (CHECKPOINT.BEST.METRIC): ``model_best.pth`` has its
            best weights, and EarlyStopping and ReduceLROnPlateau follow it if they have no metric.
        monitor_mode: whether more ("max") or less ("min") is better. Default: as the metric's name says
            (CHECKPOINT.BEST.MODE).
        hooks: further hooks: one, or a list (HOOKS).
        ema: the decay of an average of the weights, such as 0.999, which is evaluated (the hook EMA in HOOKS).
        output_dir: the run's folder (OUTPUT_DIR).
        seed: of all random numbers (SEED). Default: a random one, which is logged.
        config: other keys: a mapping such as ``{"LOG.PERIOD": 100}``, a config, or a YAML file. The arguments
            above have precedence; ARGS of the config are added to them. In a mapping, a key that names a
            component (``NAME``, an entry of HOOKS or TEST.METRICS) also takes a class, function or object.

    Raises:
        ConfigError: an argument is wrong. Nothing was written.

    Example::

        trainer = Trainer(Net, train_set, test_set, loss=nn.CrossEntropyLoss(), lr=3e-3,
                          metrics=["Accuracy"], length="10ep", seed=1)
        trainer.train()
        outputs = trainer.predict(test_set)
    """

    _length_key = "length"

    def __init__(
        self,
        model: Any = None,
        train_data: Any = None,
        test_data: Any = None,
        *,
        optimizer: Any = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        lr_scheduler: Any = None,
        warmup: int | float | str | None = None,
        clip_norm: float | None = None,
        precision: Literal["bf16", "fp16"] | None = None,
        loss: Any = None,
        metrics: Any = None,
        length: int | str | None = None,
        batch_size: int | None = None,
        accumulation_steps: int | None = None,
        num_workers: int | None = None,
        eval_period: int | str | None = None,
        monitor: str | None = None,
        monitor_mode: Literal["max", "min", "auto"] | None = None,
        hooks: Any = (),
        ema: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        config: Any = None,
        **unknown: Never,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")}
        for name in unknown:
            raise unknown_argument(name, unknown[name], arguments)
        super().__init__(config_of_arguments(**arguments))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what a method or attribute of other trainers is called."""
            use = {
                "add_callback": "register_hooks([...])",
                "callback_metrics": "storage.latest()",
                "current_epoch": "epoch",
                "fit": 'train(), with length="3ep" and the data in Trainer(...)',
                "global_step": "iter",
                "save_checkpoint": 'checkpointer.save("name")',
                "save_model": 'checkpointer.save("name")',
                "should_stop": 'stop("reason"), or stop_requested to ask',
                "validate": "evaluate()",
            }
            hint = f": it is {use[name]}" if name in use else ""
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'{hint}", name=name, obj=self)

    def train(  # type: ignore[override]
        self, resume: "bool | str | os.PathLike[str]" = False, **unknown: Never
    ) -> TrainResult:
        """Train; see :meth:`DefaultTrainer.train`.

        Args:
            resume: continue from the last checkpoint in ``output_dir``, if there is one; or from the checkpoint of this
                path. Otherwise an earlier run there is moved away, as by ``tools/train_net.py``.

        Returns:
            How the run ended.

        Raises:
            ConfigError: ``resume`` is neither. The length is an argument of the trainer.
        """
        for name in unknown:
            raise unknown_argument(name, unknown[name], ["resume"], "train")
        is_length = isinstance(resume, str) and re.fullmatch(r"\d+ ?[a-z]*", resume)
        if is_length or not isinstance(resume, bool | str | os.PathLike):
            raise ConfigError(
                f"train(): resume is True, False or a checkpoint's path, not {resume!r}. For the length, pass "
                f"length={resume!r} to {type(self).__name__}(...), or set trainer.max_iter before train()"
            )
        if resume or self._resume is None:
            self.resume_or_load(resume=resume)
        return super().train()

    def evaluate(self, data: Any = None, max_batches: int | None = None) -> Mapping[str, Any]:  # type: ignore[override]
        """Evaluate the model. After :meth:`train` that is the trained one.

        Args:
            data: a data set, a loader, a name, or several of these by name. Default: the trainer's test data. Best
                checkpoints, early stopping and the run's results look at the trainer's test data only.
            max_batches: at most this many batches of each set.

        Returns:
            Results by test set ("test" for data without a name) and metric.
        """
        self._load_weights()
        if data is None:
            if not self.cfg.DATASETS.TEST:
                raise ConfigError("evaluate(): this trainer has no test_data; pass the data")
            return super().evaluate(max_batches)
        cfg = self._config_of(data)
        with scratch_storage(self.iter), preserve_rng():
            try:
                self.emit("before_eval")
                with evaluation_context(self.emit, max_batches):
                    return results_of(self, cfg)
            finally:
                self.emit("on_eval_end")

    def predict(  # type: ignore[override]
        self,
        data: Any = None,
        *,
        targets: bool = False,
        metrics: bool = False,
        stream: bool = False,
        ignore_keys: Sequence[str] = (),
        generate: bool = False,
        pad_value: float | None = None,
        output: "str | os.PathLike[str] | None" = None,
    ) -> Any:
        """Return the model's outputs for each sample, in the order of the data.

        Args:
            data: a data set, a loader or a name. Default: the trainer's test data.
            targets: return the targets, too.
            metrics: return the metrics, too.
            stream: return an iterator over batches instead, which keeps only one in memory. Each rank gets its own
                batches; all must read them to the end.
            ignore_keys: names of outputs to leave out, such as "hidden_states".
            generate: return what ``model.generate()`` returns with the arguments ``TEST.GENERATE``.
            pad_value: fills up outputs (N, length, ...) to the longest one, and targets with -100.
            output: a new file, .jsonl or .npz, to write the predictions to, batch by batch, instead of returning them.
                TEST.PREDICTIONS_COLUMNS are its columns.

        Returns:
            The outputs: a tensor on the CPU, or a dict, tuple or list of them, as the model returns them; on all ranks.
            The loss beside the outputs, as of a Hugging Face model, is left out.
            With ``targets`` or ``metrics``: :class:`~hookline.engine.evaluation.metrics.Predictions`. With ``stream``:
            an iterator over outputs, with ``targets`` over pairs of outputs and targets. With ``output``: the number of
            samples.

        Raises:
            ConfigError: outputs of the batches cannot be concatenated, arguments contradict each other, or the file
                exists.
        """
        if metrics and stream:
            raise ConfigError("predict(): metrics are those of all samples; leave out stream=True")
        if output is not None:
            if targets or metrics or stream or ignore_keys or pad_value is not None:
                raise ConfigError("predict(output=...): TEST.PREDICTIONS_COLUMNS of the config says what is written")
            comm.on_main_process(lambda: _check_new(output))
        self._load_weights()
        with preserve_rng(), trained_loss(self, self.cfg if data is None else self._config_of(data)) as cfg:
            names = [name_of(entry) for entry in cfg.DATASETS.TEST]
            if len(names) != 1:
                raise ConfigError(f"predict(): pass one data set; the test data is {', '.join(names) or 'empty'}")
            evaluator = self.build_evaluator(cfg, names[0]) if metrics else None
            asking: Any = SimpleNamespace(generates=generate) if evaluator is None else evaluator
            if generate and not getattr(asking, "generates", False):
                raise ConfigError("predict(): generate=True with metrics needs a metric that has generates = True")
            loader, predict = self.build_test_loader(cfg, names[0]), predictor(self.adapter, asking, cfg.TEST.GENERATE)
            batches = super().predict(check_same_length(loader, "predict()"), with_batches=True, predict=predict)
            if output is not None:
                pairs = ((batch, asking.generated if generate else found) for batch, found in batches)
                rows = prediction_rows(pairs, cfg.TEST.PREDICTIONS_COLUMNS, self.adapter, loader)
                return write_predictions(rows, os.fspath(output))
            if stream:
                return self._stream(batches, targets, ignore_keys)
            if evaluator is not None:
                evaluator.reset()
            outputs, labels = [], []
            for batch, found in batches:
                if evaluator is not None:
                    evaluator.process(batch, found)
                if targets:
                    labels.append(move_to_device(self.adapter.targets(batch), "cpu"))
                found = predictions_of(asking.generated if generate else found, ignore_keys)
                outputs.append(move_to_device(found, "cpu"))
            joined = collect(outputs, pad_value=pad_value)
            if not targets and evaluator is None:
                return joined
            results = comm.broadcast_object(evaluator.evaluate() or {}) if evaluator is not None else {}
            return Predictions(
                joined,
                collect(labels, pad_value=None if pad_value is None else -100) if targets else None,
                results.get(names[0], results),
            )

    def _stream(self, batches: Iterable[Any], targets: bool, ignore_keys: Sequence[str]) -> Iterator[Any]:
        for batch, output in batches:
            predictions = predictions_of(output, ignore_keys)
            yield (predictions, self.adapter.targets(batch)) if targets else predictions

    def _load_weights(self) -> None:
        """Load MODEL.WEIGHTS before the first use of the model."""
        if self._resume is None and self.cfg.MODEL.WEIGHTS:
            self.resume_or_load(resume=False)

    def _config_of(self, data: Any) -> CfgNode:
        """Return the config with other test data. A name of the trainer's test data is that."""
        cfg = self.cfg.thawed()
        cfg.DATALOADER.OVERFIT_BATCHES = 0  # which replaces test data
        own = [entry for entry in cfg.DATASETS.TEST if isinstance(data, str) and name_of(entry) == data]
        with errors_at("data"):
            cfg.DATASETS.TEST = own or test_entries(data)
        cfg.TEST.METRICS = cfg.TEST.METRICS or ["Loss"]
        return cfg


def _check_new(path: "str | os.PathLike[str]") -> None:
    if os.path.lexists(path):
        raise ConfigError(f"predict(output=...): {path} exists, and no file is replaced; give another name")
