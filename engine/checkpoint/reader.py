"""The part of a ``Checkpointer`` that finds and reads files, with the methods of fvcore's class."""

import logging
import os
from contextlib import suppress
from typing import Any

from fvcore.common.checkpoint import Checkpointer, _IncompatibleKeys

from ...config import ConfigError
from .folder import is_local, read_tag
from .matching import LoadReport, load_weights, split_query
from .weights import find_checkpoint, read_checkpoint

__all__ = ["CheckpointReader"]


class CheckpointReader(Checkpointer):
    """Finds checkpoints, reads them, and loads weights into the model. Arguments: those of fvcore's Checkpointer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logging.getLogger(__name__)
        self.loaded_from = ""
        """The path that :meth:`load` loaded last."""
        self.missing_keys: list[str] = []
        """The model's weights that were not in it, or had another shape."""
        self.load_report = LoadReport(0, 0)
        """How its weights matched the model."""
        self._weights_loaded = "model"

    # ------------------------------------------------------------------ files

    def fetch(self, path: str) -> str:
        """Return the local path of a checkpoint. A URI's file is downloaded once.

        Raises:
            ConfigError: there is no such file.
        """
        path, _ = split_query(path)
        if os.path.exists(path) or is_local(path):
            return find_checkpoint(path)
        try:
            return self.path_manager.get_local_path(path)
        except Exception as error:
            raise ConfigError(f"cannot read the checkpoint {path!r}: {error}") from error

    def get_checkpoint_file(self) -> str:
        """Return the path that ``last_checkpoint`` points to; empty if there is none or it is not a file name."""
        with suppress(OSError):
            if name := read_tag(self.save_dir, self.path_manager):
                return os.path.join(self.save_dir, name)
        return ""

    def get_all_checkpoint_files(self) -> list[str]:
        """Return the paths of all checkpoints in ``save_dir``. Sharded ones are folders."""
        names = [name for name in self.path_manager.ls(self.save_dir) if name.endswith(".pth")]
        return [os.path.join(self.save_dir, name) for name in names]

    # ------------------------------------------------------------------ methods that subclasses for fvcore override

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """Read a local file or folder into a dict with "model"."""
        return read_checkpoint(f, mmap=mmap)

    def _load_weights(self, f: str) -> dict[str, Any]:
        """Like :meth:`_load_file`, but may leave other content of a large file on disk."""
        own_reader = type(self)._load_file is CheckpointReader._load_file  # others may have fvcore's arguments
        return self._load_file(f, mmap=True) if own_reader else self._load_file(f)

    def _load_model(self, checkpoint: Any) -> _IncompatibleKeys:
        """Remove "model" from a checkpoint and load it."""
        by_suffix = checkpoint.get("matching_heuristics") or split_query(self.loaded_from)[1]
        weights = checkpoint.pop("model")
        report = load_weights(self.model, weights, path=self.loaded_from or "the file", by_suffix=bool(by_suffix))
        self.load_report = report
        self.missing_keys = [*report.missing, *(name for name, _, _ in report.mismatched)]
        return _IncompatibleKeys(report.missing, report.unexpected, report.mismatched)

    def _log_incompatible_keys(self, incompatible: _IncompatibleKeys) -> None:
        self.load_report.log(self.logger, self.loaded_from, self._weights_loaded)
