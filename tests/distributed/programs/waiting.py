"""Hooks that wait for the test, or kill a rank."""

import os
import signal
import time
from pathlib import Path

from hookline.hooks import HookBase


class Wait(HookBase):
    """Writes the process of each rank, and slows training down until the file "go" exists."""

    def before_step(self):
        rank, world_size = self.trainer.comm.get_rank(), self.trainer.comm.get_world_size()
        if self.trainer.iter >= 40 and not Path("go").exists():
            Path(f"waits.{rank}of{world_size}").write_text(f"{os.getpid()} {os.getppid()}")
            time.sleep(0.05)


class KillOnce(HookBase):
    def before_step(self):
        if self.trainer.comm.get_rank() == 1 and self.trainer.iter == 40 and not Path("killed").exists():
            Path("killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
