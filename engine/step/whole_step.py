"""What running a step as one unit needs, whether it is compiled or captured: stand-ins, and what cannot be done."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError, component
from ...hooks.base import HOOK_REGISTRY, STEP_EVENTS, HookBase
from ...hooks.common.optimizers import optimizers_of
from ...hooks.control.lr_scheduler import LRScheduler
from ...hooks.host import hook_name
from .. import comm
from ..modeling import check_compile, resolve_device
from .fast_path import plain_step

__all__ = [
    "OUTSIDE_EVENTS",
    "OptimizerStandIn",
    "check_asked",
    "check_step_config",
    "check_whole_step",
    "inside_of",
    "note",
    "noted",
]

OUTSIDE_EVENTS = ("before_fetch", "after_fetch", "after_optimizer_step")
"""Events of a step that come before or after all that is one unit."""


class OptimizerStandIn:
    """An optimizer as a step run as one unit sees it: the same parameters and state, other settings.

    The learning rate of each group is a tensor, filled before each step, so that a new rate is no reason to compile
    or capture again. The optimizer keeps its plain floats: schedules, hooks and checkpoints see nothing of it.

    Args:
        optimizer: one of torch's.
        settings: what else is other in the groups, where they have such an entry.
        lr_dtype: of the learning rates' tensors.
        lr_device: theirs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: dict[str, Any],
        lr_dtype: torch.dtype = torch.float64,
        lr_device: torch.device | str = "cpu",
    ) -> None:
        self._step = _standing_in_for(optimizer)
        self._settings = settings
        self._rates: list[torch.Tensor] = []
        self._filled: list[Any] = []
        self._make_rate = lambda: torch.zeros((), dtype=lr_dtype, device=lr_device)

    def ready(self, optimizer: Optimizer) -> Any:
        """Take over what the optimizer holds now; to be called before each step.

        Returns:
            What has its ``param_groups`` and ``state``, ``step()`` and ``zero_grad()``, and is no torch optimizer.
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


def _standing_in_for(optimizer: Optimizer) -> Any:
    """An object with the optimizer's own methods, without what torch's base class puts around them.

    Compilers know that class, and treat its objects in a way of their own.
    """
    methods: dict[str, Any] = {}
    for cls in reversed(type(optimizer).__mro__):
        if cls is not Optimizer and issubclass(cls, Optimizer):
            methods.update({name: _traceable(value) for name, value in vars(cls).items() if name[:2] != "__"})
    # They look whether a graph is being captured, in ways that cannot be traced.
    checks = (name for name in vars(Optimizer) if name.endswith("_capture_health_check"))
    methods |= dict.fromkeys(checks, _nothing)
    methods |= {"step": plain_step(optimizer), "zero_grad": _zero_grad}
    stand_in = type(type(optimizer).__name__, (), methods)()
    stand_in.defaults = optimizer.defaults
    return stand_in


def _traceable(member: Any) -> Any:
    """Compilers hide some methods of torch's optimizers from themselves: the method that was there before."""
    return getattr(member, "_torchdynamo_orig_callable", member)


def _nothing(self: Any) -> None:
    pass


def _zero_grad(self: Any) -> None:
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class _Inside:
    """A trainer within a step that is one unit: hooks are not called, and metrics are kept to be put afterwards.

    Everything else is the trainer's, so that there is one definition of what a step is.
    """

    _outside: Any
    optimizer: Any
    storage: Any
    _listeners: dict[str, tuple[Any, ...]]

    def __init__(self, trainer: Any, optimizer: Any) -> None:
        own = {"_outside": trainer, "optimizer": optimizer, "storage": _Puts(), "_listeners": _NOBODY}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(
            f"{type(self._outside).__name__} assigns self.{name} within the step, which is one unit "
            "(SOLVER.COMPILE_STEP, SOLVER.CUDA_GRAPH): it would be lost. Assign it between steps, such as in "
            "after_step, put numbers by self.storage.put_scalar, or set that key to False"
        )

    def after_backward(self) -> None:
        pass

    def _fast_optimizer(self) -> Any:
        return self.optimizer


class _Puts:
    """Takes metrics in place of the storage."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Any, bool]] = []

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None) -> None:
        if cur_iter is not None:
            _refuse(
                f"the metric {name} is put with a cur_iter within the step, which is one unit (SOLVER.COMPILE_STEP, "
                "SOLVER.CUDA_GRAPH): leave cur_iter out, or set that key to False"
            )
        self.values.append((name, value, smoothing_hint))

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def __getattr__(self, name: str) -> Any:
        _refuse(
            f"self.storage.{name} is used within the step, which is one unit (SOLVER.COMPILE_STEP, SOLVER.CUDA_GRAPH): "
            "there are put_scalar and put_scalars only. Use it between steps, such as in after_step, or set that key "
            "to False"
        )


noted: list[str] = []
"""What was last told by :func:`note`."""


def note(message: str) -> None:
    """Keep a message in :data:`noted`: what is raised while a compiler looks, it tells in words of its own."""
    noted[:] = [message]


def _refuse(message: str) -> NoReturn:
    note(message)
    raise ConfigError(message)


_NOBODY: dict[str, tuple[Any, ...]] = dict.fromkeys(STEP_EVENTS, ())


def inside_of(trainer: Any, *mixins: type) -> type:
    """The class of what a step within a unit is run on: ``inside_of(trainer)(trainer, optimizer)``.

    Args:
        trainer: whose methods it has.
        *mixins: what is otherwise there.
    """
    return type("Inside", (*mixins, _Inside, type(trainer)), {})


def check_step_config(cfg: CfgNode) -> None:
    """Check what a config says of steps that are one unit, as far as can be told before anything is built.

    Raises:
        ConfigError: SOLVER.COMPILE_STEP or SOLVER.CUDA_GRAPH does not go with something else.
    """
    solver = cfg.SOLVER
    args = solver.COMPILE_STEP_ARGS
    check_compile("SOLVER.COMPILE_STEP_ARGS", args, ask_for_backends=solver.COMPILE_STEP)
    for name in ("fullgraph", "disable"):
        if name in args:
            raise ConfigError(f"SOLVER.COMPILE_STEP_ARGS.{name}: the step is always one graph; leave it out")
    if args.get("mode") in ("reduce-overhead", "max-autotune"):  # they capture graphs whose outputs the next step fills
        raise ConfigError(
            f"SOLVER.COMPILE_STEP_ARGS.mode: {args.mode} captures CUDA graphs by itself, which is not supported: use "
            "max-autotune-no-cudagraphs, or SOLVER.CUDA_GRAPH"
        )
    wanted = [name for name in ("COMPILE_STEP", "CUDA_GRAPH") if solver[name]]
    if len(wanted) == 2:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    if not wanted:
        return
    key = f"SOLVER.{wanted[0]}"
    device = resolve_device(cfg.MODEL.DEVICE)
    if solver.CUDA_GRAPH and device.type != "cuda":
        raise ConfigError(
            f"{key}: needs a CUDA device, and MODEL.DEVICE {cfg.MODEL.DEVICE!r} is {device}; set it False"
        )
    if comm.get_world_size() > 1:
        raise ConfigError(f"{key}: works in one process only, and there are {comm.get_world_size()}; set it False")
    if solver.AMP.ENABLED and solver.AMP.DTYPE == "float16":
        raise ConfigError(f"{key}: does not work with SOLVER.AMP.DTYPE float16; use bfloat16, or set {key} to False")
    for index, entry in enumerate(cfg.HOOKS):
        name, _ = component(entry)
        cls = HOOK_REGISTRY.get(name, f"HOOKS[{index}]")
        for event in STEP_EVENTS:
            if event not in OUTSIDE_EVENTS and getattr(cls, event, None) is not getattr(HookBase, event):
                raise ConfigError(
                    f"HOOKS[{index}]: {name} listens to {event}, which comes in the middle of a step; with {key} the "
                    f"step is one unit. Leave the hook out, or set {key} to False"
                )


def check_whole_step(trainer: Any, key: str) -> None:
    """Find what a step cannot do as one unit.

    Args:
        trainer: with its hooks.
        key: the config key that asks for it.

    Raises:
        ConfigError: says what is in the way, and what to do.
    """
    for reason in _reasons(trainer):
        raise ConfigError(f"{key}: the step is one unit, and {reason}; or set {key} to False")


def check_asked(trainer: Any, key: str, asked: bool) -> None:
    """Find a trainer that makes its steps otherwise.

    Args:
        trainer: that has made its first step.
        key: the config key that asks for steps as one unit.
        asked: whether the step was made, or was asked for, as one.

    Raises:
        ConfigError: it was not.
    """
    if not asked:
        raise ConfigError(
            f"{key}: {type(trainer).__name__}.run_step does not call SimpleTrainer.run_step, so its steps are not one "
            f"unit; override the methods that run_step calls, or set {key} to False"
        )


def _reasons(trainer: Any) -> Iterator[str]:
    for event in STEP_EVENTS:
        if event not in OUTSIDE_EVENTS and trainer._listeners[event]:
            hook = hook_name(trainer._listeners[event][0][2])
            yield f"the hook {hook} listens to {event}, which comes in the middle of it: leave the hook out"
    for hook in trainer._hooks:
        # torch's CyclicLR and OneCycleLR, whose default it is
        if isinstance(hook, LRScheduler) and getattr(hook.scheduler, "cycle_momentum", False):
            name = type(hook.scheduler).__name__
            yield f"{name} changes the momentum in each, which takes a new one: set its cycle_momentum to False"
    if trainer.grad_scaler is not None:
        yield "float16's gradient scaler decides in the middle of it: set SOLVER.AMP.DTYPE to bfloat16"
    optimizer = trainer.optimizer
    name = type(optimizer).__name__
    if len(optimizers_of(optimizer)) > 1:
        yield "several optimizers cannot be part of it: use one, with a parameter group for each part of the model"
    elif not isinstance(optimizer, Optimizer) or plain_step(optimizer) is None:
        yield f"{name}.step() is not of the form that torch's optimizers have: use another optimizer"
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"the {name} has step hooks of its own, which it would not call: remove them"
    elif "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        yield f"the step() of this {name} was replaced: leave it as its class has it"
    if comm.get_world_size() > 1:
        yield f"gradients of {comm.get_world_size()} processes are exchanged in the middle of it: use one process"
    sparse = [path for path, module in trainer.model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        yield f"the gradients of {sparse[0]} are sparse: make it with sparse=False"
