"""What hooks that average weights have in common."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HookBase
from ..common.models import unwrap_model
from ..common.tensors import local_part
from ..every import Every

__all__ = ["WeightAverage", "WeightAveraging", "load_plain_weights"]

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)

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
        self._places: list[tuple[dict[str, Any], str]] = []
        self._averages: list[torch.Tensor] = []
        self._numbers: dict[str, int] = {}  # by plain name; tied weights have several names
        self._backup: list[torch.Tensor] | None = None
        self._reshard()
        seen: dict[int, int] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set
            places: list[tuple[dict[str, Any], str]] = [(module._parameters, key) for key in module._parameters]
            places += [(module._buffers, k) for k in module._buffers if k not in hidden and averages_buffer(module, k)]
            for owner, key in places:
                weight = owner[key]
                if weight is None or not (weight.is_floating_point() or weight.is_complex()):
                    continue
                name = _plain(f"{prefix}.{key}" if prefix else key)
                if id(weight) not in seen:
                    seen[id(weight)] = len(self._places)
                    self._places.append((owner, key))
                    self._averages.append(_average_of(name, weight, device, begin_with))
                self._numbers[name] = seen[id(weight)]
        pairs = zip(self._averages, self._weights(), strict=True)
        self._converted = any((a.dtype, a.device) != (weight.dtype, weight.device) for a, weight in pairs)

    def _weights(self) -> list[torch.Tensor]:
        return [owner[key] for owner, key in self._places]

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

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with plain names and the averages. Tensors are not copied."""
        return self._with(self._averages)

    def own_state_dict(self) -> dict[str, Any]:
        """Return the same with the weights that :meth:`put` backed up."""
        return self._with(self._backup or self._weights())

    def _with(self, values: list[torch.Tensor]) -> dict[str, Any]:
        weights = {_plain(name): value for name, value in self.model.state_dict().items()}
        return weights | {name: values[number] for name, number in self._numbers.items() if name in weights}


def _average_of(
    name: str, weight: torch.Tensor, device: torch.device | str | None, values: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    value = weight if values is None else values.get(name)
    if value is None:
        raise ConfigError(f"the averaged weights have no {name}: they were saved with another model")
    if value.shape != weight.shape:
        raise ConfigError(
            f"the averaged {name} has shape {tuple(value.shape)}, the model's {tuple(weight.shape)}: it was saved with "
            "another model"
        )
    dtype = torch.float32 if weight.dtype in _HALF else weight.dtype
    average = torch.empty_like(weight, dtype=dtype, device=device or weight.device, requires_grad=False)
    with torch.no_grad():
        return average.copy_(value)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):  # _foreach_copy_ does not support sharded tensors
        target.copy_(source)


@torch.no_grad()
def load_plain_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a state dict with plain names into a model that may be wrapped or partly compiled."""
    model = unwrap_model(model)
    model.load_state_dict({name: weights[_plain(name)] for name in model.state_dict()})


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


class WeightAveraging(HookBase):
    """Base class of hooks that average weights: when the average is updated, evaluated and saved.

    The average is updated after a step, before any other hook of the step evaluates or saves, wherever the hook
    stands in the list. Iterations whose update was skipped (``SOLVER.NONFINITE_LOSS: skip``, a float16 overflow)
    count: on a GPU the host learns of them later.

    From ``before_eval`` to ``on_eval_end``, and from ``before_predict`` to ``on_predict_end``, the model's tensors hold
    the average. Afterwards its own weights are restored, also after an error or interruption. So the ``model`` in a
    checkpoint always has the weights that training continues with. The hook's state has the average as
    ``averaged_model``: a full state dict of the model with plain names.

    Several such hooks each keep and save their own average. Evaluations use that of the first with ``evaluate``.

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
        device: str | None,
        evaluate: bool,
    ) -> None:
        name = type(self).__name__
        self._fraction = Duration.fraction(start)
        self._start_length = Duration(0) if self._fraction else Duration.parse_length(start)
        if not Duration.parse(every):
            raise ConfigError(f"{name}: every must be a duration such as 1 or '1ep', not {every!r}")
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError:
            raise ConfigError(f'{name}: unknown device {device!r}; use None (that of the weights) or "cpu"') from None
        self._every = Every(every)
        self.evaluate = evaluate
        self.average: WeightAverage | None = None
        """The average; None before averaging begins."""
        self.updates = 0
        """The number of updates."""
        self._loaded: Mapping[str, torch.Tensor] | None = None
        # The last iteration handled; None outside training.
        self._seen: int | None = None
        self._first = 0
        self._begun_at: int | None = None
        self._put_back_after_save = self._predicting = False
        self._replaced = False

    # ------------------------------------------------------------------ for subclasses

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        """Return whether a buffer is averaged; otherwise the model's current value is used."""
        return False

    def step(self) -> None:
        """Update the average. Called every ``every`` iterations once averaging has begun."""
        raise NotImplementedError

    # ------------------------------------------------------------------ training

    def on_registered(self) -> None:
        first = next(hook for hook in self.trainer.find_hooks(WeightAveraging) if hook.evaluate or hook is self)
        if self.evaluate and first is not self:
            self.evaluate = False
            logger.warning(
                "Evaluations use the average of the first %s; that of another %s is only kept and saved",
                type(first).__name__,
                type(self).__name__,
            )

    def before_train(self) -> None:
        # Averaging that has begun continues, even if the run is extended and a fraction of it ends later.
        self._first = self._first_iteration() if self._begun_at is None else self._begun_at
        self._every.start()
        self._replaced = False
        self._seen = self.trainer.start_iter - 1
        self._create_loaded()

    def set_max_iter(self, max_iter: int) -> None:
        """The length of the run has changed. A fraction of it ends at another iteration, unless averaging has begun."""
        if self._begun_at is None:
            self._first = self._first_iteration()

    def _first_iteration(self) -> int:
        trainer = self.trainer
        if self._fraction:
            return round(self._fraction * trainer.max_iter)
        try:
            return self._start_length.iterations(trainer.iters_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: start: {error}") from None

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if self._seen != iteration:
            self._seen = iteration
            due = self._every(self.trainer)
            if due and iteration >= self._first:
                self.step()

    def _catch_up(self) -> None:
        """Update for the current step if another hook needs the average before this hook's ``after_step``."""
        if self._seen is not None and self.trainer.finished_iter == self.trainer.iter:
            self.after_step()

    def after_train(self) -> None:
        self._seen = None

    def _begin(self) -> None:
        if self._seen is not None:
            self._begun_at = self._first
        try:
            self.average = WeightAverage(self.trainer.model, self._device, self.averages_buffer, self._loaded)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None
        self._loaded = None

    def _create_loaded(self) -> None:
        """Create the average from a loaded state, if there is one."""
        if self._loaded is not None:
            self._begin()

    # ------------------------------------------------------------------ evaluation

    def before_eval(self) -> None:
        self._catch_up()
        self._create_loaded()
        if self.average is None or not self.evaluate or self._replaced:
            return
        self.average.put()

    def on_eval_end(self) -> None:
        self._put_back_after_save = False
        if self.average is not None:
            self.average.restore()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self.on_eval_end()  # for evaluations that do not emit on_eval_end

    def on_exception(self, error: BaseException) -> None:
        self.on_eval_end()

    def after_load_best(self) -> None:
        """The model has the best weights, perhaps averaged ones: evaluate those, and not the last average."""
        self._replaced = True

    def before_predict(self) -> None:
        self.before_eval()
        self._predicting = True

    def before_step(self) -> None:
        if self._predicting:
            raise RuntimeError(
                f"{type(self).__name__}: a prediction has not ended, and the model has the averaged weights: read all "
                "outputs of trainer.predict(), or close() it, before training"
            )

    def on_predict_end(self) -> None:
        self._predicting = False
        self.on_eval_end()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights within the context, if there are any."""
        self._create_loaded()
        if self.average is None or self.average.is_in_use:
            yield
            return
        try:
            self.average.put()
            yield
        finally:
            self.average.restore()

    # ------------------------------------------------------------------ checkpoints

    def before_save(self, path: str) -> None:
        self._catch_up()
        if self.average is not None and self.average.is_in_use:  # a save during an evaluation
            self.average.restore()
            self._put_back_after_save = True

    def after_save(self, path: str) -> None:
        if self.average is not None and self._put_back_after_save:
            self.average.put()
        self._put_back_after_save = False

    def state_dict(self) -> dict[str, Any]:
        weights = self._loaded if self.average is None else self.average.state_dict()
        if weights is None:
            return {}
        return {
            "averaged_model": dict(weights),
            "updates": self.updates,
            "start": self._begun_at,
            "evaluate": self.evaluate,  # tells which weights the results belong to
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        weights, start = state_dict["averaged_model"], state_dict["start"]
        if not isinstance(weights, Mapping) or not all(
            isinstance(one, torch.Tensor) or name.endswith("_extra_state") for name, one in weights.items()
        ):
            raise ConfigError("the averaged weights in the checkpoint are not a dict of tensors")
        self.average, self._loaded, self._replaced = None, weights, False
        self.updates, self._begun_at = int(state_dict["updates"]), None if start is None else int(start)

    def reset_state(self) -> None:
        self.average, self._loaded = None, None
        self.updates, self._begun_at = 0, None
