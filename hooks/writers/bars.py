"""What a terminal or a notebook shows of a run under way: a progress bar, and a plot of the metrics."""

import io
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from html import escape
from importlib.util import find_spec
from typing import Any

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase, for_subclasses
from ..builtin.interruption import in_notebook
from ..evaluation import flatten_names
from .base import PERFORMANCE, format_number, metrics_to_show

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
_CELLS = 6  # of the bar, at least
_INTERVAL = 0.25  # seconds between two drawings of the bar, at least
_PLOT_INTERVAL = 2.0  # and of the plot, which takes 0.1 s
_DELAY = 1.0  # seconds until an evaluation shows its bar
_LINE_INTERVAL = 10.0  # seconds between two log lines of a long evaluation

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class ProgressBar(HookBase):
    """Shows a tqdm bar below the log: epoch, iterations, time left, rate, and metrics.

    The metrics are those that were last written, as many as fit: those put with ``bar=True``; the loss, smoothed; the
    learning rate; all others; the best value of CHECKPOINT.BEST.METRIC; the share of the time that steps waited for
    data.

    Only rank 0 shows a bar, and only in a notebook or if ``sys.stdout`` is a terminal that can move the cursor. Files,
    pipes and ``TERM=dumb`` get nothing, and their steps take no time for it. Log lines appear above the bar.
    A notebook also has a table of the evaluations, in place of their log lines.
    A process shows one bar at a time. Puts nothing into the storage, saves nothing.
    """

    _shown: "ProgressBar | None" = None  # of this process
    _bar: Any = None
    _table: Any = None  # IPython's handle of the table in a notebook

    def on_registered(self) -> None:
        if self.trainer.comm.is_main_process() and (in_notebook() or _is_terminal()):
            # Set on the instance, so that steps and rows take no time elsewhere.
            self.after_step = self._advance  # type: ignore[method-assign]
            if type(self).after_write is ProgressBar.after_write:
                self.after_write = self._show  # type: ignore[method-assign]

    def before_train(self) -> None:
        if "after_step" not in self.__dict__ or ProgressBar._shown is not None:
            return
        from tqdm.auto import tqdm

        ProgressBar._shown, self._metrics = self, dict[str, float]()
        self._first, self._others = list[str](), list[str]()
        self._table, self._rows = None, list[dict[str, object]]()
        self._bar = tqdm(
            total=max(self.trainer.max_iter, 1),
            initial=self.trainer.iter,
            file=sys.stdout,
            bar_format=_BAR,
            dynamic_ncols=True,
            mininterval=_INTERVAL,
            miniters=1,
            delay=1e-9,  # seconds; not drawn at once
        )
        _allow_unknown_rows(self._bar)
        self._bar.format_meter = self._fit  # tqdm's cuts what does not fit
        self._bar.refresh()

    def _advance(self) -> None:
        if self._bar is not None:
            self._bar.update(self.trainer.iter + 1 - self._bar.n)

    def before_epoch(self, text: str = "") -> None:
        """Show the epoch, or ``text``, before the bar."""
        if self._bar is None:
            return
        trainer = self.trainer
        if not text and trainer.iters_per_epoch:
            epochs = -(-trainer.max_iter // trainer.iters_per_epoch)
            text = f"epoch {min(trainer.epoch + 1, epochs)}/{epochs}: "
        self._bar.set_description_str(text)

    on_eval_end = before_epoch

    def before_eval(self) -> None:
        self.before_epoch("evaluating: ")

    def after_eval(self, results: Mapping[str, object]) -> None:
        if self._bar is None or not in_notebook():
            return
        from IPython.display import HTML, display

        numbers = {name: f"{float(value):.5g}" for name, value in flatten_names(results).items()}
        self._rows.append({"iteration": self.trainer.finished_iter + 1, **numbers})
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        lines = [[f"<th>{escape(name)}</th>" for name in names]]
        lines += [[f"<td>{row.get(name, '')}</td>" for name in names] for row in self._rows]
        table = HTML("<table><tr>" + "</tr><tr>".join(map("".join, lines)) + "</tr></table>")
        if self._table is None:
            self._table = display(table, display_id=True)
        else:
            self._table.update(table)

    @for_subclasses
    def after_write(self, metrics: Mapping[str, float]) -> None:
        self._show(metrics)

    def _show(self, metrics: Mapping[str, float]) -> None:
        if self._bar is None:
            return
        metrics, storage = {**self._metrics, **metrics}, self.trainer.storage
        self._metrics, shown = metrics, metrics_to_show(metrics, storage)
        total = repr(metrics.get("total_loss", metrics.get("loss")))
        first = [name for name in shown if name in storage.on_bar]
        first += [name for name, value in shown.items() if name not in first and repr(value) == total]
        texts = {name: f"{name} {format_number(value)}" for name, value in shown.items()}
        if "loss" not in shown and "total_loss" in shown:
            texts["total_loss"] = texts["total_loss"].removeprefix("total_")
        self._first = [texts.pop(name) for name in first]
        self._others = [texts.pop("lr")] if "lr" in texts else list[str]()
        self._others += [texts[name] for name in sorted(texts, key=PERFORMANCE.__contains__)]
        for hook in self.trainer.find_hooks("BestCheckpointer"):
            if hook.best:
                self._others.append(f"best {format_number(hook.best_metric)}")
        if metrics.get("time") and "data_time" in metrics:
            self._others.append(f"data {min(metrics['data_time'] / metrics['time'], 1):.0%}")
        self._bar.total = max(self.trainer.max_iter, 1)  # which may have changed

    def _fit(self, bar_format: str, ncols: int | None, **values: Any) -> str:
        """Return the line of the bar, with as many fields as fit into ``ncols`` columns."""
        from tqdm.utils import disp_len

        write = partial(type(self._bar).format_meter, **values)
        left, rate = write(bar_format="{remaining}\n{rate_fmt}").split("\n")
        if step := self._metrics.get("time"):  # tqdm's counts no evaluations, or takes one for slow steps
            seconds = step * max(values["total"] - values["n"], 0) + sum(self.trainer.storage.evaluations_left.values())
            left = self._bar.format_interval(seconds)
        ordered, separator = [f"{left} left", *self._first, rate, *self._others], ", "
        if in_notebook():  # tqdm makes spaces that do not break, so the comma has a break of zero width
            ncols, separator = None, ",\u200b "
        head, space = bar_format, math.inf
        for head in ("{desc}" + bar_format, bar_format, "{n_fmt}/{total_fmt}"):
            if ncols:
                space = ncols - disp_len(write(bar_format=head.replace("{bar}", " " * _CELLS))) - 1
            if space >= 0:
                break
        fields: list[str] = []
        for field in ordered:
            space -= disp_len(field) + 2
            if space < 0:
                break  # nothing less important takes its place
            fields.insert(1 if field == rate else len(fields), field)  # the rate belongs to the time left
        text = separator.join(fields).replace("{", "{{").replace("}", "}}")
        return str(write(bar_format=f"{head} [{text}]" if text else head, ncols=ncols))

    def after_run(self) -> None:
        if self._bar is not None:
            self._bar.update(self.trainer.iter - self._bar.n)
            self._bar.close()
            ProgressBar._shown = self._bar = None


def with_progress(batches: Iterable[Any], total: int | None, name: str, bar: bool = True) -> Iterator[Any]:
    """Yield batches, and show how many are done if that takes longer than a second: a bar in a terminal or a notebook,
    otherwise a log line every ten seconds.

    Args:
        batches: the batches.
        total: their number; None if it is not known.
        name: what is done with them.
        bar: whether to show a bar at all.
    """
    global _of_batches
    if bar and (in_notebook() or _is_terminal()):
        from tqdm.auto import tqdm

        options = {"dynamic_ncols": True, "mininterval": _INTERVAL, "miniters": 1, "delay": _DELAY}
        _of_batches = tqdm(batches, name, total, leave=False, file=sys.stdout, **options)
        _allow_unknown_rows(_of_batches)
        try:
            yield from _of_batches
        finally:
            _of_batches.close()
            _of_batches = None
        return
    began = last = time.monotonic()
    for number, batch in enumerate(batches, start=1):
        yield batch
        if (now := time.monotonic()) - last >= _LINE_INTERVAL:
            last, length, left = now, "", ""
            if total is not None:
                length, left = f"/{total}", f", {(now - began) / number * (total - number):.0f} s left"
            logger.info("%s: %d%s batches%s", name, number, length, left)


_of_batches: Any = None  # the bar of with_progress()


def _allow_unknown_rows(bar: Any) -> None:
    """Show a bar in a terminal of 0 rows, whose number is not known: tqdm sees -1 rows, too few for a bar."""
    if (bar.nrows or 0) < 0:
        size, bar.nrows = bar.dynamic_ncols, None
        bar.dynamic_ncols = lambda file: (size(file)[0], None)


def above_bar() -> AbstractContextManager[None]:
    """Return a context in which lines that are written to ``sys.stdout`` appear above the bar, if there is one."""
    bar: Any = ProgressBar._shown._bar if ProgressBar._shown else _of_batches
    # No lock: a forked process may log while its parent draws.
    return nullcontext() if bar is None else bar.external_write_mode(file=bar.fp, nolock=True)


def is_shown(place: str) -> bool:
    """Return whether a log line is needless, as the bar ("bar") or a notebook's table ("table") shows its content."""
    return ProgressBar._shown is not None and (place == "bar" or (place == "table" and in_notebook()))


def _is_terminal() -> bool:
    """Return whether ``sys.stdout`` is a terminal of known width whose cursor moves."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0 and os.environ.get("TERM") != "dumb"
    except (AttributeError, OSError, ValueError):  # no stream, no file, or closed
        return False


@HOOK_REGISTRY.register()
class LivePlot(HookBase):
    """Draws losses and metrics in two charts below the cell of a notebook, when metrics are written and at the end.

    Metrics are results of evaluations and what is put with ``bar=True``. Long curves are smoothed. Outside of a
    notebook it does nothing.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self) -> None:
        if find_spec("matplotlib") is None:
            raise ConfigError("LivePlot needs the package matplotlib: pip install matplotlib (hookline's extra 'plot')")

    def before_train(self) -> None:
        self._active = self.trainer.comm.is_main_process() and in_notebook()
        self._place: Any = None  # IPython's handle of what the cell shows
        self._next = 0.0

    def after_write(self, metrics: Mapping[str, float]) -> None:
        if self._active and time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + _PLOT_INTERVAL

    def after_run(self) -> None:
        if self._active:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import Image, display
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure

        from ...runs.figure import draw_curve

        storage = self.trainer.storage
        latest = {name: value for name, (value, _) in storage.latest().items()}
        shown = {*metrics_to_show(latest, storage), *storage.evaluated}
        losses = [name for name in latest if "loss" in name and name in shown]
        metrics = [name for name in latest if "loss" not in name and name in storage.evaluated | storage.on_bar]
        charts = [(title, names) for title, names in (("losses", losses), ("metrics", metrics)) if names]
        if not charts:
            return
        figure, file = Figure(figsize=(5 * len(charts), 3.2), layout="constrained"), io.BytesIO()
        for (title, names), axes in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0], strict=True):
            for number, name in enumerate(names):
                draw_curve(axes, *storage.history(name).arrays(), color=f"C{number % 10}", label=name)
            axes.set(title=title, xlabel="iteration")
            axes.legend(fontsize="small")
        figure.savefig(file, format="png", dpi=100)
        if self._place is None:
            self._place = display(Image(file.getvalue()), display_id=True)
        else:
            self._place.update(Image(file.getvalue()))
