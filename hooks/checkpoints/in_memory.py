"""Copies of the state in the memory of two machines."""

from typing import Any

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every

__all__ = ["InMemoryCheckpointer"]


@HOOK_REGISTRY.register()
class InMemoryCheckpointer(HookBase):
    """Keeps the last state in the memory of the machines, so that a lost process or machine costs few steps.

    Every ``period`` each rank writes its part of a checkpoint into ``folder``, and sends it to a rank of the next
    machine, while training continues. If the copy is newer than the checkpoints on the disk, a resume writes it to
    ``model_in_memory.pth`` and resumes from that, exactly. The copies survive all processes of a machine, and the loss
    of any one of several machines. A run that ends without an error removes them.

    A machine needs memory for three copies of its ranks' part of a checkpoint, and five while the next one is written.
    All ranks need this hook.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`.
        period: a duration, in iterations, epochs or time.
        folder: a folder of each machine that is in memory and outlives processes. Environment variables are replaced.

    Raises:
        ConfigError: ``checkpointer`` is fvcore's or saves to a URI, or ``folder`` does not exist.
    """

    single = True
    needs_each_step = False

    def __init__(self, checkpointer: Any, period: "Duration | int | str" = 100, folder: str = "/dev/shm") -> None:
        self._memory: Any = None
        if getattr(checkpointer, "save_dir", ""):  # nothing is saved in a trial run, or when a config is checked
            if not hasattr(checkpointer, "in_memory") or "://" in checkpointer.save_dir:
                raise ConfigError("InMemoryCheckpointer needs hookline's Checkpointer with a local save_dir")
            self._memory = checkpointer.in_memory(folder)
        self._every = Every(period)
        self._due = False

    def before_train(self) -> None:
        self._every.start()
        if self._memory is not None:
            self._memory.begin()

    def after_step(self) -> None:
        if self._memory is not None and self._every(self.trainer):
            self._memory.poll()
            self._due = True
            self.trainer.request_save(everywhere=True, extra=True)

    def on_extra_save(self) -> None:
        trainer = self.trainer
        due, self._due = self._due, False
        if not due:
            return
        if trainer.comm.get_world_size() > 1 and not trainer.ranks_in_sync:
            raise RuntimeError("InMemoryCheckpointer: all ranks must have the same hooks")
        path = self._memory.path(trainer.finished_iter)
        trainer.emit("before_save", path)
        self._memory.save(trainer.finished_iter)
        trainer.emit("after_save", path)

    def after_run(self) -> None:
        if self._memory is not None:
            self._memory.close(remove=not self.trainer.failed)
