"""Evaluation during training, and the metrics that hooks watch."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import ConfigError, Duration, suggest
from ..config.registry import locate
from .base import HOOK_REGISTRY, Every, HookBase, Period
from .common import optimizer_in_eval_mode, preserve_rng
from .history_buffer import combine, median
from .protocol import TrainerProtocol

logger = logging.getLogger(__name__)

_WIDTH, _SHORTEST = 70, 10  # columns of a console's line after its time, and of a name that is cut


@HOOK_REGISTRY.register()
class EvalHook(HookBase):
    """Evaluates every ``eval_period``, on request, and after the last iteration.

    What an evaluation and its events draw from random generators does not change training: they are restored.

    Puts the results into the storage, not smoothed, under names such as ``"digits_test/accuracy"``. Emits
    ``before_eval``, ``on_eval_end`` and ``after_eval(results)``. Does not evaluate at the end of a run that failed or
    was stopped.

    For a second schedule, with other data, register another EvalHook with ``main=False``.

    Args:
        eval_period: a duration. 0: only at the end.
        eval_function: takes no arguments. Returns a dict or nested dicts of numbers, or None. If several ranks train
            with the same hooks, rank 0's results are used on all.
        eval_after_train: whether to evaluate after the last iteration.
        main: whether hooks get ``after_eval``: early stopping, the best checkpoint and schedules follow these results;
            and whether to evaluate on request.
        on_start: evaluate before the first step of a run that is not resumed.
    """

    _period = Period()
    _main = _eval_after_train = True  # for subclasses that skip __init__
    _on_start = False
    _evaluated_at = -1

    def __init__(
        self,
        eval_period: "Duration | int | str",
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
        *,
        main: bool = True,
        on_start: bool = False,
    ) -> None:
        self._main = main
        self._on_start = on_start
        self._every = Every(eval_period)
        self._func = eval_function
        self._eval_after_train = eval_after_train

    def before_train(self) -> None:
        self._every.start()
        self._evaluated_at = -1

    @preserve_rng()
    def _do_eval(self) -> None:
        trainer = self.trainer
        self._evaluated_at = trainer.iter
        start = time.perf_counter()
        trainer.prepare_for("eval")  # before wrong weights become the best
        with optimizer_in_eval_mode(getattr(trainer, "optimizer", None)):
            try:
                trainer.emit("before_eval")
                results = self._func()
            finally:
                trainer.emit("on_eval_end")
        if trainer.ranks_in_sync:  # hooks make decisions from the results
            results = trainer.comm.broadcast_object(results)
        seconds = time.perf_counter() - start
        trainer.storage.evaluations_left[id(self)] = seconds * self._every.left(trainer, self._eval_after_train)
        if results is None:
            results = {}
        if not isinstance(results, Mapping):
            raise TypeError(f"an eval_function must return a dict of numbers, not {results!r}")
        metrics: dict[str, Any] = {}
        for name, value in flatten_names(results).items():
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"an eval_function must return numbers; {name!r} is {value!r}") from None
        trainer.storage.evaluated |= metrics.keys()
        trainer.storage.put_scalars(**metrics, smoothing_hint=False)
        if metrics:
            line = "  ".join(f"{name}: {value:.5g}" for name, value in metrics.items())
            extra = {"shown_in": "table" if self._main else "", "console": _short_lines(results, seconds)}
            logger.info("Evaluation:  %s  (%.2g s)", line, seconds, extra=extra)
        if self._main:
            trainer.emit("after_eval", EvalResults(flatten_names(results)))

    def before_epoch(self) -> None:
        if self._on_start and self.trainer.iter == 0:
            self._do_eval()
            self._evaluated_at = -1

    def after_step(self) -> None:
        if self._every(self.trainer) and not self._is_left_to_the_end():
            self._do_eval()

    def _is_left_to_the_end(self) -> bool:
        """Whether this is the last step, after which after_train evaluates, so that the metrics are put at max_iter."""
        return self._eval_after_train and self.trainer.iter + 1 >= self.trainer.max_iter

    def after_train(self) -> None:
        if self._eval_after_train and self.trainer.completed:
            self._do_eval()

    def on_eval(self) -> None:
        if not self._main or "eval" not in self.trainer.requests:
            return
        if self.trainer.iter != self._evaluated_at and not self._is_left_to_the_end():
            self._do_eval()


def flatten_names(results: Mapping[str, Any], prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Flatten nested results: ``{"digits_test": {"accuracy": 0.99}}`` becomes ``{"digits_test/accuracy": 0.99}``."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat.update(flatten_names(value, f"{prefix}{name}{separator}", separator))
        else:
            flat[prefix + name] = value
    return flat


class EvalResults(dict[str, Any]):
    """The results of an evaluation by full name, such as ``"test/accuracy"``.

    ``results["test"]`` has the results of a test set by metric.
    """

    def __missing__(self, name: str) -> "EvalResults":
        start = f"{name}/"
        found = EvalResults({key.removeprefix(start): value for key, value in self.items() if key.startswith(start)})
        if not found:
            raise KeyError(f"{name}{suggest(name, self)}")
        return found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(key.startswith(f"{name}/") for key in self)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it would call itself)


def _short_lines(results: Mapping[str, Any], seconds: float) -> str:
    """Return the results as lines for a console of 80 columns, one for each test set: long names are cut on the left,
    and "…" is in place of metrics that do not fit."""
    sets = {name: flatten_names(values) for name, values in results.items() if isinstance(values, Mapping)}
    if others := {name: value for name, value in results.items() if name not in sets}:
        sets[""] = others
    lines, took = list[str](), f" ({seconds:.2g} s)"
    for name, metrics in sets.items():
        title = name or "Evaluation"
        values = "".join(f"  {{}}: {float(value):.5g}" for value in metrics.values())
        line = fit_names("{}" + took + ":" + values, title, *metrics)
        if len(line) > _WIDTH:
            line = line[: _WIDTH - 2].rpartition("  ")[0] + "  …"
        lines.append(line)
        took = ""
    return "\n          ".join(lines)


def fit_names(line: str, *names: str) -> str:
    """Return ``line.format(*names)`` in 80 columns of a console: names are cut on the left, to at least ten letters."""
    for length in range(max(_SHORTEST, *map(len, names)), _SHORTEST - 1, -1):
        text = line.format(*(name if len(name) <= length else "…" + name[1 - length :] for name in names))
        if len(text) <= _WIDTH:
            break
    return text


class Monitor:
    """A metric by name, or a function of all metrics.

    Args:
        metric: the metric's full name, such as ``"digits_test/accuracy"`` or ``"total_loss"``; or a function that gets
            the latest value of every metric by name, and returns a number, or None to be ignored this time.
            ``"my_module:function"`` names one.

    Raises:
        ConfigError: the function does not exist.
    """

    def __init__(self, metric: str | Callable[[Mapping[str, float]], float | None]) -> None:
        if isinstance(metric, str) and names_function(metric):
            function = locate(metric)
            if not callable(function):
                raise ConfigError(f"{metric} is not a function")
            self.name, self.function = metric, function
        elif callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
            self.name, self.function = f"{getattr(metric, '__module__', '')}:{name}", metric
        else:
            self.name, self.function = str(metric), None

    def value(self, trainer: TrainerProtocol, smoothed: bool = False) -> tuple[float, int] | None:
        """Return the latest value in the storage, and its iteration; None if there is none. All ranks call it.

        Args:
            trainer: the trainer.
            smoothed: a smoothed metric's value is the median of its last 20 values.
        """
        storage = trainer.storage
        hints, histories = storage.smoothing_hints(), storage.histories()
        names = sorted(histories) if self.function is not None else [self.name]
        if not set(names) <= set(histories):
            return None
        found = {name: _value(trainer, name, 20 if smoothed and hints[name] else 1) for name in names}
        if self.function is not None:
            try:
                value = self.function(found)
            except KeyError as error:
                error.add_note(f"in {self.name}; the metrics so far: {', '.join(found) or 'none'}")
                raise
            return None if value is None else (float(value), storage.iter)
        return found[self.name], histories[self.name].latest_iter()


def names_function(metric: str) -> bool:
    """Whether a metric is ``"my_module:function"``, not the metric of a test set ``"my_module:data/accuracy"``."""
    return ":" in metric and "/" not in metric


def _value(trainer: TrainerProtocol, name: str, window: int) -> float:
    """The median of the last values, each of them combined over ranks."""
    storage = trainer.storage
    points, how = storage.history(name).values()[-window:], storage.over_ranks.get(name)
    if how is None or not getattr(trainer, "ranks_in_sync", False):
        return float(median([value for value, _ in points]))
    ranks = trainer.comm.all_gather({iteration: value for value, iteration in points})
    values = []
    for iteration in sorted(set().union(*ranks))[-window:]:
        there = [one[iteration] for one in ranks if iteration in one]
        values.append(there[0] if iteration <= storage.shared_until else combine(how, there, len(ranks)))
    return float(median(values))
