"""Base of steps that run as one unit, compiled or captured."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import ConfigError
from ...hooks.base import STEP_EVENTS
from ...hooks.common.optimizers import optimizers_of
from ...hooks.control.lr_scheduler import LRScheduler
from ...hooks.host import hook_name
from .. import comm
from ..solver.clipping import clip_hooks
from .fast_path import plain_step
from .step_view import view_class

__all__ = ["OUTSIDE_EVENTS", "OptimizerStandIn", "Outputs", "WholeStep"]

OUTSIDE_EVENTS = ("before_fetch", "after_fetch", "after_optimizer_step")
"""Events before or after the part of a step that is one unit."""

Outputs = tuple[dict[str, torch.Tensor], torch.Tensor, list[tuple[str, Any, bool]]]
"""What a step returns: the losses, a flag that is true if one of them or a gradient is NaN or infinite, and the metrics
put in the step as (name, value, smoothing_hint)."""


class WholeStep(ABC):
    """Runs forward, backward and update of a trainer's steps as one unit, with hooks around it.

    A subclass defines how the unit runs (:meth:`_run`), and how its update is made without effect where a loss or a
    gradient is NaN or infinite (:meth:`_copy_buffers`, :meth:`_guarded_update`).

    Attributes:
        key: the config key that asks for such steps.
        view_bases: classes whose methods replace the trainer's within the unit.
        refusal: the error message of code that cannot run within the unit. A compiler replaces the exceptions of code
            that it traces by its own, so the message is kept here.
    """

    key: str
    view_bases: tuple[type, ...] = ()

    def __init__(self) -> None:
        self.refusal = ""
        self._called = False
        self._optimizer: Any = None
        self._model: nn.Module | None = None
        self._stand_in: OptimizerStandIn
        self._view: type

    # ------------------------------------------------------------------ checks

    def check(self, trainer: Any) -> None:
        """Check that the trainer's steps can run as one unit.

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
                f"{self.key}: {type(trainer).__name__}.run_step does not call SimpleTrainer.run_step, so its steps are "
                f"not one unit; override the methods that run_step calls, or set {self.key} to False"
            )

    def _problems(self, trainer: Any) -> Iterator[str]:
        """Yield what prevents the trainer's steps from running as one unit."""
        for event in STEP_EVENTS:
            if event not in OUTSIDE_EVENTS and trainer._listeners[event]:
                hook = hook_name(trainer._listeners[event][0][2])
                yield f"the hook {hook} listens to {event}, which comes in the middle of the step: remove the hook"
        for hook in trainer._hooks:
            if hook.uses_outputs:
                yield f"the hook {hook_name(hook)} uses the model's outputs, which the step does not return: remove it"
            # the default of torch's CyclicLR and OneCycleLR
            if isinstance(hook, LRScheduler) and getattr(hook.scheduler, "cycle_momentum", False):
                name = type(hook.scheduler).__name__
                yield f"{name} changes the momentum, so each step needs a new graph: set its cycle_momentum to False"
        if trainer.grad_scaler is not None:
            yield "float16's gradient scaler decides in the middle of the step: set SOLVER.AMP.DTYPE to bfloat16"
        yield from _optimizer_problems(trainer.optimizer)
        if comm.get_world_size() > 1:
            yield f"{comm.get_world_size()} processes exchange gradients in the middle of the step: use one process"
        sparse = [path for path, module in trainer.model.named_modules() if getattr(module, "sparse", False) is True]
        if sparse:
            yield f"the gradients of {sparse[0]} are sparse: create it with sparse=False"

    # ------------------------------------------------------------------ a step

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        """Run a step, except for reading its batch.

        Args:
            trainer: the trainer.
            batch: the batch, on the device.
            data_time: seconds spent on reading it.

        Returns:
            Whether the step has run; False if the trainer must run it part by part.

        Raises:
            ConfigError: the step cannot run as one unit.
        """
        self._called = True
        outputs = self._run(trainer, batch)
        if outputs is None:
            return False
        trainer.optimizer._opt_called = True  # torch's schedulers check it
        self._put(trainer, outputs, data_time)
        return True

    def _put(self, trainer: Any, outputs: Outputs, data_time: float) -> None:
        """Put the metrics of a step that has run, and check its losses."""
        losses, found, puts = outputs
        for name, value, smoothing_hint in puts:
            trainer.storage.put_scalar(name, value, smoothing_hint=smoothing_hint)
        policy = trainer.nonfinite
        policy.found = found
        trainer._write_metrics(losses, data_time)
        if policy.skip_update:  # the unit has not made the update
            policy.skip_update = False
        elif trainer._listeners["after_optimizer_step"]:
            trainer._dispatch("after_optimizer_step")

    @abstractmethod
    def _run(self, trainer: Any, batch: Any) -> Outputs | None:
        """Run forward, backward and update; None if the trainer must do it part by part."""

    def _prepare(self, trainer: Any) -> bool:
        """Prepare for the trainer's model and optimizer; return whether they are new."""
        optimizer = trainer.optimizer
        if self._optimizer is optimizer and self._model is trainer.model:
            return False
        self.check(trainer)
        self._optimizer, self._model = optimizer, trainer.model
        device = optimizer.param_groups[0]["params"][0].device
        for state in optimizer.state.values():  # reading a step count from the host's memory would wait for the device
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.to(device)
        self._stand_in = self._make_stand_in(optimizer, device)
        self._view = view_class(type(trainer), self.view_bases)
        return True

    @abstractmethod
    def _make_stand_in(self, optimizer: Optimizer, device: torch.device) -> "OptimizerStandIn": ...

    def _body(self, trainer: Any, optimizer: Any, batch: Any, earlier: torch.Tensor | None = None) -> Outputs:
        """Forward, backward and update: the trainer's own methods, on a view of it and the optimizer's stand-in.

        Args:
            trainer: the trainer.
            optimizer: the stand-in.
            batch: the batch.
            earlier: the flag of the step before in the same unit. If it is true, this step has no effect either.
        """
        view = self._view(trainer, optimizer, self.refuse)
        optimizer.zero_grad()
        keeps_buffers = trainer.nonfinite.policy == "raise" and earlier is None
        buffers = None if keeps_buffers else self._copy_buffers(trainer.model)
        with torch.enable_grad():
            losses = view.accumulate(batch) if trainer.accumulation_steps > 1 else view.forward_backward(batch)
        losses = {name: loss.detach() for name, loss in losses.items()}
        found = self._guarded_update(view, losses, buffers, earlier)
        if not trainer.zero_grad_before_forward:
            optimizer.zero_grad()
        return losses, found, view.storage.values

    @abstractmethod
    def _copy_buffers(self, model: nn.Module) -> Any:
        """Copy the model's buffers, which a skipped step must not change."""

    @abstractmethod
    def _guarded_update(
        self, view: Any, losses: dict[str, torch.Tensor], buffers: Any, earlier: torch.Tensor | None
    ) -> torch.Tensor:
        """Update the weights, without effect if a loss or a gradient is NaN or infinite, or ``earlier`` is true.

        Returns:
            Whether one is.
        """

    def refuse(self, what: str, instead: str) -> NoReturn:
        """Raise the error of code that cannot run within the unit."""
        message = f"{what} within the step, which is one unit ({self.key}): {instead}, or set {self.key} to False"
        self.note(message)
        raise ConfigError(message)

    def note(self, message: str) -> None:
        """Set :attr:`refusal`."""
        self.refusal = message


def _optimizer_problems(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if len(optimizers_of(optimizer)) > 1:
        yield "several optimizers cannot be part of it: use one, with a parameter group for each part of the model"
    elif not isinstance(optimizer, Optimizer) or plain_step(optimizer) is None:
        yield f"{name}.step() does not have the form of torch's optimizers: use another optimizer"
    elif len(optimizer._optimizer_step_pre_hooks) > len(clip_hooks(optimizer)) or optimizer._optimizer_step_post_hooks:
        yield f"the {name} has step hooks of its own, which would not be called: remove them"
    elif "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        yield f"the step() of this {name} was replaced: use the one of its class"


class OptimizerStandIn:
    """Creates what replaces an optimizer within the unit: the same parameters and state, other settings.

    The learning rate of each group is a tensor, which is filled before each step, so a new rate needs no new graph. The
    optimizer itself keeps its plain floats.

    Args:
        optimizer: one of torch's.
        settings: values that replace those of the groups that have such a setting.
        lr_dtype: dtype of the learning rates' tensors.
        lr_device: their device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: dict[str, Any],
        lr_dtype: torch.dtype = torch.float64,
        lr_device: torch.device | str = "cpu",
    ) -> None:
        self._step = _without_base_class(optimizer)
        self._settings = settings
        self._rates: list[torch.Tensor] = []
        self._filled: list[Any] = []
        self._make_rate = lambda: torch.zeros((), dtype=lr_dtype, device=lr_device)

    def update(self, optimizer: Optimizer) -> Any:
        """Take over the optimizer's groups and state, before each step.

        Returns:
            An object with its ``param_groups``, ``state``, ``step()`` and ``zero_grad()`` that is no torch optimizer.
        """
        step, groups = self._step, []
        for index, group in enumerate(optimizer.param_groups):
            if index == len(self._rates):
                self._rates.append(self._make_rate())
                self._filled.append(None)
            lr = group["lr"]
            if not isinstance(lr, torch.Tensor):
                if lr != self._filled[index]:
                    self._rates[index].fill_(lr)
                    self._filled[index] = lr
                lr = self._rates[index]
            settings = {name: value for name, value in self._settings.items() if name in group}
            groups.append({**group, **settings, "lr": lr})
        step.param_groups, step.state = groups, optimizer.state
        return step


def _without_base_class(optimizer: Optimizer) -> Any:
    """Return an object with the optimizer's own methods that is not an instance of torch's ``Optimizer``.

    Compilers treat instances of that class specially.
    """
    methods: dict[str, Any] = {}
    for cls in reversed(type(optimizer).__mro__):
        if cls is not Optimizer and issubclass(cls, Optimizer):
            methods.update({name: _traceable(value) for name, value in vars(cls).items() if name[:2] != "__"})
    # These checks test whether a graph is being captured, in ways that cannot be traced.
    checks = (name for name in vars(Optimizer) if name.endswith("_capture_health_check"))
    methods |= dict.fromkeys(checks, _nothing)
    methods |= {"step": plain_step(optimizer), "zero_grad": _zero_grad, "pause_clipping": _nothing}
    stand_in = type(type(optimizer).__name__, (), methods)()
    stand_in.defaults = optimizer.defaults
    return stand_in


def _traceable(member: Any) -> Any:
    """Return the original of a method that torch has excluded from tracing."""
    return getattr(member, "_torchdynamo_orig_callable", member)


def _nothing(self: Any, *args: Any) -> None:
    pass


def _zero_grad(self: Any) -> None:
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
