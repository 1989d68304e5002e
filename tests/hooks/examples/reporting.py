"""Hooks that report progress elsewhere."""

import csv
import os
from collections.abc import Callable, Mapping

from hookline.hooks import HookBase, on


class Notifier(HookBase):
    """Sends a message when training fails or ends; ``send(text)`` posts it, for example to Slack."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send

    def on_exception(self, error: BaseException) -> None:
        where = "; ".join(getattr(error, "__notes__", []))
        self.send(f"failed on rank {self.trainer.comm.get_rank()}: {type(error).__name__}: {error} {where}".rstrip())

    def after_train(self) -> None:
        if not self.trainer.failed and self.trainer.comm.is_main_process():
            self.send(f"ended at iteration {self.trainer.iter} of {self.trainer.max_iter}")


class CSVDump(HookBase):
    """Writes chosen metrics to a CSV file, one row for each write."""

    def __init__(self, path: str, columns: list[str]) -> None:
        self.path, self.columns = path, ["iteration", *columns]

    def after_write(self, metrics: Mapping[str, float]) -> None:
        if not metrics:  # there may be nothing new at the end of a run
            return
        new = not os.path.exists(self.path)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            if new:
                writer.writeheader()
            writer.writerow({"iteration": self.trainer.storage.iter, **metrics})


class Progress(HookBase):
    """Calls ``show(done)`` with the finished share of the run, at each percent."""

    def __init__(self, show: Callable[[float], None]) -> None:
        self.show, self.shown = show, -1

    def before_train(self) -> None:
        self.shown = -1

    def after_step(self) -> None:
        percent = (self.trainer.iter + 1) * 100 // self.trainer.max_iter
        if percent > self.shown:
            self.shown = percent
            self.show(percent / 100)


@on("after_epoch", trainer="my-experiment")  # for trainers with name = "my-experiment"
def note_the_epoch(trainer) -> None:
    """Puts a line of text after each epoch."""
    trainer.storage.put_text("epochs", f"epoch {trainer.epoch} is over at iteration {trainer.iter}")
