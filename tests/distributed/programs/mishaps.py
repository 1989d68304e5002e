"""A hook that does something to one rank, at one iteration."""

import os
import signal
from pathlib import Path

from hookline.hooks import HookBase


class Mishap(HookBase):
    def __init__(self, what: str, at: int = 30, rank: int = 1):
        self.what, self.at, self.rank = what, at, rank

    def before_step(self):
        rank = self.trainer.comm.get_rank()
        if self.trainer.iter != self.at:
            return
        Path(f"{self.what}.{rank}").write_text(str(os.getpid()))
        if rank != self.rank:
            return
        if self.what == "raise":
            raise ValueError("the reason")
        if self.what == "kill once" and not Path("killed").exists():
            Path("killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop the launcher":
            os.kill(os.getppid(), signal.SIGTERM)
        if self.what == "stop":
            self.trainer.request_stop("one rank asked", 75)
