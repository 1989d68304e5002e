"""Steps whose forward, backward and update are one function, which is compiled or captured."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import ConfigError
from ...hooks.base import STEP_EVENTS
from ...hooks.common.models import optimizers_of
from ...hooks.control.lr_scheduler import LRScheduler
from ...hooks.hook_list import hook_name
from .. import comm
from ..data.batches import split_batch
from ..modeling.adapters import ModelAdapter
from ..parallel.base import Strategy
from ..ranks.loss_weights import LossWeights
from ..solver.clipping import GradClipper, clip_hooks
from .fast_path import plain_step

__all__ = ["INSIDE_EVENTS", "FusedStep", "OptimizerStandIn", "Outputs", "Parts"]

INSIDE_EVENTS = [e for e in STEP_EVENTS if e not in ("before_fetch", "after_fetch", "after_optimizer_step")]
"""Events in the middle of the function, which it cannot have."""

# Methods of a trainer that the function takes the place of.
_REPLACED = ("forward", "forward_backward", "backward", "after_backward", "accumulate", "optimizer_step", "zero_grad")

Outputs = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]
"""What the function returns: the losses, a flag that is true if one of them or a gradient is NaN or infinite, and the
other metrics (``num_items``, ``grad_norm``)."""


class Parts(NamedTuple):
    """What the function reads of a trainer, besides the optimizer and the batch."""

    model: nn.Module
    adapter: ModelAdapter
    precision: torch.dtype | None
    accumulation_steps: int
    strategy: Strategy
    clip_gradients: GradClipper | None
    policy: str
    keep_gradients: bool


class FusedStep(ABC):
    """Runs forward, backward and update of a trainer's steps as one function, with hooks around it.

    Iteration 0 is an ordinary step, which creates the state that optimizers and models create in their first step.

    Attributes:
        key: the config key that asks for such steps.
    """

    key: str

    def __init__(self) -> None:
        self._called = False
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._stand_in: OptimizerStandIn

    def check(self, trainer: Any) -> None:
        """Check that the trainer's steps can run as one function.

        Raises:
            ConfigError: they cannot; the message says why, and what to do.
        """
        for problem in self._problems(trainer):
            raise ConfigError(f"{self.key}: {problem}; or set {self.key} to False")

    def check_called(self, trainer: Any) -> None:
        """Check, after the first step, that the trainer called :meth:`run`.

        Raises:
            ConfigError: it did not.
        """
        if not self._called:
            raise ConfigError(
                f"{self.key}: {type(trainer).__name__}.run_step does not call SimpleTrainer.run_step; remove it, or "
                f"set {self.key} to False"
            )

    def _problems(self, trainer: Any) -> Iterator[str]:
        for event in INSIDE_EVENTS:
            if trainer._listeners[event]:
                hook = hook_name(trainer._listeners[event][0][2])
                yield f"the hook {hook} listens to {event}, which comes in the middle of the step: remove the hook"
        for hook in trainer._hooks:
            if hook.uses_outputs:
                yield f"the hook {hook_name(hook)} uses the model's outputs, which the step does not return: remove it"
            # the default of torch's CyclicLR and OneCycleLR
            if isinstance(hook, LRScheduler) and getattr(hook.scheduler, "cycle_momentum", False):
                name = type(hook.scheduler).__name__
                yield f"{name} changes the momentum, so each step needs a new graph: set its cycle_momentum to False"
        for name in _REPLACED:
            if name in vars(trainer) or sum(name in vars(cls) for cls in type(trainer).__mro__) > 1:
                yield (
                    f"{type(trainer).__name__} overrides {name}(), which would not be called: move what it does into "
                    "the model, the loss or a hook for after_step, and remove it"
                )
        if trainer.grad_scaler is not None:
            yield "float16's gradient scaler decides in the middle of the step: set SOLVER.AMP.DTYPE to bfloat16"
        if len(optimizers_of(trainer.optimizer)) > 1:
            yield "several optimizers cannot be part of it: use one, with a parameter group for each part of the model"
        elif not _is_plain(trainer.optimizer):
            name = type(trainer.optimizer).__name__
            yield f"step() of {name} was replaced, has step hooks, or lacks the form of torch's: use another optimizer"
        if comm.get_world_size() > 1:
            yield f"works in one process only, and there are {comm.get_world_size()}"
        sparse = [path for path, module in trainer.model.named_modules() if getattr(module, "sparse", False) is True]
        if sparse:
            yield f"the gradients of {sparse[0]} are sparse: create it with sparse=False"

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        """Run a step, except for reading its batch.

        Args:
            trainer: the trainer.
            batch: the batch, on the device.
            data_time: seconds spent on reading it.

        Returns:
            Whether the step has run; False if the trainer must run it part by part.

        Raises:
            ConfigError: the step cannot run as one function.
        """
        self._called = True
        if trainer.iter == 0:
            return False
        optimizer, policy = trainer.optimizer, trainer.nonfinite
        if self._optimizer is not optimizer or self._model is not trainer.model:
            self._prepare(trainer)
        parts = Parts(
            trainer.model,
            trainer.adapter,
            trainer.precision,
            trainer.accumulation_steps,
            trainer.strategy,
            trainer.clip_gradients,
            policy.policy,
            trainer.zero_grad_before_forward,
        )
        outputs = self._run(parts, self._stand_in.update(optimizer), batch)
        if outputs is None:
            return False
        optimizer._opt_called = True  # torch's schedulers check it
        losses, policy.found, metrics = outputs
        for name, value in metrics.items():
            trainer.storage.put_scalar(name, value, smoothing_hint=name != "num_items")
        trainer._write_metrics(losses, data_time)
        if policy.skip_update:  # the update had no effect
            policy.skip_update = False
        elif trainer._listeners["after_optimizer_step"]:
            trainer.emit("after_optimizer_step")
        return True

    def _prepare(self, trainer: Any) -> None:
        """Prepare for the trainer's model and optimizer, which are new."""
        self.check(trainer)
        self._model, self._optimizer = trainer.model, trainer.optimizer
        device = self._optimizer.param_groups[0]["params"][0].device
        for state in self._optimizer.state.values():  # reading a step count from the host would wait for the device
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.to(device)
        self._stand_in = self._make_stand_in(self._optimizer, device)

    @abstractmethod
    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> "OptimizerStandIn": ...

    @abstractmethod
    def _run(self, parts: Parts, optimizer: Any, batch: Any) -> Outputs | None:
        """Call :meth:`_body`, compiled or captured; None if the trainer must run the step part by part."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        """Add the gradients of ``loss`` to the parameters'."""

    @abstractmethod
    def _guard(
        self, optimizer: Any, policy: str, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return whether a loss or gradient in ``tensors`` is NaN or infinite, and what to restore if so.

        That is pairs of a tensor that the update changes, and its copy.
        """

    def _body(self, parts: Parts, optimizer: Any, batch: Any) -> Outputs:
        """Forward, backward, clipping and update. The update is undone if a loss or a gradient is not finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _clear_gradients(parameters)
        buffers = () if parts.policy == "raise" else parts.model.buffers()
        kept = [(buffer, buffer.clone()) for buffer in buffers]
        with torch.enable_grad():
            losses, metrics = self._forward_backward(parts, optimizer, parameters, batch)
        gradients = [p.grad for p in parameters if p.grad is not None]
        found, changed = self._guard(optimizer, parts.policy, [*losses.values(), *gradients])
        if parts.clip_gradients is not None:
            norm = parts.strategy.clip(parts.clip_gradients, parameters)
            if norm is not None:
                metrics["grad_norm"] = norm
        with torch.no_grad():
            optimizer.step()
            for tensor, old in kept + changed:
                tensor.copy_(torch.where(found > 0, old, tensor))
        if not parts.keep_gradients:
            _clear_gradients(parameters)
        return losses, found, metrics

    def _forward_backward(
        self, parts: Parts, optimizer: Any, parameters: list[nn.Parameter], batch: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Compute losses and gradients as ``SimpleTrainer.accumulate`` and ``forward_backward`` do."""
        several = parts.accumulation_steps > 1
        pieces = list(split_batch(batch, parts.accumulation_steps)) if several else [(batch, 1.0)]
        weights: Any = LossWeights(None, batch, 1)  # type: ignore[arg-type]  # the iterator matters to several ranks
        total: dict[str, torch.Tensor] = {}
        num_items = None
        for piece, share in pieces:
            device = parameters[0].device.type
            with nullcontext() if parts.precision is None else torch.autocast(device, dtype=parts.precision):
                losses = parts.adapter.losses(parts.model, piece)
            if several:
                losses = weights.apply(losses, share)
            else:
                num_items = losses.pop("num_items", None)
            first, *others = losses.values()
            self._backward(sum(others, start=first), parameters)
            for name, loss in losses.items():
                total[name] = total[name] + loss.detach() if name in total else loss.detach()
        if several:
            total, num_items = weights.finish(total, optimizer.param_groups, several=len(pieces) > 1)
        return total, {} if num_items is None else {"num_items": num_items}


def _clear_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _is_plain(optimizer: Any) -> bool:
    """Whether the optimizer's ``step`` does nothing but what torch's wrappers and hookline's clipping surround."""
    if not isinstance(optimizer, Optimizer) or plain_step(optimizer) is None:
        return False
    if len(optimizer._optimizer_step_pre_hooks) > len(clip_hooks(optimizer)) or optimizer._optimizer_step_post_hooks:
        return False
    return "step" not in vars(optimizer) or getattr(optimizer.step, "_wrapped_by_lr_sched", False)


class OptimizerStandIn:
    """Has the methods, parameters and state of an optimizer, but other settings; the optimizer keeps its own.

    It is no instance of torch's ``Optimizer``, which compilers treat specially. The learning rate of each group is a
    tensor, which is filled before each step, so a new rate needs no new graph.

    Args:
        optimizer: one of torch's.
        settings: values that replace those of its groups.
        rate: a scalar tensor with dtype and device of the learning rates.
    """

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any], rate: torch.Tensor) -> None:
        methods: dict[str, Any] = {}
        for cls in reversed(type(optimizer).__mro__):
            if cls is not Optimizer and issubclass(cls, Optimizer):
                own = {name: value for name, value in vars(cls).items() if name[:2] != "__"}
                # the originals of methods that torch has excluded from tracing
                methods |= {name: getattr(value, "_torchdynamo_orig_callable", value) for name, value in own.items()}
        for name in vars(Optimizer):
            if name.endswith("_capture_health_check"):  # asks in a way that cannot be traced
                methods[name] = _nothing
        methods["step"] = plain_step(optimizer)
        self._stand_in: Any = type(type(optimizer).__name__, (), methods)()
        self._stand_in.defaults = optimizer.defaults
        self._settings, self._rate = settings, rate
        self._rates: list[torch.Tensor] = []
        self._filled: list[Any] = []

    def update(self, optimizer: Optimizer) -> Any:
        """Take over the optimizer's groups and state, before each step, and return the stand-in."""
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            if index == len(self._rates):
                self._rates.append(self._rate.clone())
                self._filled.append(None)
            lr = group["lr"]
            if not isinstance(lr, torch.Tensor):
                if lr != self._filled[index]:
                    self._rates[index].fill_(lr)
                    self._filled[index] = lr
                lr = self._rates[index]
            groups.append({**group, **self._settings, "lr": lr})
        self._stand_in.param_groups, self._stand_in.state = groups, optimizer.state
        return self._stand_in


def _nothing(self: Any, *args: Any) -> None:
    pass
