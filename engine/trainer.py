"""``Trainer``: a run in one call, without a config file."""

import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config import CfgNode, ConfigError, component, get_cfg, name_of
from ..config.literals import clean
from ..config.merging import Merge
from ..config.objects import ObjectName
from ..config.slots import errors_at
from . import comm
from .checkpoint import unwrap_model
from .data.datasets import ArrayDataset
from .data.given import NoTrainData, is_loader
from .defaults import DefaultTrainer
from .evaluation import evaluation_context
from .evaluation.collect import Predictions, collect
from .evaluation.test_sets import predictor
from .train_loop import TrainResult

__all__ = ["Trainer"]


class Trainer(DefaultTrainer):
    """A :class:`DefaultTrainer` for objects: it puts them into a config, and everything else is the same.

    Most arguments set a key of the config, given in brackets. They take what the config takes, a name or
    ``{"NAME": ..., "ARGS": {...}}``, and also a class or function, which is called like one that a config names, or the
    object itself. A class is built after the random generators are seeded; an object was built before. Keys without an
    argument are set by ``config``; all are documented in ``config/defaults.py``.

    The run's ``config.yaml`` shows objects as ``<object module.Name>``. Only the same script can repeat it.

    Args:
        model: the model (MODEL.NAME).
        train_data: a data set, a tuple of tensors ``(x, y)``, or a loader of batches (DATASETS.TRAIN). None: only
            evaluate and predict. Data sets are split over ranks, and a resume starts in the middle of an epoch; a
            loader is used as it is.
        test_data: the same, with results named "test"; or several by name (DATASETS.TEST).
        optimizer: the optimizer (SOLVER.OPTIMIZER).
        lr: the learning rate (SOLVER.BASE_LR). Default: that of the optimizer's arguments, or the config's.
        lr_scheduler: the schedule (SOLVER.LR_SCHEDULER_NAME). Default: a constant learning rate. There is no warm-up
            unless ``config`` sets SOLVER.WARMUP_ITERS.
        loss: a function or module, called as ``loss(model(x), y)`` (MODEL.LOSS). Without it the model returns its
            losses.
        metrics: metrics of the test data, in a list or by name (TEST.METRICS). Default: the loss.
        length: of the run, such as "10ep" or 1000 iterations (SOLVER.MAX_ITER).
        batch_size: samples of an update, over all ranks (DATALOADER.BATCH_SIZE).
        eval_period: period of evaluations, such as "1ep" (TEST.EVAL_PERIOD). The test data is always evaluated at the
            end.
        hooks: further hooks (HOOKS).
        output_dir: the run's folder (OUTPUT_DIR).
        seed: of all random numbers (SEED). Default: a random one, which is logged.
        config: other keys: a mapping such as ``{"SOLVER.WARMUP_ITERS": 100}``, a config, or a YAML file. The arguments
            above have precedence.

    Raises:
        ConfigError: an argument is wrong. Nothing was written.

    Example::

        trainer = Trainer(Net, train_set, test_set, optimizer="AdamW", lr=3e-3, loss=nn.CrossEntropyLoss(),
                          metrics=["Accuracy"], length="10ep", seed=1)
        trainer.train()
        outputs = trainer.predict(test_set)
    """

    def __init__(
        self,
        model: Any,
        train_data: Any = None,
        test_data: Any = None,
        *,
        optimizer: Any = None,
        lr: float | None = None,
        lr_scheduler: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        length: int | str | None = None,
        batch_size: int | None = None,
        eval_period: int | str | None = None,
        hooks: Sequence[Any] = (),
        output_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        config: Any = None,
    ) -> None:
        with _errors_of("config"):
            cfg = _base(config)
        with _errors_of("model"):
            _set_component(cfg.MODEL, "NAME", model)
        with _errors_of("train_data"):
            _set_train_data(cfg, train_data, batch_size)
        if test_data is not None:
            with _errors_of("test_data"):
                cfg.DATASETS.TEST = _test_entries(test_data)
        if loss is not None:
            with _errors_of("loss"):
                _set_component(cfg.MODEL.LOSS, "NAME", loss, is_component=not inspect.isclass(loss))
        if optimizer is not None or lr is not None:
            with _errors_of("optimizer"):
                _set_optimizer(cfg, optimizer, lr)
        if lr_scheduler is not None:
            with _errors_of("lr_scheduler"):
                if isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not optimizer:
                    raise ConfigError("it belongs to another optimizer; pass its class and arguments, or the optimizer")
                _set_component(cfg.SOLVER, "LR_SCHEDULER_NAME", lr_scheduler)
        if metrics is not None:
            with _errors_of("metrics"):
                cfg.TEST.METRICS = _entries(metrics)
        elif cfg.DATASETS.TEST and not cfg.TEST.METRICS:
            cfg.TEST.METRICS = ["Loss"]
        if hooks:
            with _errors_of("hooks"):
                _check_functions(hooks)
                cfg.HOOKS = [*cfg.HOOKS, *_entries(hooks)]
        if train_data is not None and length is None and cfg.SOLVER.MAX_ITER == get_cfg().SOLVER.MAX_ITER:
            raise ConfigError('length: is missing; give a number of epochs or iterations, such as "10ep" or 1000')
        for argument, key, value in (
            ("length", "SOLVER.MAX_ITER", length),
            ("batch_size", "DATALOADER.BATCH_SIZE", batch_size),
            ("eval_period", "TEST.EVAL_PERIOD", eval_period),
            ("output_dir", "OUTPUT_DIR", None if output_dir is None else os.fspath(output_dir)),
            ("seed", "SEED", seed),
        ):
            if value is not None:
                with _errors_of(argument):
                    _merge(cfg, {key: value})
        super().__init__(cfg)

    def train(self, resume: bool = False) -> TrainResult:  # type: ignore[override]
        """Train; see :meth:`DefaultTrainer.train`.

        Args:
            resume: continue from the last checkpoint in ``output_dir``, if there is one. Otherwise an earlier run there
                is moved away, as by ``tools/train_net.py``.

        Returns:
            How the run ended.
        """
        if resume or self._resume is None:
            self.resume_or_load(resume=resume)
        return super().train()

    def evaluate(self, data: Any = None, max_batches: int | None = None) -> Mapping[str, Any]:  # type: ignore[override]
        """Evaluate the model. After :meth:`train` that is the trained one.

        Args:
            data: a data set, a loader, a name, or several of these by name. Default: the trainer's test data. Best
                checkpoints, early stopping and the run's results look at the trainer's test data only.
            max_batches: at most so many batches of each set.

        Returns:
            Results by test set ("test" for data without a name) and metric.
        """
        self._load_weights()
        if data is None:
            if not self.cfg.DATASETS.TEST:
                raise ConfigError("evaluate(): this trainer has no test_data; pass the data")
            return super().evaluate(max_batches)
        cfg = self._config_of(data)
        self.strategy.before_evaluation(self.model)
        try:
            self.emit("before_eval")
            with evaluation_context(self.emit, max_batches):
                results = self.test(cfg, unwrap_model(self.model))
        finally:
            self.emit("on_eval_end")
        return comm.broadcast_object(results)

    def predict(  # type: ignore[override]
        self, data: Any = None, *, targets: bool = False, metrics: bool = False, stream: bool = False
    ) -> Any:
        """Return the model's outputs for each sample, in the order of the data.

        Args:
            data: a data set, a loader or a name. Default: the trainer's test data.
            targets: return the targets, too.
            metrics: return the metrics, too.
            stream: return an iterator over batches instead, which keeps only one in memory. Each rank gets its own
                batches; all must read them to the end.

        Returns:
            The outputs: a tensor on the CPU, or a dict, tuple or list of them, as the model returns them; on all ranks.
            With ``targets`` or ``metrics``: :class:`~hookline.engine.evaluation.Predictions`. With ``stream``: an
            iterator over outputs, with ``targets`` over pairs of outputs and targets.

        Raises:
            ConfigError: outputs of the batches cannot be concatenated, or ``metrics`` and ``stream`` are both set.
        """
        if metrics and stream:
            raise ConfigError("predict(): metrics are those of all samples; leave out stream=True")
        self._load_weights()
        cfg = self.cfg if data is None else self._config_of(data)
        names = [name_of(entry) for entry in cfg.DATASETS.TEST]
        if len(names) != 1:
            raise ConfigError(f"predict(): pass one data set; the test data is {', '.join(names) or 'empty'}")
        evaluator = self.build_evaluator(cfg, names[0]) if metrics else None
        loader, predict = self.build_test_loader(cfg, names[0]), predictor(self.adapter, evaluator)
        batches = super().predict(loader, with_batches=True, predict=predict)
        if stream:
            return self._stream(batches, targets)
        if evaluator is not None:
            evaluator.reset()
        outputs, labels = [], []
        for batch, output in batches:
            if evaluator is not None:
                evaluator.process(batch, output)
            if targets:
                labels.append(self.adapter.targets(batch))
            outputs.append(output)
        joined = collect(outputs)
        if not targets and evaluator is None:
            return joined
        results = comm.broadcast_object(evaluator.evaluate() or {}) if evaluator is not None else {}
        return Predictions(joined, collect(labels) if targets else None, results.get(names[0], results))

    def _stream(self, batches: Iterable[Any], targets: bool) -> Iterator[Any]:
        for batch, output in batches:
            yield (output, self.adapter.targets(batch)) if targets else output

    def _load_weights(self) -> None:
        """Load MODEL.WEIGHTS before the first use of the model."""
        if self._resume is None and self.cfg.MODEL.WEIGHTS:
            self.resume_or_load(resume=False)

    def _config_of(self, data: Any) -> CfgNode:
        """Return the config with other test data. A name of the trainer's test data is that."""
        frozen, cfg = self.cfg.is_frozen(), self.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.OVERFIT_BATCHES = 0  # which replaces test data
        own = [entry for entry in cfg.DATASETS.TEST if isinstance(data, str) and name_of(entry) == data]
        with _errors_of("data"):
            cfg.DATASETS.TEST = own or _test_entries(data)
        cfg.TEST.METRICS = cfg.TEST.METRICS or ["Loss"]
        if frozen:
            cfg.freeze()
        return cfg


# ---------------------------------------------------------------------------- from arguments to keys


def _errors_of(argument: str) -> Any:
    return errors_at(f"Trainer({argument}=...)")


def _base(config: Any) -> CfgNode:
    """Return the config that the other arguments change."""
    cfg, defaults = config.clone() if isinstance(config, CfgNode) else get_cfg(), get_cfg().SOLVER
    cfg.defrost()
    for key, value in (("LR_SCHEDULER_NAME", "ConstantLR"), ("WARMUP_ITERS", 0)):
        if cfg.SOLVER[key] == defaults[key]:
            cfg.SOLVER[key] = value
    if isinstance(config, str | os.PathLike):
        cfg.merge_from_file(config)
    elif isinstance(config, Mapping) and not isinstance(config, CfgNode):
        _merge(cfg, config)
    elif config is not None and not isinstance(config, CfgNode):
        raise ConfigError(f"expected a mapping of keys, a config or a YAML file, not a {type(config).__name__}")
    return cfg


def _merge(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    with Merge(cfg) as merge:
        merge.overrides(keys.items())


def _named(value: Any, is_component: bool | None = None) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a component: a name, ``{"NAME": ..., "ARGS": ...}``, or an object."""
    if isinstance(value, Mapping) and "NAME" in value:
        name, args = value["NAME"], value.get("ARGS")
        _, checked = component({**value, "NAME": name if isinstance(name, str) else ObjectName(name)})
        return name if isinstance(name, str) else ObjectName(name), checked if args is not None else {}
    if isinstance(value, str):
        return value, {}
    if isinstance(value, functools.partial) and not value.args and not is_component:
        try:
            return ObjectName(value.func), clean(value.keywords)
        except ConfigError:  # arguments that a config cannot hold
            pass
    return ObjectName(value, is_component), {}


def _set_component(node: CfgNode, key: str, value: Any, is_component: bool | None = None) -> None:
    name, args = _named(value, is_component)
    node[key], node[key.replace("NAME", "ARGS")] = name, CfgNode(args, new_allowed=True)


def _entry(value: Any, own_name: str = "") -> str | dict[str, Any]:
    name, args = _named(value)
    own_name = own_name or (value.get("AS", "") if isinstance(value, Mapping) else "")
    entry = {"NAME": name, **({"ARGS": args} if args else {}), **({"AS": own_name} if own_name else {})}
    return entry if len(entry) > 1 else name


def _entries(values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    if isinstance(values, Mapping) and "NAME" not in values:
        return [_entry(value, name) for name, value in values.items()]
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"expected a list, not {values!r}")
    return [_entry(value) for value in values if value is not None]


def _check_functions(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        if inspect.isroutine(hook) and "trainer" in inspect.signature(hook).parameters:
            raise ConfigError(
                f"{hook.__name__} is a function of the trainer, not a hook: write CallbackHook(after_step=...), or "
                'decorate it with @on("after_step") and leave it out here, since it then joins each trainer by itself'
            )


def _rows(data: Any) -> Any:
    """Return a data set for a tuple of tensors or arrays with one row per sample; other data as it is."""
    if isinstance(data, tuple) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        return ArrayDataset(*map(torch.as_tensor, data))
    return data


def _set_train_data(cfg: CfgNode, data: Any, batch_size: int | None) -> None:
    if data is None:
        if not cfg.DATASETS.TRAIN:
            cfg.DATASETS.TRAIN = [ObjectName(NoTrainData())]
        return
    cfg.DATASETS.TRAIN = [_entry(_rows(data))]
    if not inspect.isclass(data) and not inspect.isroutine(data) and is_loader(data):
        if batch_size is not None:
            raise ConfigError("a loader has its own batch size; leave out batch_size, or pass the data set")
        own = getattr(data, "batch_size", None) or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
        if isinstance(own, int):
            cfg.DATALOADER.BATCH_SIZE = own * comm.get_data_size()


def _test_entries(data: Any) -> list[Any]:
    if isinstance(data, Mapping) and "NAME" not in data:
        return [_entry(_rows(one), str(name)) for name, one in data.items()]
    return [_entry(_rows(data), "" if isinstance(data, str | Mapping) else "test")]


def _set_optimizer(cfg: CfgNode, optimizer: Any, lr: float | None) -> None:
    solver = cfg.SOLVER
    if isinstance(optimizer, list | tuple):
        raise ConfigError("several optimizers are named in the key SOLVER.OPTIMIZERS: pass them by config")
    if optimizer is not None:
        name, args = _named(optimizer)
        own = args.pop("lr", None)
        if isinstance(optimizer, Optimizer):
            own = optimizer.param_groups[0]["lr"]
        if own is not None and lr is not None:
            raise ConfigError(f"lr is {lr}, but the optimizer has the learning rate {own}: give one of them")
        lr = own if lr is None else lr
        solver.OPTIMIZER.NAME, solver.OPTIMIZER.ARGS = name, CfgNode(args, new_allowed=True)
    if lr is not None:
        _merge(cfg, {"SOLVER.BASE_LR": float(lr)})
