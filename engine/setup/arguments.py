"""From the arguments of ``Trainer`` to a config that holds objects in the place of names."""

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...config import CfgNode, ConfigError, component, get_cfg
from ...config.components import args_key, errors_at
from ...config.merging import merging
from ...config.values import ObjectName, clean
from .. import comm
from ..data.build import NoTrainData, is_loader
from ..data.datasets import ArrayDataset

__all__ = ["config_of_arguments", "test_entries"]

logger = logging.getLogger(__name__)


def config_of_arguments(
    model: Any,
    train_data: Any,
    test_data: Any,
    *,
    optimizer: Any,
    lr: float | None,
    lr_scheduler: Any,
    loss: Any,
    metrics: Sequence[Any] | Mapping[str, Any] | None,
    length: int | str | None,
    batch_size: int | None,
    eval_period: int | str | None,
    monitor: str | None,
    monitor_mode: str | None,
    hooks: Sequence[Any],
    output_dir: str | os.PathLike[str] | None,
    seed: int | None,
    config: Any,
) -> CfgNode:
    """Return the config of a :class:`~hookline.engine.Trainer`, whose arguments these are.

    Raises:
        ConfigError: an argument is wrong.
    """
    with _errors_of("config"):
        cfg = _base(config)
    with _errors_of("model"):
        _set_component(cfg, "MODEL.NAME", model)
    with _errors_of("train_data"):
        _set_train_data(cfg, train_data, batch_size)
    if test_data is not None:
        with _errors_of("test_data"):
            cfg.DATASETS.TEST = test_entries(test_data)
    if loss is not None:
        with _errors_of("loss"):
            _set_component(cfg, "MODEL.LOSS.NAME", loss, is_component=not inspect.isclass(loss))
    gives_lr = "optimizer" if lr is None else "lr"
    if optimizer is not None:
        with _errors_of("optimizer"):
            lr = _set_optimizer(cfg, optimizer, lr)
    if lr is not None:
        with _errors_of(gives_lr):
            _merge(cfg, {"SOLVER.BASE_LR": float(lr)})
    if lr_scheduler is not None:
        with _errors_of("lr_scheduler"):
            if isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not optimizer:
                raise ConfigError("it belongs to another optimizer; pass its class and arguments, or the optimizer")
            _set_component(cfg, "SOLVER.LR_SCHEDULER_NAME", lr_scheduler)
    if metrics is not None:
        with _errors_of("metrics"):
            cfg.TEST.METRICS = _entries(metrics)
    elif cfg.DATASETS.TEST and not cfg.TEST.METRICS:
        cfg.TEST.METRICS = ["Loss"]
    if hooks:
        with _errors_of("hooks"):
            entries = _entries(hooks)
            _check_functions(hooks)
            cfg.HOOKS = [*cfg.HOOKS, *entries]
    if train_data is not None and length is None and cfg.SOLVER.MAX_ITER == get_cfg().SOLVER.MAX_ITER:
        raise ConfigError('length: is missing; give a number of epochs or iterations, such as "10ep" or 1000')
    for argument, key, value in (
        ("length", "SOLVER.MAX_ITER", length),
        ("batch_size", "DATALOADER.BATCH_SIZE", batch_size),
        ("eval_period", "TEST.EVAL_PERIOD", eval_period),
        ("monitor", "CHECKPOINT.BEST.METRIC", monitor),
        ("monitor_mode", "CHECKPOINT.BEST.MODE", monitor_mode),
        ("output_dir", "OUTPUT_DIR", None if output_dir is None else os.fspath(output_dir)),
        ("seed", "SEED", seed),
    ):
        if value is not None:
            with _errors_of(argument):
                _merge(cfg, {key: value})
    return cfg


def _errors_of(argument: str) -> AbstractContextManager[None]:
    """Put the name of an argument of ``Trainer`` in front of the message of any error."""
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
        _merge(cfg, _with_objects(cfg, config))
    elif config is not None and not isinstance(config, CfgNode):
        raise ConfigError(f"expected a mapping of keys, a config or a YAML file, not a {type(config).__name__}")
    return cfg


def _merge(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    with merging(cfg) as merge:
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


def _set_component(cfg: CfgNode, key: str, value: Any, is_component: bool | None = None) -> CfgNode:
    """Set the component of ``key``, and return its arguments: its own and those that the config has for it."""
    *section, last = key.split(".")
    node, default = reduce(getitem, section, cfg), reduce(getitem, section, _base(None))
    name, args = _named(value, is_component)
    key_of_args = args_key(last) or ""
    given, full_key = dict(node[key_of_args]), ".".join((*section, key_of_args))
    if given and node[last] not in (default[last], name):
        logger.warning("%s is %s; %s of the config, and its arguments, are not used", key, name, node[last])
        given = {}
    if given and isinstance(name, ObjectName) and name.is_component:
        raise ConfigError(f"an object is built already, and cannot take {full_key} of the config: pass its class")
    if twice := [one for one in args if one in given]:
        raise ConfigError(f"{twice[0]} is given here, and as {full_key}.{twice[0]} in the config: give one of them")
    node[last], node[key_of_args] = name, CfgNode({**given, **args}, new_allowed=True)
    return node[key_of_args]


def _with_objects(cfg: CfgNode, value: Any, key: str = "") -> Any:
    """Return keys and values with an :class:`ObjectName` for each object in the place of a name."""
    if isinstance(value, Mapping):
        return {name: _with_objects(cfg, one, f"{key}.{name}".lstrip(".")) for name, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_with_objects(cfg, one, f"{key}.NAME") for one in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    is_function = key.endswith("_FUNCTION") or "COLLATE_FN" in key
    if f"{key}.NAME" in cfg.full_keys():
        return {"NAME": ObjectName(value, False if is_function else None)}
    return ObjectName(value, False if is_function else None) if is_function or args_key(key.split(".")[-1]) else value


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
    if (isinstance(data, Mapping) and "NAME" not in data) or (
        isinstance(data, list) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data)
    ):
        raise ConfigError(f"a {type(data).__name__} is not a data set: pass a tuple of tensors (x, y), or a data set")
    cfg.DATASETS.TRAIN = [_entry(_rows(data))]
    if not inspect.isclass(data) and not inspect.isroutine(data) and is_loader(data):
        if batch_size is not None:
            raise ConfigError("a loader has its own batch size; leave out batch_size, or pass the data set")
        own = getattr(data, "batch_size", None) or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
        if isinstance(own, int):
            cfg.DATALOADER.BATCH_SIZE = own * comm.get_data_size()


def test_entries(data: Any) -> list[Any]:
    """Return the entries of ``DATASETS.TEST`` for test data: one data set or loader, or several by name."""
    if isinstance(data, Mapping) and "NAME" not in data:
        return [_entry(_rows(one), str(name)) for name, one in data.items()]
    return [_entry(_rows(data), "" if isinstance(data, str | Mapping) else "test")]


def _set_optimizer(cfg: CfgNode, optimizer: Any, lr: float | None) -> float | None:
    """Set ``SOLVER.OPTIMIZER``, and return the learning rate: ``lr``, or the optimizer's own."""
    if isinstance(optimizer, list | tuple):
        raise ConfigError("several optimizers are named in the key SOLVER.OPTIMIZERS: pass them by config")
    own = _set_component(cfg, "SOLVER.OPTIMIZER.NAME", optimizer).pop("lr", None)
    if isinstance(optimizer, Optimizer):
        own = optimizer.param_groups[0]["lr"]
    if own is not None and lr is not None:
        raise ConfigError(f"lr is {lr}, but the optimizer has the learning rate {own}: give one of them")
    return own if lr is None else lr
