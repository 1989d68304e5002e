"""Steps in which several optimizers take turns, as those of a GAN do."""

from copy import copy
from functools import partial
from typing import Any

from torch import nn

from ...hooks.common import unwrap_model
from ..modeling.adapters import ModelAdapter
from .loss_weights import forward_backward_weighted
from .protocol import StepTrainer


class AlternatingStep:
    """A step with one turn for each optimizer, in their order.

    In a turn the model is called with the name of the optimizer as its argument ``optimizer``, and the losses that it
    returns update the parameters of that optimizer. Gradients of other parameters are discarded. A turn is a complete
    step: hooks get the events from ``before_forward`` to ``after_zero_grad``, ``trainer.optimizer`` is the optimizer
    whose turn it is, gradients are clipped and checked. All turns of a step have the same batch.

    Losses are logged as ``<optimizer>/<loss>``, with their sum ``<optimizer>/total_loss``; ``total_loss`` is the sum of
    all.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, tuple[ModelAdapter, nn.Module, Any]] = {}

    def run(self, trainer: StepTrainer, batch: Any, data_time: float) -> None:
        """Run a step, except for reading its batch; see the class."""
        optimizers, adapter = trainer.optimizer, trainer.adapter
        total: Any = 0.0
        try:
            for name, optimizer in optimizers.named.items():
                if trainer.zero_grad_before_forward:
                    trainer.zero_grad()
                trainer.optimizer, trainer.adapter = optimizer, self._adapter(adapter, trainer.model, name)
                if trainer.accumulation_steps > 1 or trainer.averaging_ranks > 1:
                    losses = forward_backward_weighted(trainer, batch)
                else:
                    losses = trainer.forward_backward(batch)
                trainer.record_losses(losses, data_time, f"{name}/")
                total = total + sum(loss.detach() for loss in losses.values())
                with trainer.storage.name_scope(name):  # grad_norm
                    trainer.optimizer_step()
                trainer.optimizer, trainer.adapter = optimizers, adapter
                if not trainer.zero_grad_before_forward:
                    trainer.zero_grad()  # of all: a turn leaves gradients in the parameters of others, too
        finally:
            trainer.optimizer, trainer.adapter = optimizers, adapter
        if (trainer.iter + 1) % trainer.gather_metric_period == 0:
            if trainer.averaging_ranks > 1:
                trainer.storage.over_ranks["total_loss"] = "loss"
            trainer.storage.put_scalar("total_loss", total)

    def _adapter(self, adapter: ModelAdapter, model: nn.Module, name: str) -> Any:
        """Return an adapter that gives the model the name of an optimizer, as its argument ``optimizer``."""
        found = self._adapters.get(name)
        if found is None or found[:2] != (adapter, model):
            call: Any = partial(model, optimizer=name)
            module = unwrap_model(model)
            call.forward = partial(module.forward, optimizer=name)  # the adapter reads its signature
            call._compiled_call_impl = getattr(module, "_compiled_call_impl", None)  # and whether it is compiled
            bound: Any = copy(adapter)
            bound.losses = lambda model, batch: type(adapter).losses(bound, call, batch)
            found = self._adapters[name] = (adapter, model, bound)
        return found[2]
