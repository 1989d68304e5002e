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
from ..control.interruption import in_notebook
from ..storage.event_storage import EventStorage

__all__ = ["LivePlot", "draw_metrics"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class LivePlot(HookBase):
    """Draws losses and metrics below the cell of a notebook, when metrics are written and at the end.

    One panel has the losses, of training and of test sets; one has the other results of evaluations. Drawing takes
    about 0.1 s. Outside of a notebook it does nothing.

    Args:
        metrics: names or patterns, such as ``["loss", "*/accuracy"]``, with a panel each. Default: as above.
        seconds: least time between two drawings.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    _active = False

    def __init__(self, metrics: Sequence[str] | None = None, seconds: float = 2.0) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("LivePlot needs the package matplotlib: pip install matplotlib (hookline's extra 'plot')")
        if isinstance(metrics, str):
            raise ConfigError(f"LivePlot: metrics is a list of names or patterns, not {metrics!r}")
        self._metrics = metrics
        self._seconds = seconds

    def before_train(self) -> None:
        self._active = self.trainer.comm.is_main_process() and in_notebook()
        self._place: Any = None  # IPython's handle of what the cell shows
        self._next = time.monotonic() + self._seconds
        if not self._active:
            logger.debug("LivePlot draws only in a notebook")

    def after_write(self, metrics: Any) -> None:
        if self._active and time.monotonic() >= self._next:
            self._draw()

    def after_run(self) -> None:
        if self._active:
            self._draw()

    def _draw(self) -> None:
        figure = draw_metrics(self.trainer.storage, self._metrics)
        if figure is None:
            return
        from IPython.display import Image, display

        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        if self._place is None:
            self._place = display(Image(file.getvalue()), display_id=True)
        else:
            self._place.update(Image(file.getvalue()))
        self._next = time.monotonic() + self._seconds


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
    figure = Figure(figsize=(5.0 * len(panels), 3.2), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            iterations, values = storage.history(name).arrays()
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
