"""``Fingerprints``: digests of a run's state, by which two runs are compared."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...config import CfgNode, Duration
from ...config.files.write_error import WriteError
from ..base import HOOK_REGISTRY, HookBase
from ..common.digest import digest, read_digests
from ..common.models import unwrap_model
from ..common.rng import capture_rng
from ..every import Every
from .json_writer import JSONWriter

__all__ = ["FINGERPRINTS_FILE", "Fingerprints", "state_digests"]

logger = logging.getLogger(__name__)

FINGERPRINTS_FILE = "fingerprints.json"


@HOOK_REGISTRY.register()
class Fingerprints(HookBase):
    """Writes 64-bit digests of the run's state to ``fingerprints.json``, which ``hookline diverge`` compares.

    A line has the iteration and the digests of ``batch``, ``parameters``, ``buffers``, ``optimizer`` and ``generators``
    (the states of Python's, NumPy's, torch's and the GPUs' random number generators), as they are in ``after_step``. On
    several ranks a digest is that of each rank if all ranks have the same, else it covers those of all ranks.

    Digests are computed on the tensors' device, and read when metrics are written or a checkpoint is saved: no step
    waits for them. Puts no metrics. Saves the position in its file; a resume removes the rows that it writes again.

    Args:
        output_dir: folder of the file. None: no file.
        period: a duration. The last step has a line too.
        cfg: the config; with its FAST_DEV_RUN no file is written.
    """

    single = True

    def __init__(
        self, output_dir: str | None, period: "Duration | int | str" = 100, cfg: CfgNode | None = None
    ) -> None:
        self._every = Every(period, at_end=True)
        writes = output_dir is not None and not (cfg and cfg.FAST_DEV_RUN)
        self._file = _File(os.path.join(output_dir or "", FINGERPRINTS_FILE)) if writes else None
        self._batch: Any = None
        self._pending: list[tuple[int, dict[str, torch.Tensor]]] = []  # on their devices
        self._unwritten: list[tuple[int, dict[str, str]]] = []
        self._error: WriteError | None = None

    def before_train(self) -> None:
        self._every.start()
        self._batch, self._pending, self._unwritten, self._error = None, [], [], None
        if self._file is not None and self.trainer.comm.is_main_process():
            try:
                self._file.resume(self.trainer.start_iter)
            except OSError as error:
                raise WriteError.of(self._file.path, error) from error

    def after_fetch(self, batch: Any) -> None:
        self._batch = batch

    def after_step(self) -> None:
        if self._file is not None and self._every(self.trainer):
            self._pending.append((self.trainer.iter, {"batch": digest(self._batch), **state_digests(self.trainer)}))
        self._batch = None

    def before_write(self) -> None:
        self._write()

    def before_save(self, path: str) -> None:
        self._write()
        if self._file is not None and self.trainer.comm.is_main_process():
            self._file.sync()

    def after_run(self) -> None:
        self._batch = None
        if self._file is not None and self.trainer.comm.is_main_process():
            self._write()
            self._file.close()
            if self._error is not None:
                raise self._error

    def _write(self) -> None:
        """Read the digests, combine those of all ranks, and append them to the file. All ranks call it."""
        rows, self._pending = self._pending, []
        if self._file is None or not (rows or self._unwritten):
            return
        trainer = self.trainer
        values = read_digests([one for _, digests in rows for one in digests.values()])
        if trainer.ranks_in_sync:
            values = [_combined(ranks) for ranks in zip(*trainer.comm.all_gather(values), strict=True)]
        elif trainer.failed and trainer.comm.get_world_size() > 1:
            return  # the other ranks may be gone; a resumed run writes these rows
        if not trainer.comm.is_main_process():
            return
        each = iter(values)
        self._unwritten += [(iteration, {name: next(each) for name in digests}) for iteration, digests in rows]
        try:
            self._file.write_lines(self._unwritten)
            self._unwritten, self._error = [], None
        except OSError as error:
            self._error = WriteError.of(self._file.path, error)
            logger.warning("Will retry: %s", self._error)

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file.state_dict()} if self._file is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._file is not None and "file" in state_dict:
            self._file.load_state_dict(state_dict["file"])


def state_digests(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the digests of parameters, buffers, optimizer and random number generators, without waiting for them."""
    model = unwrap_model(trainer.model)
    return {
        "parameters": digest(list(model.parameters())),
        "buffers": digest(list(model.buffers())),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "generators": digest(capture_rng()),
    }


def _combined(digests: Sequence[str]) -> str:
    return digests[0] if len(set(digests)) == 1 else read_digests([digest(list(digests))])[0]


class _File(JSONWriter):
    """The file: one JSON object per line."""

    def write_lines(self, rows: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        lines = "".join(json.dumps({"iteration": iteration, **digests}) + "\n" for iteration, digests in rows)
        self.append(lines.encode(), [(iteration, {}) for iteration, _ in rows])
        self._last_write = rows[-1][0]
