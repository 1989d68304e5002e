"""Names of metrics in TensorBoard and in trackers, which show one group for each first part of a name."""

from collections.abc import Iterable

from ..storage.event_storage import EventStorage, Row

__all__ = ["group_rows"]

_PERFORMANCE = {
    *("time", "data_time", "forward_time", "time_p95", "time_max", "samples_per_s", "items_per_s", "flops_per_s"),
    *("mfu", "total_flops", "eval_time", "eval_samples_per_s", "rss_mem", "max_mem", "reserved_mem", "grad_scale"),
}
_LEFT_OUT = "eta_seconds"
_TOTAL = "total_loss"


def group_rows(rows: Iterable[Row], storage: EventStorage) -> list[Row]:
    """Return rows with the names that TensorBoard and trackers use.

    ============================================  ==================================================
    metric                                        name
    ============================================  ==================================================
    speed and memory: ``time``, ``mfu``, ...      ``perf/time``
    results of an evaluation: ``digits/accuracy`` ``eval/digits/accuracy``
    other names with a slash: ``weights/norm``    unchanged
    all others: ``loss``, ``lr``, ``grad_norm``   ``train/loss``
    ``eta_seconds``                               left out
    ``total_loss`` of a model with one loss       left out, since it is the same number
    ============================================  ==================================================
    """
    only = _only_loss(storage)
    renamed = []
    for iteration, values in rows:
        new = {
            _group(name, storage) + name: value
            for name, value in values.items()
            if name != _LEFT_OUT and not (name == _TOTAL and only in values and _same(value, values[only]))
        }
        if new:
            renamed.append((iteration, new))
    return renamed


def _group(name: str, storage: EventStorage) -> str:
    if name in storage.evaluated:
        return "eval/"
    if "/" in name:
        return ""
    return "perf/" if name in _PERFORMANCE else "train/"


def _only_loss(storage: EventStorage) -> str:
    """Return the name of the only loss beside ``total_loss``; empty if there are none or several."""
    smoothed = storage.smoothing_hints()
    losses = [name for name in smoothed if smoothed[name] and "loss" in name and "/" not in name and name != _TOTAL]
    return losses[0] if len(losses) == 1 else ""


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)
