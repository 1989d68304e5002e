"""A hook that does something to one rank, at one iteration."""

import os
import signal
import time
from pathlib import Path

from hookline.hooks import HookBase


class Mishap(HookBase):
    def __init__(self, what: str, at: int = 30, rank: int = 1):
        self.what, self.at, self.rank = what, at, rank

    def before_step(self):
        if self.trainer.iter != self.at:
            return
        Path(f"{self.what}.{self.trainer.comm.get_rank()}").write_text(str(os.getpid()))
        if self.trainer.comm.get_rank() != self.rank:
            return
        if self.what == "raise":
            raise ValueError("the reason")
        if self.what == "kill once" and not Path("killed").exists():
            Path("killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "exit":
            os._exit(3)
        if self.what == "stop":
            self.trainer.request_stop("one rank asked", 75)
        if self.what == "raise while saving":
            while not Path("saving").exists():
                time.sleep(0.01)
            raise ValueError("the reason")

    def before_save(self, path):
        if self.what == "raise while saving" and self.trainer.iter >= self.at - 1:
            # The write never finishes: only an incomplete temporary file exists.
            os.fsync = os.fdatasync = lambda file: (Path("saving").write_text(path), time.sleep(100))

    def after_fetch(self, batch):
        if self.what == "nan" and self.trainer.iter == self.at and self.trainer.comm.get_rank() == self.rank:
            batch[0][0] = float("nan")
