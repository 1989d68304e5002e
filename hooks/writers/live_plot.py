"""A plot of the metrics in a notebook, drawn again during training."""

import importlib.util
import io
import logging
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase
from ..common.session import in_notebook
from ..storage.event_storage import EventStorage
from .notebook import Place

__all__ = ["LivePlot", "draw_metrics"]

logger = logging.getLogger(__name__)

_WIDTH, _HEIGHT = 5.0, 3.2  # inches of a panel
_POINTS = 200  # of a curve
_SHARE = 10  # a drawing waits until the run has taken this many times as long as the last one


@HOOK_REGISTRY.register()
class LivePlot(HookBase):
    """Draws losses and metrics below the cell of a notebook, when metrics are written and at the end.

    One panel has the losses, of training and of test sets; one has the other results of evaluations. Losses of every
    step are shown as means of neighbours. Drawing takes about 0.1 s, and at most a tenth of the run's time. Outside of
    a notebook it does nothing.

    Args:
        metrics: names or patterns, such as ``["loss", "*/accuracy"]``, with a panel each. Default: as above.
        seconds: least time between two drawings.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, metrics: Sequence[str] | None = None, seconds: float = 2.0) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("LivePlot needs the package matplotlib: pip install matplotlib (hookline's extra 'plot')")
        if isinstance(metrics, str):
            raise ConfigError(f"LivePlot: metrics is a list of names or patterns, not {metrics!r}")
        self._metrics = metrics
        self._seconds = seconds
        self._place: Place | None = None
        self._next = 0.0

    def before_train(self) -> None:
        self._place = Place() if self.trainer.comm.is_main_process() and in_notebook() else None
        self._next = time.monotonic() + self._seconds
        if self._place is None:
            logger.debug("LivePlot draws only in a notebook")

    def after_write(self, metrics: Any) -> None:
        if self._place is not None and time.monotonic() >= self._next:
            self._draw(self._place)

    def after_run(self) -> None:
        if self._place is not None:
            self._draw(self._place)

    def _draw(self, place: Place) -> None:
        begin = time.monotonic()
        figure = draw_metrics(self.trainer.storage, self._metrics)
        if figure is not None:
            from IPython.display import Image

            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=100)
            place.show(Image(file.getvalue()))
        end = time.monotonic()
        self._next = end + max(self._seconds, _SHARE * (end - begin))


def draw_metrics(storage: EventStorage, metrics: Sequence[str] | None = None) -> Any:
    """Return a figure of matplotlib with the kept values of a storage's metrics; None if there are none.

    Args:
        storage: the storage, of a run that trains or has ended.
        metrics: see :class:`LivePlot`.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure

    panels = _panels(storage, metrics)
    if not panels:
        return None
    figure = Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            iterations, values = storage.history(name).arrays()
            size = -(-len(values) // _POINTS)  # as many neighbours make a point
            if size > 1:
                count = len(values) // size
                iterations = iterations[-count * size :].reshape(count, size)[:, -1]
                values = values[-count * size :].reshape(count, size).mean(axis=1)
            axes.plot(iterations, values, label=name, marker="." if len(values) < 50 else None)
        axes.set_title(title)
        axes.set_xlabel("iteration")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    return figure


def _panels(storage: EventStorage, patterns: Sequence[str] | None) -> dict[str, list[str]]:
    names = [name for name, history in storage.histories().items() if len(history)]
    if patterns is not None:
        panels = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    else:
        hints = storage.smoothing_hints()
        losses = [name for name in names if "loss" in name and (hints[name] or "/" in name)]
        if len([name for name in losses if hints[name]]) == 2:  # the total of a single loss is the same number
            losses = [name for name in losses if name != "total_loss"]
        results = [name for name in names if "/" in name and name not in losses and not name.startswith("lr/")]
        panels = {"loss": losses, "metrics": results}
    return {title: names for title, names in panels.items() if names}
