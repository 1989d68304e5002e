"""Saving and loading a run's state: fvcore's interface, atomic files, nothing executed on loading."""

import logging
import os
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from fvcore.common.checkpoint import Checkpointer as _FvcoreCheckpointer
from fvcore.common.checkpoint import PeriodicCheckpointer, _IncompatibleKeys
from torch import nn
from torch.nn.parameter import is_lazy

from ..config import ConfigError
from ..config.files import replace_file, replace_text
from . import comm
from .state import to_plain

__all__ = ["Checkpointer", "DetectionCheckpointer", "PeriodicCheckpointer", "unwrap_model"]


class Checkpointer(_FvcoreCheckpointer):
    """Saves and loads a model and whatever else has ``state_dict()`` and ``load_state_dict()``.

    The interface is fvcore's. Files are written under a temporary name and renamed when they are whole; they hold
    tensors and plain data only, and are loaded with ``weights_only=True``, so that loading one runs no code. Names
    of weights are the plain model's, whether or not it is compiled or wrapped for data-parallel training.

    Args:
        model: the model.
        save_dir: folder of the checkpoints; empty: nothing is saved.
        save_to_disk: whether this process writes; by default the main one does.
        **checkpointables: the rest of the state, by name, such as ``optimizer=optimizer``.
    """

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, save_to_disk: bool | None = None, **checkpointables: Any
    ) -> None:
        save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        super().__init__(unwrap_model(model), save_dir, save_to_disk=save_to_disk, **checkpointables)
        self.logger = logging.getLogger(__name__)
        self.loaded_from = ""
        """The file that :meth:`load` loaded last."""
        self.missing_keys: list[str] = []
        """The model's weights that it did not hold, or held in another shape."""

    def save(self, name: str, *, tag_last: bool = True, **kwargs: Any) -> None:
        """Save everything as ``<save_dir>/<name>.pth``.

        Args:
            name: of the file, without folder or extension.
            tag_last: have ``last_checkpoint`` point to it: a resume goes on from there.
            **kwargs: further data to save; :meth:`load` returns it.

        Raises:
            TypeError: some state is neither a tensor nor plain data; the message says where.
            OSError: the disk is full, or the folder cannot be written. What was there is as it was.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        if os.path.basename(name) != name:
            raise ValueError(f"a checkpoint's name must not contain a folder: {name!r}")
        weights = to_plain(self.model.state_dict())
        data: dict[str, Any] = {"model": {_plain_name(key): value for key, value in weights.items()}}
        for key, obj in self.checkpointables.items():
            data[key] = to_plain(obj.state_dict())
        data.update(to_plain(kwargs))
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.debug("Saving checkpoint to %s", path)
        if _is_local(path):
            os.makedirs(self.save_dir, exist_ok=True)
            replace_file(path, lambda file: torch.save(data, file))
        else:
            with self.path_manager.open(path, "wb") as file:
                torch.save(data, file)
        if tag_last:
            self.tag_last_checkpoint(f"{name}.pth")

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Have ``last_checkpoint`` point to a file of ``save_dir``."""
        path = os.path.join(self.save_dir, "last_checkpoint")
        if _is_local(path):
            replace_text(path, last_filename_basename)
        else:
            super().tag_last_checkpoint(last_filename_basename)

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint, or the weights in any file of a plain state dict.

        Args:
            path: a file or URI. Empty: nothing is loaded.
            checkpointables: names of what to load beside the model; None: everything that is in the file.

        Returns:
            What else the file holds, such as ``iteration``.

        Raises:
            ConfigError: there is no such file, or it is damaged or no checkpoint.
        """
        if path:
            local = path if os.path.isfile(path) else self._fetch(path)
            if not os.path.isfile(local):
                raise ConfigError(f"there is no checkpoint {path!r}")
        extra = super().load(path, checkpointables)
        self.loaded_from = path
        return extra

    def _fetch(self, path: str) -> str:
        try:
            return self.path_manager.get_local_path(path)
        except Exception as error:
            raise ConfigError(f"cannot read the checkpoint {path!r}: {error}") from error

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Go on from the last checkpoint of ``save_dir``, or start from the weights in ``path``.

        Args:
            path: weights to start from; only the model is loaded.
            resume: whether to look for a last checkpoint, and load all of it. One that is damaged is passed over,
                with a warning, for the newest that is whole.

        Returns:
            What the file holds beyond the model and the checkpointables.
        """
        if resume and self.has_checkpoint():
            for candidate in self._candidates():
                try:
                    self._verify(candidate)
                except ConfigError as error:
                    self.logger.warning("%s; trying the checkpoint before it", error)
                    continue
                return self.load(candidate)
            raise ConfigError(f"{self.save_dir}: no checkpoint there is whole; start without --resume")
        return self.load(path, checkpointables=[])

    def _candidates(self) -> Iterable[str]:
        """The last checkpoint, then the others of this run from the newest on, the best one's copy left out."""
        last = self.get_checkpoint_file()
        files = [path for path in self.get_all_checkpoint_files() if path != last]
        files = [path for path in files if "_best" not in os.path.basename(path)]
        return [last, *sorted(files, key=os.path.getmtime, reverse=True)]

    def _verify(self, path: str) -> None:
        """Make sure that a file is whole, and holds all that a resume needs.

        Raises:
            ConfigError: it does not.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()  # compares the CRC of each record; torch.load does not
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} is damaged, or is not a checkpoint ({_first_line(error)})") from error
        if bad is not None:
            raise ConfigError(f"{path} is damaged: the checksum of {bad} is wrong")
        missing = self.checkpointables.keys() - self._load_file(path, mmap=True).keys()
        if missing:
            raise ConfigError(f"{path} cannot be resumed from: it has no {', '.join(sorted(missing))}")

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        try:
            checkpoint = torch.load(f, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # of any kind, as the bytes happen to be
            raise ConfigError(f"{f} is damaged, or is not a checkpoint ({_first_line(error)})") from error
        if not isinstance(checkpoint, dict):
            raise ConfigError(f"{f} is not a checkpoint: it holds a {type(checkpoint).__name__}, not a dict")
        if "model" not in checkpoint and checkpoint and all(isinstance(v, torch.Tensor) for v in checkpoint.values()):
            return {"model": checkpoint}
        if "model" not in checkpoint:
            raise ConfigError(f"{f} is not a checkpoint: it has no 'model', only {', '.join(map(str, checkpoint))}")
        return checkpoint

    def _load_model(self, checkpoint: Any) -> _IncompatibleKeys:
        own = self.model.state_dict()
        # Where parts of the model are compiled, its own names are longer than the plain ones that are saved.
        own_names = {_plain_name(name): name for name in own}
        weights = {_plain_name(name): value for name, value in checkpoint.pop("model").items()}
        if weights and all(name.startswith("module.") for name in weights) and not weights.keys() & own_names.keys():
            weights = {name.removeprefix("module."): value for name, value in weights.items()}
        wrong = []
        matched = {}
        for name, value in weights.items():
            there = own.get(own_names.get(name, name))
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(there, torch.Tensor | None) or (there is not None and is_lazy(there)):
                matched[own_names.get(name, name)] = value  # extra state, or a parameter that has no shape yet
            elif there is not None and there.shape != value.shape:
                wrong.append((name, tuple(value.shape), tuple(there.shape)))
            else:
                matched[own_names.get(name, name)] = value
        incompatible = self.model.load_state_dict(matched, strict=False)
        self.missing_keys = list(incompatible.missing_keys)
        mismatched = {name for name, _, _ in wrong}
        missing = [name for name in incompatible.missing_keys if _plain_name(name) not in mismatched]
        return _IncompatibleKeys(missing, incompatible.unexpected_keys, wrong)


DetectionCheckpointer = Checkpointer
"""detectron2's name."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's model inside of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _is_local(path: str) -> bool:
    return "://" not in path


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
