"""From the arguments of ``Trainer`` to a config that holds objects in the place of names."""

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...config import CfgNode, ConfigError, component, get_cfg, suggest
from ...config.components import args_key, errors_at
from ...config.errors import MismatchError
from ...config.other_names import hint_of_epochs, key_for
from ...config.values import ObjectName, clean, one_of
from .. import comm
from ..data.build import NoTrainData, is_loader
from ..data.datasets import ArrayDataset

logger = logging.getLogger(__name__)

_KEYS = {
    "model": "MODEL.NAME",
    "train_data": "DATASETS.TRAIN",
    "test_data": "DATASETS.TEST",
    "optimizer": "SOLVER.OPTIMIZER.NAME",
    "lr": "SOLVER.BASE_LR",
    "weight_decay": "SOLVER.WEIGHT_DECAY",
    "lr_scheduler": "SOLVER.LR_SCHEDULER_NAME",
    "warmup": "SOLVER.WARMUP_ITERS",
    "clip_norm": "SOLVER.CLIP_GRADIENTS",
    "precision": "SOLVER.AMP.ENABLED",
    "loss": "MODEL.LOSS.NAME",
    "metrics": "TEST.METRICS",
    "length": "SOLVER.MAX_ITER",
    "batch_size": "DATALOADER.BATCH_SIZE",
    "accumulation_steps": "SOLVER.ACCUMULATION_STEPS",
    "num_workers": "DATALOADER.NUM_WORKERS",
    "eval_period": "TEST.EVAL_PERIOD",
    "monitor": "CHECKPOINT.BEST.METRIC",
    "monitor_mode": "CHECKPOINT.BEST.MODE",
    "hooks": "HOOKS",
    "ema": "HOOKS",
    "output_dir": "OUTPUT_DIR",
    "seed": "SEED",
}
"""The key that each argument sets."""
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


def unknown_argument(name: str, value: object, arguments: Iterable[str], method: str = "Trainer") -> MismatchError:
    """Return the error of an argument that ``Trainer`` or its ``train`` does not have, with what means the same."""
    key = key_for(name)
    argument = next((one for one, own_key in _KEYS.items() if own_key == key), "")
    if key == "--resume" or (key == "MODEL.WEIGHTS" and method == "train"):
        hint = f": it is called resume, train(resume={value!r})"
    elif key == "--num-gpus":
        hint = ": processes are started by torchrun, by launch(), or by --num-gpus of a command"
    elif argument:
        shown = "..." if argument != "length" else repr(f"{value}ep" if hint_of_epochs(name) else value)
        hint = f": it is called {argument}, Trainer(..., {argument}={shown})"
    elif key:
        hint = f': it is a key, config={{"{key}": ...}}'
    else:
        hint = suggest(name, arguments) or f". It takes: {', '.join(arguments)}"
    return MismatchError(f"{method}() takes no argument '{name}'{hint}")


def config_of_arguments(**arguments: Any) -> CfgNode:
    """Return the config of a :class:`~hookline.engine.Trainer` with these arguments.

    Raises:
        ConfigError: an argument is wrong.
    """
    with errors_at("Trainer(config=...)"):
        cfg = _base(arguments.pop("config"))
    for argument, value in arguments.items():
        if value is not None:
            with errors_at(f"Trainer({argument}=...)"):
                _set_argument(cfg, argument, value, arguments)
    if not cfg.DATASETS.TRAIN:
        cfg.DATASETS.TRAIN = [ObjectName(NoTrainData())]
    elif arguments["length"] is None and cfg.SOLVER.MAX_ITER == get_cfg().SOLVER.MAX_ITER:
        raise ConfigError('length: is missing; give a number of epochs or iterations, such as "10ep" or 1000')
    if arguments["eval_period"] and not cfg.DATASETS.TEST:
        logger.warning("Trainer(eval_period=%r): nothing is evaluated without test_data", arguments["eval_period"])
    if arguments["metrics"] is None and cfg.DATASETS.TEST and not cfg.TEST.METRICS:
        cfg.TEST.METRICS = ["Loss"]
    return cfg


def _set_argument(cfg: CfgNode, argument: str, value: Any, arguments: Mapping[str, Any]) -> None:
    if argument == "train_data":
        _set_train_data(cfg, value, arguments)
    elif argument == "test_data":
        cfg.DATASETS.TEST = test_entries(value)
    elif argument == "optimizer":
        _set_optimizer(cfg, value, arguments["lr"])
    elif argument == "metrics":
        by_name = isinstance(value, Mapping) and "NAME" not in value
        cfg.TEST.METRICS = [_entry(one, name) for name, one in value.items()] if by_name else _entries(value)
    elif argument == "hooks":
        cfg.HOOKS = [*cfg.HOOKS, *_entries(value)]
    elif argument == "ema":
        cfg.HOOKS = [*cfg.HOOKS, {"NAME": "EMA", "ARGS": {"decay": value}}]
    elif argument == "clip_norm":
        cfg.merge_from_pairs([(_KEYS[argument], {"ENABLED": True, "CLIP_TYPE": "norm", "CLIP_VALUE": value})])
    elif argument == "precision":
        one_of(*_PRECISIONS)(value)
        cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = True, _PRECISIONS[value]
    elif (
        argument == "lr_scheduler" and isinstance(value, LRScheduler) and value.optimizer is not arguments["optimizer"]
    ):
        raise ConfigError("it belongs to another optimizer; pass its class and arguments, or the optimizer")
    elif args_key(_KEYS[argument]):
        _set_component(cfg, _KEYS[argument], value, not inspect.isclass(value) if argument == "loss" else None)
    else:
        cfg.merge_from_pairs([(_KEYS[argument], value)])


def _base(config: object) -> CfgNode:
    """Return the config that the other arguments change."""
    cfg, defaults = config.thawed() if isinstance(config, CfgNode) else get_cfg(), get_cfg().SOLVER
    for key, value in (("LR_SCHEDULER_NAME", "ConstantLR"), ("WARMUP_ITERS", 0)):
        if cfg.SOLVER[key] == defaults[key]:
            cfg.SOLVER[key] = value
    if isinstance(config, str | os.PathLike):
        cfg.merge_from_file(config)
    elif isinstance(config, Mapping) and not isinstance(config, CfgNode):
        cfg.merge_from_pairs(_with_objects(cfg, config).items())
    elif config is not None and not isinstance(config, CfgNode):
        raise ConfigError(f"expected a mapping of keys, a config or a YAML file, not a {type(config).__name__}")
    return cfg


def _named(value: object, is_component: bool | None = None) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a component: a name, ``{"NAME": ..., "ARGS": ...}``, or an object."""
    if isinstance(value, Mapping) and "NAME" in value:
        name = value["NAME"]
        return component({**value, "NAME": name if isinstance(name, str) else ObjectName(name)})
    if isinstance(value, str):
        return value, {}
    if isinstance(value, functools.partial) and not value.args and not is_component:
        with suppress(ConfigError):  # arguments that a config cannot hold
            return ObjectName(value.func), clean(value.keywords)
    return ObjectName(value, is_component), {}


def _set_component(cfg: CfgNode, key: str, value: object, is_component: bool | None = None) -> CfgNode:
    """Set the component of ``key``. Its arguments have precedence over those of the config, which are returned, too."""
    *section, last = key.split(".")
    node, default = reduce(getitem, section, cfg), reduce(getitem, section, _base(None))
    name, args = _named(value, is_component)
    own = args_key(last) or ""
    if node[own] and node[last] not in (default[last], name):
        logger.warning("%s is %s; %s of the config, and its arguments, are not used", key, name, node[last])
        node[own].clear()
    if node[own] and isinstance(name, ObjectName) and name.is_component:
        raise ConfigError(f"an object is built already, and cannot take {args_key(key)} of the config: pass its class")
    node[last], node[own] = name, CfgNode({**node[own], **args}, new_allowed=True)
    return node[own]


def _with_objects(cfg: CfgNode, value: object, key: str = "") -> Any:
    """Return keys and values with an :class:`ObjectName` for each object in the place of a name."""
    if isinstance(value, Mapping):
        return {name: _with_objects(cfg, one, f"{key}.{name}".lstrip(".")) for name, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_with_objects(cfg, one, f"{key}.NAME") for one in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = ObjectName(value)
    if f"{key}.NAME" in dict(cfg.walk()):
        return {"NAME": name}
    return name if args_key(key.split(".")[-1]) else value


def _entry(value: object, own_name: str = "") -> str | dict[str, Any]:
    name, args = _named(value)
    own_name = own_name or (value.get("AS", "") if isinstance(value, Mapping) else "")
    entry = {"NAME": name, **({"ARGS": args} if args else {}), **({"AS": own_name} if own_name else {})}
    return entry if len(entry) > 1 else name


def _entries(values: object) -> list[Any]:
    """Return the entries for one component or several."""
    if isinstance(values, Mapping) and "NAME" not in values:
        raise ConfigError('expected a list such as ["EMA"] or [{"NAME": "EMA", "ARGS": {...}}], not a dict')
    if isinstance(values, str | Mapping) or callable(values) or not isinstance(values, Iterable):
        values = [values]
    if isinstance(values, set):
        raise ConfigError("expected a list: a set has no certain order")
    return [_entry(value) for value in values if value is not None]


def _rows(data: object) -> object:
    """Return a data set for a tuple of tensors or arrays with one row per sample; other data as it is.

    Beside a tensor or an array, lists of numbers and columns of tables will do.
    """
    if not isinstance(data, tuple) or not any(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        return data
    # Not torch for a pandas.Series, which it reads by its index.
    parts = [part if isinstance(part, torch.Tensor | list) else np.asarray(part) for part in data]
    if any(np.asarray(part).dtype.kind in "US" for part in parts if not isinstance(part, torch.Tensor)):
        raise ConfigError("the labels are strings: number them, as np.unique(labels, return_inverse=True)[1] does")
    return ArrayDataset(*map(torch.as_tensor, parts))


def _set_train_data(cfg: CfgNode, data: object, arguments: Mapping[str, Any]) -> None:
    """Set ``DATASETS.TRAIN``, and the batch size if it is a loader's own."""
    if (isinstance(data, Mapping) and "NAME" not in data) or (
        isinstance(data, list) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data)
    ):
        raise ConfigError(f"a {type(data).__name__} is not a data set: pass a tuple of tensors (x, y), or a data set")
    cfg.DATASETS.TRAIN = [_entry(_rows(data))]
    if not inspect.isclass(data) and not inspect.isroutine(data) and is_loader(data):
        for argument in ("batch_size", "num_workers"):
            if arguments[argument] is not None:
                raise ConfigError(f"a loader has its own {argument}; leave out the argument, or pass the data set")
        own = getattr(data, "batch_size", None) or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
        if isinstance(own, int):
            cfg.DATALOADER.BATCH_SIZE = own * comm.get_data_size()


def test_entries(data: object) -> list[Any]:
    """Return the entries of ``DATASETS.TEST`` for test data: one data set or loader, or several by name."""
    if isinstance(data, Mapping) and "NAME" not in data:
        return [_entry(_rows(one), str(name)) for name, one in data.items()]
    return [_entry(_rows(data), "" if isinstance(data, str | Mapping) else "test")]


def _set_optimizer(cfg: CfgNode, optimizer: object, lr: float | None) -> None:
    """Set ``SOLVER.OPTIMIZER``, and the learning rate if it is the optimizer's own."""
    if isinstance(optimizer, list | tuple):
        raise ConfigError("several optimizers are named in the key SOLVER.OPTIMIZERS: pass them by config")
    own = _set_component(cfg, "SOLVER.OPTIMIZER.NAME", optimizer).pop("lr", None)
    if isinstance(optimizer, Optimizer):
        own = optimizer.param_groups[0]["lr"]
    if own is not None and lr is not None:
        raise ConfigError(f"lr is {lr}, but the optimizer has the learning rate {own}: give one of them")
    if own is not None:
        cfg.merge_from_pairs([("SOLVER.BASE_LR", own)])
