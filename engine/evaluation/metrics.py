"""Metrics with torchmetrics' protocol: ``update(preds, target)`` per batch, ``compute()`` at the end, ``reset()``.

They keep sums and counts on the device, so that batches do not wait for it. ``compute()`` adds up the ranks: the result
is that of the whole data set, on any number of ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ...config import CfgNode, ConfigError, Registry
from ...config.signatures import parameters_of
from ...hooks.common import in_double, samples_in
from .. import comm
from ..data.loader import move_to_device
from ..modeling.build import build_loss
from ..modeling.outputs import Terms, entries_of, num_terms, terms_of
from ..modeling.zoo import classes_second
from .evaluator import Batch, Outputs


@runtime_checkable
class Metric(Protocol):
    """The protocol of metrics, as in torchmetrics."""

    def update(self, preds: Outputs, target: Outputs) -> None:
        """Add one batch."""

    def compute(self) -> Any:
        """Return the value over all batches of all ranks."""

    def reset(self) -> None:
        """Clear the state."""


METRIC_REGISTRY = Registry(
    "METRIC",
    Metric,
    hint=". A function that computes one takes two arguments, outputs and targets, or a third, inputs",
    function_of=2,
    by_name=("inputs",),
)
"""Metrics for ``TEST.METRICS``. They receive their ``ARGS``, and ``cfg`` if that is their first parameter."""


class MeanMetric:
    """The mean over samples or elements. Subclasses call :meth:`add` in ``update``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the state."""
        self._sum: torch.Tensor | int = 0
        self._count: torch.Tensor | int = 0

    def add(self, total: torch.Tensor, count: torch.Tensor | int) -> None:
        """Add a batch's sum, a scalar tensor, and the number of its terms (an int, or a scalar tensor)."""
        self._sum = self._sum + in_double(total.detach())
        self._count = self._count + count

    def compute(self) -> float:
        """Return the mean over all ranks; NaN without data."""
        shares = comm.all_gather((float(self._sum), float(self._count)))
        total, count = map(sum, zip(*shares, strict=True))
        return total / count if count else float("nan")


@METRIC_REGISTRY.register()
class Accuracy(MeanMetric):
    """Fraction of the targets that are among the ``top_k`` highest scores.

    Args:
        top_k: number of classes that count as the prediction. Above 1, the metric is named "accuracy_top<k>".
        ignore_index: targets with this value do not count, as in torch's ``CrossEntropyLoss``.
    """

    def __init__(self, top_k: int = 1, ignore_index: int = -100) -> None:
        super().__init__()
        self.top_k, self.ignore_index = top_k, ignore_index
        self.name = "accuracy" if top_k == 1 else f"accuracy_top{top_k}"

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add one batch.

        Args:
            preds: class scores (N, C, ...) or (N, ..., C), or class indices (N, ...) of an integer type.
            target: class indices (N, ...).

        Raises:
            ValueError: the shapes do not match.
        """
        preds = classes_second(preds, target)
        labels = preds.shape == target.shape and not preds.is_floating_point() and self.top_k == 1
        scores = preds.dim() == target.dim() + 1 and preds.shape[:1] + preds.shape[2:] == target.shape
        if not (labels or scores):
            raise ValueError(
                "Accuracy needs scores (N, C, ...) or integer classes (N, ...) for targets (N, ...); "
                f"got {tuple(preds.shape)} ({preds.dtype}) for {tuple(target.shape)}"
            )
        if labels:
            hits = preds == target
        elif self.top_k == 1:
            hits = preds.argmax(1) == target
        else:
            hits = preds.topk(self.top_k, dim=1).indices == target.unsqueeze(1)
        self.add(hits.sum(), (target != self.ignore_index).sum())


@METRIC_REGISTRY.register()
class Loss(MeanMetric):
    """The loss ``MODEL.LOSS`` over the whole set, as if computed in one batch, and its terms if it has several.

    A loss that returns a sum is divided by the number of samples. A loss that torch does not compute is taken as the
    mean over samples, unless it returns the number of its items.

    Without ``MODEL.LOSS`` it is the sum of the losses that the model returns. If it returns none in eval mode, beside
    its predictions, it is called a second time with ``model.training`` set; its submodules stay in eval mode.

    Args:
        cfg: the whole config.
    """

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self._loss: Callable[[Outputs, Outputs], Any] | None = build_loss(cfg)
        self.of_model = self._loss is None

    def reset(self) -> None:
        """Clear the state."""
        super().reset()
        self._terms: dict[str, torch.Tensor | int] = {}

    def terms(self) -> dict[str, float]:
        """Return the mean of each of several losses by name, over all ranks. Every rank calls it."""
        shares = comm.all_gather(({name: float(value) for name, value in self._terms.items()}, float(self._count)))
        names, count = dict.fromkeys(chain(*(sums for sums, _ in shares))), sum(count for _, count in shares)
        return {
            name: sum(sums.get(name, 0.0) for sums, _ in shares) / count if count else float("nan") for name in names
        }

    def add_losses(self, losses: Mapping[str, Any], samples: int) -> None:
        """Add the losses of a batch that the model computed.

        Args:
            losses: by name, computed within :class:`Terms`, and perhaps ``num_items``, the number of items that they
                are means of.
            samples: the number of samples in the batch, of which the losses are means otherwise.
        """
        losses, terms = dict(losses), num_terms(losses, self._loss)
        count = losses.pop("num_items", samples if terms is None else terms)
        first, *others = losses.values()
        items = torch.as_tensor(samples if isinstance(count, str) else count, device=first.device)

        def whole(loss: torch.Tensor) -> torch.Tensor:
            if isinstance(count, str):  # the losses are sums
                return in_double(loss)
            return torch.where(items > 0, in_double(loss) * items, 0.0)

        self.add(whole(sum(others, start=first)), items)
        for name, loss in losses.items() if others else ():
            self._terms[name] = self._terms.get(name, 0) + whole(loss.detach())

    def update(self, preds: Outputs, target: Outputs, inputs: Batch = None) -> None:
        """Add one batch.

        Args:
            preds, target: the arguments of the loss.
            inputs: the batch, for its number of samples. Default: ``len(target)``.
        """
        assert self._loss is not None
        samples = samples_in(inputs)
        with Terms():
            losses = terms_of(self._loss(preds, target))
        self.add_losses(losses, len(target) if samples is None else samples)


class FunctionMetric:
    """Keeps all predictions and targets, and calls a function with those of all ranks.

    Each sample counts once, in the order of the data set. The tensors are on the CPU; tensors whose shapes differ
    between batches become a list with one entry per sample. All ranks have all of them in memory.

    A function with an attribute ``generates = True`` gets what ``model.generate()`` returns as predictions, a tensor
    (N, length) of the longest one.

    Args:
        function: called as ``function(predictions, targets)``, and with ``inputs=`` if it has a parameter of that name:
            the ``x`` of batches ``(x, y)``, otherwise the whole batch. It returns a number, or numbers by name.
        args: further arguments by name.
        pad_value: fills up generated predictions.
    """

    def __init__(
        self, function: Callable[..., Any], args: Mapping[str, object] | None = None, pad_value: float = 0
    ) -> None:
        named = getattr(function, "func", function)  # of a partial
        self.name: str = getattr(named, "__name__", type(named).__name__)
        self.generates = getattr(function, "generates", False)
        self._pad_value = pad_value if self.generates else None
        self._function = function
        self._args = dict(args or {})
        taken = parameters_of(function)
        self.takes_inputs = taken is not None and "inputs" in taken.keywords and "inputs" not in self._args
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[tuple[Outputs, ...]] = []

    def update(self, preds: Outputs, target: Outputs, inputs: Batch = None) -> None:
        """Add one batch.

        Args:
            preds: the predictions.
            target: the targets.
            inputs: the batch; it is kept if the function takes ``inputs``.
        """
        if self.takes_inputs and isinstance(inputs, tuple | list) and len(inputs) > 1:
            inputs = inputs[0] if len(inputs) == 2 else tuple(inputs[:-1])
        self._batches.append((_on_cpu(preds), _on_cpu(target), _on_cpu(inputs) if self.takes_inputs else None))

    def compute(self) -> Any:
        """Return the function's result. Every rank calls it."""
        preds, targets, inputs = map(self._joined, range(3))
        return self._function(preds, targets, **self._args, **({"inputs": inputs} if self.takes_inputs else {}))

    def _joined(self, column: int) -> Outputs:
        batches = [batch[column] for batch in self._batches]
        try:
            return collect(batches, pad_value=self._pad_value if column == 0 else None)
        except ConfigError:  # tensors of several shapes, as of sequences: a list with one entry per sample
            return collect([list(batch) for batch in batches])


def compute(metric: Metric) -> Any:
    """Return a metric's result over all ranks.

    A metric of torchmetrics, and those that it contains, gather their states whole. torchmetrics gathers lists entry by
    entry, which fails or hangs if the ranks' lists have different lengths.
    """
    modules = metric.modules() if isinstance(metric, nn.Module) and comm.get_world_size() > 1 else ()
    ours: list[Any] = [one for one in modules if hasattr(one, "_sync_dist") and _gathers_by_default(one)]
    for one in ours:
        one._sync_dist = partial(_sync_states, one)
    try:
        return metric.compute()
    finally:
        for one in ours:
            del one._sync_dist


def _gathers_by_default(metric: Any) -> bool:
    of_torchmetrics = type(metric)._sync_dist.__module__.startswith("torchmetrics.")
    return of_torchmetrics and bool(metric._reductions) and metric.process_group is metric.dist_sync_fn is None


def _sync_states(metric: Any, *_: Any, **__: Any) -> None:
    """Set each state of a metric of torchmetrics to that of all ranks, as its ``_sync_dist`` does."""
    states = {name: move_to_device(getattr(metric, name), "cpu") for name in metric._reductions}
    ranks = comm.all_gather(states)
    for name, reduction in metric._reductions.items():
        values = [states[name] for states in ranks]
        if isinstance(metric._defaults[name], list):
            lists = [[value] if isinstance(value, torch.Tensor) else value for value in values]
            whole: Any = list(chain.from_iterable(lists))
        else:
            whole = torch.stack(values)
        whole = move_to_device(whole, metric.device)
        setattr(metric, name, reduction(whole) if reduction is not None and len(whole) else whole)


def _on_cpu(value: Outputs) -> Outputs:
    value = move_to_device(value, "cpu")
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()  # NumPy has no bfloat16
    return value


@dataclass(frozen=True)
class Predictions:
    """Outputs for a whole data set, in its order.

    Attributes:
        outputs: the model's outputs, with one entry per sample.
        targets: the targets, if they were asked for.
        metrics: the results of the metrics by name, if they were asked for.
    """

    outputs: Outputs
    targets: Outputs = None
    metrics: Mapping[str, object] = field(default_factory=dict)


def collect(batches: Iterable[Outputs], pad_value: float | None = None) -> Outputs:
    """Concatenate batches of tensors, arrays or lists, and dicts and tuples of these, on the CPU.

    Args:
        batches: those of this rank. All ranks call this function.
        pad_value: fills up sequences (N, length, ...) to the longest one; None: sizes must be equal.

    Returns:
        The batches of all ranks, in the order of the ranks; None if there are none. Dataclasses and named tuples become
        dicts.

    Raises:
        ConfigError: the batches cannot be concatenated.
    """
    named = [(batch, entries_of(batch)) for batch in batches]
    parts = [move_to_device(batch if entries is None else dict(entries), "cpu") for batch, entries in named]
    return _join(list(chain.from_iterable(comm.all_gather(parts))), pad_value)


def gather(trainer: Any, value: Outputs) -> Outputs:
    """Collective. Return the values of all ranks, concatenated in the order of ranks, on the trainer's device.

    It is ``trainer.gather(value)``.

    Args:
        trainer: the trainer.
        value: a tensor (a scalar counts as one element), an array, a list, or a dict or tuple of these.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        value = value.reshape(1)
    return trainer.to_device(collect([value]))


def _join(parts: Sequence[Outputs], pad_value: float | None) -> Outputs:
    if not parts or all(part is None for part in parts):
        return None
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts], pad_value) for name in first}
    if isinstance(first, tuple):
        return tuple(_join(values, pad_value) for values in zip(*parts, strict=True))
    if isinstance(first, list):
        return list(chain.from_iterable(parts))
    problem = f"they are of type {type(first).__name__}"
    try:
        if isinstance(first, torch.Tensor):
            if pad_value is None or first.ndim < 2:
                return torch.cat(list(parts))
            return pad_sequence(list(chain.from_iterable(parts)), batch_first=True, padding_value=pad_value)
        if isinstance(first, np.ndarray):
            return np.concatenate(parts)
    except (RuntimeError, ValueError) as error:  # shapes that differ, or single numbers
        problem = str(error)
    raise ConfigError(f"the outputs of the batches cannot be concatenated ({problem}); read them with stream=True")
