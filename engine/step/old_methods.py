"""Attributes of a trainer that scripts set, and methods that trainers for early versions of detectron2 override."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import wraps
from typing import Any

from ..data.epoch_iterator import EpochIterator

__all__ = ["DataLoaderIter", "ThisThread", "TrainLoader", "adapt_old_methods"]


class ThisThread(Executor):
    """``concurrent_executor`` of a trainer: calls at once what is submitted, since no metric waits for the device."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class TrainLoader:
    """``data_loader`` of a trainer. A loader that is assigned has the effect of ``reset_data_loader``."""

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        if trainer is None:
            return self
        if "data_loader" not in vars(trainer):
            raise AttributeError(f"the {type(trainer).__name__} has no data_loader")
        return vars(trainer)["data_loader"]

    def __set__(self, trainer: Any, loader: Any) -> None:
        vars(trainer)["data_loader"] = loader
        before = vars(trainer).get("_batches")
        if before is not None:
            trainer._batches = EpochIterator(loader, trainer._given_length, before.listener)
            trainer._batches.continue_from(before)
            trainer._follow_indices()

    def __delete__(self, trainer: Any) -> None:
        del vars(trainer)["data_loader"]
        if "_batches" in vars(trainer):
            trainer._batches = trainer._batches.without_loader()


class DataLoaderIter:
    """``_data_loader_iter`` of a trainer: its batches. A subclass may set another iterator."""

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        return self if trainer is None else trainer._batches

    def __set__(self, trainer: Any, batches: Iterator[Any]) -> None:
        before = vars(trainer).get("_batches")  # of the trainer itself: this one may be its temporary ``_trainer``
        trainer._batches = EpochIterator(batches, None, weakref.proxy(trainer) if before is None else before.listener)
        trainer._follow_indices()


def adapt_old_methods(cls: Any) -> None:
    """Have a trainer's step work with a ``_write_metrics(metrics_dict)``, as early trainers of detectron2 have.

    The dict has the losses and ``data_time``.
    """
    write = cls._write_metrics
    if len(inspect.signature(write).parameters) == 2:  # self and the dict

        @wraps(write)
        def _write_metrics(self: Any, loss_dict: Mapping[str, Any], data_time: float | None = None) -> None:
            write(self, dict(loss_dict) if data_time is None else {**loss_dict, "data_time": data_time})

        cls._write_metrics = _write_metrics
