"""Several compiled steps in one call: steps wait in a queue until there are enough of them."""

import dataclasses
import logging
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ...config import ConfigError
from ...hooks.host import hook_name
from ...hooks.storage.event_storage import EventStorage
from .compiled_step import KEY, CompiledStep
from .whole_step import Outputs

__all__ = ["EARLY_EVENTS", "QueuedSteps", "check_steps", "needs_each_step", "problem_of_hook"]

logger = logging.getLogger(__name__)

STEPS = f"{KEY}_ARGS.steps"
STOP = 'SOLVER.NONFINITE_LOSS "stop" cannot end a run between steps of one call: use "raise" or "skip"'

EARLY_EVENTS = ("before_step", "before_fetch", "after_fetch", "after_step")
_OWN_PARTS = (
    *("before_epoch", "before_step", "run_step", "fetch", "_write_metrics", "write_metrics"),
    *("after_step", "after_epoch", "after_train"),
)
_SHORT_CALLS = 3  # after so many, a warning
_PARTS = ("model", "optimizer", "accumulation_steps")  # of a trainer: steps that wait together share them


def problem_of_hook(name: str, event: str) -> str:
    """Return why a hook may not listen to an event if steps wait, and what to do."""
    if event == "after_optimizer_step":
        return f"{name} listens to {event}, when the weights may be those of a later step: set {STEPS} to 1"
    return (
        f"{name} listens to {event}, which may come before the step is computed: set {STEPS} to 1; or, if the hook "
        "neither reads nor changes there what a step uses or produces (weights, metrics, the optimizer, attributes of "
        "model or trainer), or calls trainer.finish_steps() first, set its attribute needs_each_step = False"
    )


def needs_each_step(hook: Any, event: str) -> bool:
    """Return whether a hook (or a class of hooks) needs the step to be computed when an event comes.

    A class that overrides the event of a base class must say so itself.
    """
    if not isinstance(hook, type) and not {"needs_each_step", event}.isdisjoint(vars(hook)):
        return bool(hook.needs_each_step)
    classes = (hook if isinstance(hook, type) else type(hook)).__mro__
    owner: Any = next(cls for cls in classes if not {"needs_each_step", event}.isdisjoint(vars(cls)))
    return bool(vars(owner).get("needs_each_step", True))


def check_steps(args: Mapping[str, Any]) -> int | None:
    """Return how many steps one call runs; None if the arguments of SOLVER.COMPILE_STEP do not say.

    Raises:
        ConfigError: it is not a number of steps, or does not work with another argument.
    """
    steps = args.get("steps")
    if "steps" in args and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ConfigError(f"{STEPS}: expected the number of steps that one call runs, such as 10, not {steps!r}")
    if steps not in (None, 1) and args.get("dynamic"):
        raise ConfigError(f"{STEPS}: steps in one call need batches of one shape; remove dynamic, or set steps to 1")
    return steps


class _Waiting(NamedTuple):
    """A step that waits.

    Attributes:
        iteration: its number.
        batch: its batch.
        data_time: seconds spent on reading the batch.
        rates: the learning rate of each parameter group.
    """

    iteration: int
    batch: Any
    data_time: float
    rates: list[float]


class QueuedSteps(CompiledStep):
    """Runs several steps of a trainer in one call of a compiled graph.

    A step reads its batch and waits. When ``steps`` of them wait, one call runs them all. Then their metrics are put,
    and their losses are checked, one step after the other. Whatever needs results calls :meth:`finish` first, which
    runs the waiting steps one by one. Steps that wait together have batches of the same form, and the same settings of
    the optimizer except learning rates.

    Args:
        args: as for :class:`CompiledStep`, with ``steps``.

    Raises:
        ConfigError: as for :class:`CompiledStep`.
    """

    steps: int

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        self.waiting: list[_Waiting] = []
        # Of the waiting steps: the trainer's parts, the form of their batches, the optimizer's groups, the rates of the
        # last one, and the tensors of their batches, with the number of times that each had been written to.
        self._parts: list[Any] = []
        self._form: Any = None
        self._settings: list[dict[str, Any]] = []
        self._rates: list[float] = []
        self._tensors: list[torch.Tensor] = []
        self._written: list[int] = []
        self._traced = False  # whether the last call of :meth:`finish` compiled a graph
        self._short_calls = 0  # how often waiting steps ran one by one
        self._filled: tuple[Any, Any] = (None, None)  # the rates of a call, and a tensor of them
        self._no_storage = _NoStorage(self.refuse)
        self._block = self._compile(_run_steps)
        self._block_ran = False
        self.view_bases = (*self.view_bases, _WithoutIteration)

    # ------------------------------------------------------------------ checks

    def _problems(self, trainer: Any) -> Iterator[str]:
        yield from super()._problems(trainer)
        for event in (*EARLY_EVENTS, "after_optimizer_step"):
            for _, _, hook in trainer._listeners[event]:
                if event == "after_optimizer_step" or needs_each_step(hook, event):
                    yield f"the hook {problem_of_hook(hook_name(hook), event)}"
        for name in _OWN_PARTS:
            owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
            if not owner.__module__.startswith("hookline."):
                yield f"{owner.__name__}.{name}() may look at a step that is not computed yet: set {STEPS} to 1"
        if trainer.nonfinite.policy == "stop":
            yield f"{STOP}, or set {STEPS} to 1"
        if any(isinstance(group["lr"], torch.Tensor) for group in trainer.optimizer.param_groups):
            yield f"learning rates that are tensors cannot wait with their steps: use numbers, or set {STEPS} to 1"

    # ------------------------------------------------------------------ the queue

    def run(self, trainer: Any, batch: Any, data_time: float) -> bool:
        self._called = True
        optimizer, waiting = trainer.optimizer, self.waiting
        if trainer.iter == 0 or not trainer._running:  # in the latter case another trainer calls the steps
            self.finish(trainer)
            return super().run(trainer, batch, data_time)
        tensors: list[torch.Tensor] = []
        form, groups = _form(batch, tensors), optimizer.param_groups
        if form != self._form or (groups != self._settings and not self._differ_in_rates(groups)):
            if waiting:
                same = form == self._form
                self.finish(trainer, "a setting of the optimizer changed" if same else _difference(self._form, form))
            self._form, self._settings = form, [dict(group) for group in groups]
            self._rates = [group["lr"] for group in groups]
        if not waiting:
            self._parts = [getattr(trainer, name) for name in _PARTS]
        waiting.append(_Waiting(trainer.iter, batch, data_time, self._rates))
        self._tensors += tensors
        self._written += [tensor._version for tensor in tensors]
        optimizer._opt_called = True  # torch's schedulers check it
        if len(waiting) == self.steps:
            self.finish(trainer)
        return True

    def _differ_in_rates(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether only the learning rates of the optimizer's groups have changed, and note them."""
        self._rates = [group["lr"] for group in groups]
        for settings, rate in zip(self._settings, self._rates, strict=False):
            settings["lr"] = rate
        return bool(self._settings == groups)

    def finish(self, trainer: Any, why: str = "their results were needed (written, evaluated, saved)") -> None:
        """Run the steps that wait.

        Args:
            trainer: the trainer.
            why: why they do not wait for more, for a warning.

        Raises:
            Exception: of the first step that fails. The trainer's iteration is then that of this step. After a loss or
                gradient that is NaN or infinite, the steps after it have no effect; after another error, they may have
                been computed.
        """
        if not self.waiting:
            return
        waiting = self.waiting[:]
        unchanged = not self._overwritten()
        self._clear()
        self._traced = False
        start = time.perf_counter()
        iteration, trainer.iter = trainer.iter, waiting[0].iteration
        try:
            self._check_parts(trainer)
            if not unchanged:
                raise ConfigError(
                    f"{STEPS}: the data loader writes into batches that it has returned, and steps wait with theirs: "
                    f"have it return new tensors, or set {STEPS} to 1"
                )
            if len(waiting) < self.steps:
                self._warn_of_short_calls(len(waiting), why)
            if len(waiting) < self.steps or not self._run_together(trainer, waiting):
                self._run_singly(trainer, waiting)
        except BaseException:
            trainer.storage.iter, trainer._finished = trainer.iter, trainer.iter - 1
            raise
        trainer.iter = trainer.storage.iter = iteration
        seconds = time.perf_counter() - start
        trainer.emit("after_waiting_steps", waiting[0].iteration, len(waiting), seconds, self._traced)

    def _overwritten(self) -> bool:
        """Return whether a batch that waits was written to after it was read."""
        if self._written != [tensor._version for tensor in self._tensors]:
            return True
        number = len(self._tensors) // len(self.waiting)  # of tensors in each batch
        for index in range(number):
            tensors = self._tensors[index::number]
            if all(type(tensor) is torch.Tensor and tensor.layout is torch.strided for tensor in tensors):
                addresses = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
                if tensors[0].numel() and len(addresses) < len({id(tensor) for tensor in tensors}):
                    return True
        return False

    def _warn_of_short_calls(self, count: int, why: str) -> None:
        """Warn once if no call of a run has been full so far."""
        if self._block_ran:
            return
        self._short_calls += 1
        if self._short_calls == _SHORT_CALLS:
            logger.warning(
                "%s: %d steps would run in one call, but so far they ran one by one, %d times. The last %d did because "
                "%s. Use fewer steps, or see docs/performance.md",
                STEPS,
                self.steps,
                _SHORT_CALLS,
                count,
                why,
            )

    def _check_parts(self, trainer: Any) -> None:
        for name, part in zip(_PARTS, self._parts, strict=True):
            if getattr(trainer, name) is not part:
                raise ConfigError(
                    f"{STEPS}: trainer.{name} was changed while steps wait that were read with the earlier one: call "
                    f"trainer.finish_steps() before changing it, or set {STEPS} to 1"
                )

    def discard(self, trainer: Any) -> None:
        """Forget the steps that wait: the run ends at once."""
        if self.waiting:
            trainer._finished = self.waiting[0].iteration - 1
            self._clear()

    def _clear(self) -> None:
        for kept in (self.waiting, self._tensors, self._written):
            kept.clear()

    def _run_together(self, trainer: Any, waiting: Sequence[_Waiting]) -> bool:
        """Run as many steps as one call runs. Return False if they must run one by one."""
        outputs: Any = self._run(trainer, _Block([step.batch for step in waiting], [step.rates for step in waiting]))
        if outputs is None:
            return False
        storage = trainer.storage
        for step, output in zip(waiting, outputs, strict=True):
            trainer.iter = storage.iter = step.iteration
            self._put(trainer, output, step.data_time)
        return True

    def _run_singly(self, trainer: Any, waiting: Sequence[_Waiting]) -> None:
        """Run steps one by one, each with the optimizer's settings of its time."""
        groups = trainer.optimizer.param_groups
        added = groups[len(self._settings) :]
        del groups[len(self._settings) :]
        present = []
        for group, settings in zip(groups, self._settings, strict=False):
            changed = [name for name, value in settings.items() if value is not group.get(name)]
            present.append({name: group[name] for name in (*changed, "lr") if name in group})
            group.update((name, settings[name]) for name in changed)
        try:
            for step in waiting:
                trainer.iter = trainer.storage.iter = step.iteration
                for group, rate in zip(groups, step.rates, strict=False):
                    group["lr"] = rate
                if not super().run(trainer, step.batch, step.data_time):
                    trainer._run_parts(step.batch, step.data_time)
        finally:
            for group, settings in zip(groups, present, strict=False):
                group.update(settings)
            groups += added

    # ------------------------------------------------------------------ the graph

    def _call(self, trainer: Any, batch: Any) -> Any:
        if not isinstance(batch, _Block):
            return super()._call(trainer, batch)
        optimizer = self._stand_in.update(trainer.optimizer)
        if batch.rates != self._filled[0]:
            self._filled = batch.rates, torch.tensor(batch.rates, dtype=torch.float64)
        args = self, trainer, optimizer, batch.batches, self._filled[1]
        if self._block_ran:
            try:
                with self._no_storage:
                    return self._block(*args)
            except self._exceptions.Unsupported:  # a new graph is needed; nothing has run yet
                pass
        with self._no_storage:
            outputs = self._trace(trainer, batch.batches, self._block, args)
        self._block_ran = True
        return outputs

    def _trace(self, *args: Any) -> Any:
        self._traced = True
        return super()._trace(*args)


class _Block(NamedTuple):
    """The batches of several steps, and their learning rates for each parameter group."""

    batches: list[Any]
    rates: list[list[float]]


def _run_steps(whole: QueuedSteps, trainer: Any, optimizer: Any, batches: list[Any], rates: Any) -> list[Outputs]:
    """Run steps; those after a step that is an error have no effect."""
    outputs: list[Outputs] = []
    groups = optimizer.param_groups
    for index, batch in enumerate(batches):
        optimizer.param_groups = [{**group, "lr": rates[index][number]} for number, group in enumerate(groups)]
        earlier = outputs[-1][1] if index and trainer.nonfinite.policy == "raise" else None
        outputs.append(whole._body(trainer, optimizer, batch, earlier))
    optimizer.param_groups = groups
    return outputs


class _NoStorage:
    """What the model finds as the open storage while steps are computed."""

    __enter__: Any = EventStorage.__enter__
    __exit__: Any = EventStorage.__exit__

    def __init__(self, refuse: Callable[[str, str], NoReturn]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse(f"get_event_storage().{name} is used by the model", f"set {STEPS} to 1")


class _WithoutIteration:
    """A step that does not know its number, since the steps of a call share a graph."""

    _refuse: Callable[..., NoReturn]

    @property
    def iter(self) -> int:
        self._refuse("self.iter is read", f"keep what depends on it outside of the step, or set {STEPS} to 1")


def _difference(form: Any, other: Any) -> str:
    """Return in what two forms of batches differ."""
    if type(form) is type(other) and isinstance(form, (list, tuple, dict)) and len(form) == len(other):
        keys = form if isinstance(form, dict) else range(len(form))
        if type(form) is not torch.Size and (not isinstance(form, dict) or form.keys() == other.keys()):
            return next(_difference(form[key], other[key]) for key in keys if form[key] != other[key])
    return f"a batch has {reprlib.repr(other)} where the one before has {reprlib.repr(form)}"


def _form(batch: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what a graph depends on in a batch: structure, shapes and dtypes, and values that are not tensors.

    Args:
        batch: the batch.
        tensors: gets the tensors of the batch.
    """
    kind = type(batch)
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype
    if isinstance(batch, (tuple, list)):
        form: list[Any] = []
        for part in batch:
            if type(part) is torch.Tensor:  # the usual case, without a call
                tensors.append(part)
                form += part.shape, part.dtype
            else:
                form.append(_form(part, tensors))
        return form
    if isinstance(batch, Mapping):
        return {name: _form(part, tensors) for name, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: _form(getattr(batch, field.name, None), tensors) for field in dataclasses.fields(batch)}
    return batch if kind in (int, float, str, bool) else kind
