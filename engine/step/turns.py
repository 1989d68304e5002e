"""Steps in which several optimizers take turns, as those of a GAN do."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...hooks.common.models import unwrap_model
from ..modeling.adapters import ModelAdapter

__all__ = ["Turns"]


class Turns:
    """A step with one turn for each optimizer, in their order.

    In a turn the model is called with the name of the optimizer as its argument ``optimizer``, and the losses that it
    returns update the parameters of that optimizer. Gradients of other parameters are discarded. A turn is a complete
    step: hooks get the events from ``before_forward`` to ``after_zero_grad``, ``trainer.optimizer`` is the optimizer
    whose turn it is, gradients are clipped and checked. All turns of a step have the same batch.

    Losses are logged as ``<optimizer>/<loss>``, and ``total_loss`` is their sum.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, _TurnAdapter] = {}

    def check(self, trainer: Any) -> None:
        """Everything that a usual step supports works in turns, too."""

    def check_called(self, trainer: Any) -> None:
        """A trainer with its own ``run_step`` may do without turns."""

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        """Run a step, except for reading its batch; see :class:`Turns`."""
        optimizers, adapter = trainer.optimizer, trainer.adapter
        losses: dict[str, torch.Tensor] = {}
        try:
            for name, optimizer in optimizers.named.items():
                if (trainer.iter + 1) % optimizers.every.get(name, 1):
                    optimizer._opt_called = True  # torch's schedulers, which are stepped all the same, check it
                    continue
                if trainer.zero_grad_before_forward:
                    trainer.zero_grad()
                trainer.optimizer, trainer.adapter = optimizer, self._adapter(adapter, name)
                own = self._turn(trainer, batch, name)
                losses |= {f"{name}/{loss}": value for loss, value in own.items()}
                trainer.optimizer, trainer.adapter = optimizers, adapter
                if not trainer.zero_grad_before_forward:
                    trainer.zero_grad()  # of all: a turn leaves gradients in the other parts, too
        finally:
            trainer.optimizer, trainer.adapter = optimizers, adapter
        if losses and (trainer.iter + 1) % trainer.gather_metric_period == 0:
            self._put(trainer, losses, data_time)
        return True

    def _turn(self, trainer: Any, batch: Any, name: str) -> dict[str, torch.Tensor]:
        trainer.nonfinite.begin(trainer)
        if trainer.accumulation_steps > 1 or trainer._averaging_ranks > 1:
            losses: dict[str, torch.Tensor] = trainer.accumulate(batch)
        else:
            losses = trainer.forward_backward(batch)
        on_cpu = {loss: value.item() for loss, value in losses.items() if value.device.type == "cpu"}
        error = None
        if not all(map(math.isfinite, on_cpu.values())):
            error = FloatingPointError(f"the loss of {name} is NaN or infinite at iteration {trainer.iter}: {on_cpu}")
        trainer.nonfinite.check(trainer, losses, error)
        with trainer.storage.name_scope(name):  # grad_norm
            trainer.optimizer_step()
        return losses

    def _put(self, trainer: Any, losses: Mapping[str, torch.Tensor], data_time: float) -> None:
        if trainer._averaging_ranks > 1:
            trainer.storage.average_over_ranks((*losses, "total_loss"))
        values: dict[str, Any] = {
            name: loss.item() if loss.device.type == "cpu" else loss.detach() for name, loss in losses.items()
        }
        trainer.storage.put_scalars(data_time=data_time, total_loss=sum(values.values()), **values)

    def _adapter(self, adapter: ModelAdapter, name: str) -> "_TurnAdapter":
        found = self._adapters.get(name)
        if found is None or found.adapter is not adapter:
            found = self._adapters[name] = _TurnAdapter(adapter, name)
        return found


class _TurnAdapter:
    """An adapter that gives the model the name of an optimizer."""

    def __init__(self, adapter: ModelAdapter, name: str) -> None:
        self.adapter = adapter
        self._name = name
        self._bound: _Bound | None = None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.adapter, attribute)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Run the model on a batch and return its losses."""
        if self._bound is None or self._bound.model is not model:
            self._bound = _Bound(model, self._name)
        return self.adapter.losses(self._bound, batch)  # type: ignore[arg-type]


class _Bound:
    """A model whose argument ``optimizer`` is given."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self._name = name
        signature = inspect.signature(unwrap_model(model).forward)
        rest = [parameter for name, parameter in signature.parameters.items() if name != "optimizer"]
        self.__signature__ = signature.replace(parameters=rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, optimizer=self._name, **kwargs)
