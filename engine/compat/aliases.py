"""Names that detectron2 has in other modules than hookline; ``hookline.engine`` imports this module."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from .. import train_loop
from ..simple_trainer import SimpleTrainer
from .amp_trainer import AMPTrainer


class _ThisThread(Executor):
    """Calls at once what a ``run_step`` gives to ``concurrent_executor``: here no metric waits for the device."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


for _trainer in (SimpleTrainer, AMPTrainer):  # detectron2.engine.train_loop holds all trainers
    setattr(train_loop, _trainer.__name__, _trainer)
SimpleTrainer.concurrent_executor = _ThisThread()  # type: ignore[attr-defined]
