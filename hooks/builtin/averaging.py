"""Averages of the weights: the base class of their hooks, and the exponential moving average."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...config import ConfigError, Duration
from ...config.components import errors_at
from ..base import HOOK_REGISTRY, Every, HookBase
from ..common import local_part, plain_name, unwrap_model

logger = logging.getLogger(__name__)

Update = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
"""A function such as torch's ``get_ema_multi_avg_fn`` returns: averages, weights, number of updates so far."""


class WeightAverage:
    """Averages the floating-point parameters of a model, and selected buffers, and can be swapped with them.

    Updates are functions of :mod:`torch.optim.swa_utils`. Its ``AveragedModel`` is not used: it copies the model,
    which FSDP2 refuses, and waits for the GPU at each update. Averages of half-precision weights are float32, so that
    small updates are not lost.

    Args:
        model: the model; it may be wrapped for data-parallel training or compiled.
        device: the device of the averages; None: that of each weight.
        averages_buffer: called with a module and a buffer's name; returns whether to average the buffer. Buffers that
            are not saved and integer buffers are never averaged.
        begin_with: initial values by plain name; None: the model's.

    Raises:
        ConfigError: ``begin_with`` does not fit the model, or there is a ``device`` and the model is sharded (FSDP2).
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        averages_buffer: Callable[[nn.Module, str], bool] = lambda module, name: False,
        begin_with: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        # FSDP2's modules. Importing their class takes a second, so they are recognized by their methods.
        self._sharded: list[Any] = [m for m in self.model.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]
        if self._sharded and device is not None:
            raise ConfigError(f"the average of sharded weights is on their device; remove device={str(device)!r}")
        # Weights are looked up in their modules at each use, since some code replaces buffers.
        self._holders: list[tuple[dict[str, Any], str]] = []
        self._averages: list[torch.Tensor] = []
        self._names: dict[str, torch.Tensor] = {}  # averages by plain name; tied weights have several names
        self._backup: list[torch.Tensor] | None = None
        self._reshard()
        seen: dict[int, torch.Tensor] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set
            buffers = [key for key in module._buffers if key not in hidden and averages_buffer(module, key)]
            holders = [(module._parameters, key) for key in module._parameters]
            for owner, key in holders + [(module._buffers, key) for key in buffers]:
                weight: Any = owner[key]
                if weight is None or not (weight.is_floating_point() or weight.is_complex()):
                    continue
                name = plain_name(f"{prefix}.{key}" if prefix else key)
                if id(weight) not in seen:
                    seen[id(weight)] = _average_of(name, weight, device, begin_with)
                    self._holders.append((owner, key))
                    self._averages.append(seen[id(weight)])
                self._names[name] = seen[id(weight)]
        pairs = zip(self._averages, self._weights(), strict=True)
        self._converted = any((a.dtype, a.device) != (weight.dtype, weight.device) for a, weight in pairs)

    def _weights(self) -> list[torch.Tensor]:
        return [owner[key] for owner, key in self._holders]

    def _reshard(self) -> None:
        """Reshard FSDP2 modules: after a forward pass they may hold gathered weights."""
        for module in self._sharded:
            module.reshard()

    @torch.no_grad()
    def update(self, function: Update, updates: int) -> None:
        """Update the averages by a function of :mod:`torch.optim.swa_utils`; ``updates`` were made before."""
        self._reshard()
        weights = self._weights()
        if self._converted:
            weights = [weight.to(average) for weight, average in zip(weights, self._averages, strict=True)]
        if weights:
            # Shards and whole buffers do not mix in one call; averages are laid out as their weights.
            function([local_part(one) for one in self._averages], [local_part(one) for one in weights], updates)

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copy the model's buffers into their averages."""
        for average, weight in zip(self._averages, self._weights(), strict=True):
            if not isinstance(weight, nn.Parameter):
                average.copy_(weight)

    @property
    def is_in_use(self) -> bool:
        """Whether the model's tensors hold the averages."""
        return self._backup is not None

    @torch.no_grad()
    def put(self) -> None:
        """Copy the averages into the model's tensors, and keep a backup of its weights on the averages' device.

        The model's tensors stay the same objects, so optimizers, compiled code, CUDA graphs and views remain valid.
        """
        self._reshard()
        weights = self._weights()
        if self._backup is None:
            pairs = zip(weights, self._averages, strict=True)
            self._backup = [weight.detach().to(average.device, copy=True) for weight, average in pairs]
        _copy(weights, self._averages)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the weights that :meth:`put` backed up, even if it was interrupted."""
        if self._backup is not None:
            self._reshard()
            _copy(self._weights(), self._backup)
            self._backup = None

    def keep(self) -> None:
        """Leave the averages in the model, for good."""
        self._backup = None

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with plain names and the averages. Tensors are not copied."""
        weights = {plain_name(name): value for name, value in self.model.state_dict().items()}
        return {name: self._names.get(name, value) for name, value in weights.items()}


def _average_of(
    name: str, weight: torch.Tensor, device: torch.device | str | None, values: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    value = weight if values is None else values.get(name)
    if value is None and not weight.requires_grad:  # CHECKPOINT.TRAINABLE_ONLY leaves it out
        value = weight
    if value is None or value.shape != weight.shape:
        found = f"has no {name}" if value is None else f"has {name} of shape {tuple(value.shape)}"
        raise ConfigError(
            f"the saved average {found}, and the model's shape is {tuple(weight.shape)}: it is of another model"
        )
    dtype = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
    average = torch.empty_like(weight, dtype=dtype, device=device or weight.device, requires_grad=False)
    with torch.no_grad():
        return average.copy_(value)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):  # _foreach_copy_ does not support sharded tensors
        target.copy_(source)


class WeightAveraging(HookBase):
    """Base class of hooks that average weights: when the average is updated, evaluated and saved.

    The average is updated after a step, before any other hook of the step evaluates or saves, wherever the hook
    stands in the list. Iterations whose update was skipped (``SOLVER.NONFINITE_LOSS: skip``, a float16 overflow)
    count: on a GPU the host learns of them later.

    From ``before_eval`` to ``on_eval_end``, and from ``before_predict`` to ``on_predict_end``, the model's tensors hold
    the average. Afterwards its own weights are restored, also after an error or interruption. So the ``model`` in a
    checkpoint always has the weights that training continues with. The hook's state has the average as
    ``averaged_model``: a full state dict of the model with plain names. Of several such hooks,
    evaluations use the first one with ``evaluate``; the others are only updated and saved.

    Args:
        start: when averaging begins: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        every: how often the average is updated: a duration.
        device: the device of the average; None: that of the weights.
        evaluate: whether evaluations use the average.
    """

    def __init__(
        self,
        start: "Duration | int | float | str",
        every: "Duration | int | str",
        device: str | None = None,
        evaluate: bool = True,
    ) -> None:
        self._fraction = Duration.fraction(start)
        self._start_length = Duration(0) if self._fraction else Duration.parse_length(start)
        if not Duration.parse(every):
            raise ConfigError(f"{type(self).__name__}: every must be a duration such as 1 or '1ep', not {every!r}")
        self._device = None if device is None else torch.device(device)
        self._every = Every(every)
        self.evaluate = self._was_evaluated = evaluate
        self.average: WeightAverage | None = None
        """The average; None before averaging begins."""
        self.updates = 0
        """The number of updates."""
        self._seen: int | None = None  # the last iteration handled; None outside training
        self._replaced = False

    # ------------------------------------------------------------------ for subclasses

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        """Return whether a buffer is averaged; otherwise the model's current value is used."""
        return False

    def step(self) -> None:
        """Update the average. Called every ``every`` iterations from ``start`` on."""
        raise NotImplementedError

    def put(self) -> None:
        """Give the model the average, which exists."""
        assert self.average is not None
        self.average.put()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the average, which exists, for a ``with`` block."""
        self.put()
        try:
            yield
        finally:
            self.on_eval_end()

    # ------------------------------------------------------------------ training

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations use this average: the first of several hooks with ``evaluate``."""
        return self is next((hook for hook in self.trainer.find_hooks(WeightAveraging) if hook.evaluate), None)

    def before_train(self) -> None:
        self._every.start()
        self._replaced = False
        self._was_evaluated = self.is_evaluated
        if self.evaluate and not self._was_evaluated:
            logger.warning("Evaluations use the first average with evaluate; %s is only kept", type(self).__name__)
        self._seen = self.trainer.start_iter - 1

    def _first_iteration(self) -> int:
        """Return the iteration where averaging begins, for the current length of the run."""
        trainer = self.trainer
        if self._fraction:
            return round(self._fraction * trainer.max_iter)
        with errors_at(f"{type(self).__name__}: start"):
            return self._start_length.iterations(trainer.iters_per_epoch)

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if self._seen != iteration:
            self._seen = iteration
            # An average that exists is updated, even if the run is now longer and a fraction of it ends later.
            if self._every(self.trainer) and (self.average is not None or iteration >= self._first_iteration()):
                self.step()

    def _catch_up(self) -> None:
        """Update for the current step if another hook needs the average before this hook's ``after_step``."""
        if self._seen is not None and self.trainer.finished_iter == self.trainer.iter:
            self.after_step()

    def after_train(self) -> None:
        self._seen = None
        if self.average is None and self.trainer.completed:
            name, period, first = type(self).__name__, self._every.period, self._first_iteration()
            logger.warning("%s: there is no average: it is due every %s from iteration %d on", name, period, first)

    def _begin(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        with errors_at(type(self).__name__):
            self.average = WeightAverage(self.trainer.model, self._device, self.averages_buffer, values)

    # ------------------------------------------------------------------ evaluation

    def before_eval(self) -> None:
        self._catch_up()
        if self.average is not None and self.is_evaluated and not self._replaced:
            self.put()

    def on_eval_end(self) -> None:
        if self.average is not None:
            self.average.restore()

    def after_eval(self, results: Mapping[str, object]) -> None:
        self.on_eval_end()  # for evaluations that do not emit on_eval_end

    def on_exception(self, error: BaseException) -> None:
        self.on_eval_end()

    def after_load_best(self) -> None:
        """The model has the best weights, perhaps averaged ones: evaluate those, and not the last average."""
        self._replaced = True

    before_predict = before_eval

    def before_step(self) -> None:
        self._check_not_in_use("training")

    def _check_not_in_use(self, what: str) -> None:
        if self.average is not None and self.average.is_in_use:
            raise RuntimeError(
                f"{type(self).__name__}: an evaluation or prediction has not ended, and the model has the averaged "
                f"weights: read all outputs of trainer.predict(), or close() it, before {what}"
            )

    on_predict_end = on_eval_end

    # ------------------------------------------------------------------ checkpoints

    def before_save(self, path: str) -> None:
        self._catch_up()
        self._check_not_in_use("saving")

    def state_dict(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        state = {"averaged_model": self.average.state_dict(), "updates": self.updates}
        # If it is not evaluated, the results are those of the model's weights.
        return state if self._was_evaluated else {**state, "evaluate": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reset_state()
        if state_dict:
            self._begin(state_dict["averaged_model"])
            self.updates = int(state_dict["updates"])

    def reset_state(self) -> None:
        self.average, self.updates, self._replaced = None, 0, False


@HOOK_REGISTRY.register()
class EMA(WeightAveraging):
    """Keeps an exponential moving average of the weights (Polyak averaging), and evaluates it.

    It starts as a copy of the weights before iteration ``start``. Update n (from 0) is
    ``average = d * average + (1 - d) * weights`` with ``d = decay``, or ``d = min(decay, (1 + n) / (10 + n))`` with
    ``warmup``, so that the first weights soon lose their influence. Saves ``averaged_model`` and ``updates``. A
    resumed run uses the ``decay`` of its config.

    Acts in ``after_step``, or before that in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`.

    Args:
        decay: from 0 to below 1. 0.999 averages over about the last thousand updates.
        warmup: whether to start with a smaller decay, as above.
        every: how often to update: a duration. ``decay`` applies to one update.
        start: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        buffers: "copy" uses the model's buffers, "average" averages them like weights. Integer buffers are always
            copied.
        device: the device of the average; "cpu" saves GPU memory, but each update then waits for the GPU: use
            ``every``. None: that of the weights.
        evaluate: whether evaluations use the average.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); warm-up as in
    TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        warmup: bool = True,
        every: "Duration | int | str" = 1,
        start: "Duration | int | float | str" = 0,
        buffers: Literal["copy", "average"] = "copy",
        device: str | None = None,
        evaluate: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, not {decay!r}")
        if buffers not in ("copy", "average"):
            raise ConfigError(f'EMA: buffers must be "copy" or "average", not {buffers!r}')
        super().__init__(start, every, device, evaluate)
        self.decay, self.warmup, self.buffers = decay, warmup, buffers

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return self.buffers == "average"

    def before_train(self) -> None:
        super().before_train()
        start = self.trainer.start_iter
        if self.average is None and start >= self._first_iteration():
            if start:
                logger.info("EMA: no average was loaded: it starts with the model's current weights")
            self._begin()

    def after_step(self) -> None:
        super().after_step()
        if self.average is None and self.trainer.iter + 1 >= self._first_iteration():
            self._begin()

    def step(self) -> None:
        if self.average is None:
            return
        n = self.updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        self.average.update(get_ema_multi_avg_fn(decay), n)
        self.updates = n + 1


EMAHook = HOOK_REGISTRY.register(EMA, name="EMAHook")
"""Another common name of :class:`EMA`."""
