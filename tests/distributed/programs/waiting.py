"""Hooks that wait for the test, and record the samples of each step."""

import json
import os
import time
from pathlib import Path

from hookline.engine.parallel import processes
from hookline.hooks import HookBase

processes._NO_ANSWER = 5.0  # not 20 seconds


class Wait(HookBase):
    """Writes the process of each rank, and slows training down until the file "go" exists."""

    def before_step(self):
        rank, world_size = self.trainer.comm.get_rank(), self.trainer.comm.get_world_size()
        if self.trainer.iter >= 40 and not Path("go").exists():
            Path(f"waits.{rank}of{world_size}").write_text(str(os.getpid()))
            time.sleep(0.05)


class Record(HookBase):
    """Appends a line to "samples.jsonl" for each step: which samples this rank had, and the learning rate."""

    def before_train(self):
        trainer = self.trainer
        self._start = trainer.comm.broadcast_object(time.time()), trainer.start_iter
        data = trainer.data_loader.dataset
        self._numbers = {data[i][0].numpy().tobytes(): i for i in range(len(data))}
        assert len(self._numbers) == len(data)

    def after_fetch(self, batch):
        trainer = self.trainer
        line = {
            "start": self._start,
            "iteration": trainer.iter,
            "ranks": trainer.comm.get_world_size(),
            "samples": [self._numbers[x.numpy().tobytes()] for x in batch[0]],
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        with open("samples.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
