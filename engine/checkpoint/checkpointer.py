"""Saves a run's state to disk and loads it again.

``<name>.pth`` is a dict of tensors and plain data: ``model``, the plain model's state dict; the ``state_dict()`` of
each object given by name, such as ``trainer`` by ``DefaultTrainer``; and what ``save(name, **data)`` adds. A temporary
file is written, flushed to disk and renamed; then ``last_checkpoint`` points to it, and outdated files are removed. A
process that is killed at any point leaves a checkpoint that can be loaded. Checksums are compared before a file is
loaded, with ``weights_only=True``, so no code in it runs.
"""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from inspect import signature
from operator import methodcaller
from typing import Any

from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from iopath.common.file_io import g_pathmgr
from torch import distributed as dist
from torch import nn

from ...config.atomic import OnError, check_on_error, mend
from ...config.errors import as_config_error
from ...hooks.common import optimizer_in_eval_mode, plain_name, unwrap_model
from .. import comm
from .files import CheckpointError, read_tag, remove_checkpoint, start_write, write_checkpoint, write_file
from .find_checkpoint import checkpoints_in, find_checkpoint, find_named, find_resumable
from .matching import LoadReport, load_weights, split_query
from .state import to_plain
from .weights import choose_weights, read_checkpoint

OnSaved = Callable[[CheckpointError | None], object]
"""Called with None when a file is written, or with the error that prevented it."""


class Checkpointer(FvcoreCheckpointer):
    """Saves and loads a model and other objects with ``state_dict()`` and ``load_state_dict()``, as fvcore's does.

    Args:
        model: the model.
        save_dir: folder of the checkpoints, or a URI that ``path_manager`` knows; empty: nothing is saved. It knows
            http, and what is registered with iopath's ``g_pathmgr`` before. Files behind a URI are not removed, and
            only the last one is resumed from.
        save_to_disk: whether this process writes; by default only the main process does.
        asynchronous: :meth:`save` copies the state in memory, and a thread writes the file while training continues.
            The copy needs as much memory as the state.
        on_error: what to do if a write and its one retry fail: "stop" raises a CheckpointError, "continue" logs it.
        **checkpointables: the other objects by name, such as ``trainer=trainer``.
    """

    needs_all_ranks = False
    """Whether all ranks must call :meth:`save` together."""
    remove = remove_checkpoint

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        save_to_disk: bool | None = None,
        asynchronous: bool = False,
        on_error: OnError = "stop",
        **checkpointables: Any,
    ) -> None:
        check_on_error(on_error)
        save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        super().__init__(unwrap_model(model), save_dir, save_to_disk=save_to_disk, **checkpointables)
        for handler in dict.fromkeys(g_pathmgr._path_handlers.values()):  # those that configs are opened with
            self.path_manager.register_handler(handler)
        self.logger = logging.getLogger(__name__)
        self.asynchronous = asynchronous
        self.on_error = on_error
        self._pending: tuple[Future[CheckpointError | None], OnSaved | None] | None = None
        self.loaded_from = ""
        """The path that :meth:`load` loaded last."""
        self.load_report = LoadReport(0, 0)
        """How its weights matched the model."""
        self._weights_loaded = "model"
        self.resumed_from = ""
        """The checkpoint that :meth:`resume_or_load` resumed from; empty if there was none."""
        self._verified = ""  # the checkpoint whose checksums were compared just now
        self._has_folder = False
        self.base = "", "model"  # the arguments path and weights_from of resume_or_load()

    # ------------------------------------------------------------------ saving

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        outdated: Iterable[str] = (),
        then: OnSaved | None = None,
        **kwargs: object,
    ) -> None:
        """Save everything as ``<save_dir>/<name>.pth``.

        Args:
            name: name of the file, without folder or extension.
            tag_last: point ``last_checkpoint`` to the file, so that a resume starts from it.
            outdated: paths of files to remove once the new one is written.
            then: called at the end on the calling thread, with None, or with the error that prevented the write.
                After an asynchronous save the next :meth:`save`, :meth:`poll` or :meth:`wait` calls it. A process that
                does not write calls it at once.
            **kwargs: further data to save; :meth:`load` returns it.

        Raises:
            TypeError: some state is neither a tensor nor plain data; the message says where.
            CheckpointError: this file, or that of an asynchronous save, cannot be written. Earlier files remain.
        """
        if not self.save_dir or not (self.save_to_disk or self.needs_all_ranks):
            if then is not None:
                then(None)
            return
        if os.path.basename(name) != name:
            raise ValueError(f"a checkpoint's name must not contain a folder: {name!r}")
        self.wait()
        path = os.path.join(self.save_dir, f"{name}.pth")
        optimizers = [getattr(one, "optimizer", one) for one in self.checkpointables.values()]
        with optimizer_in_eval_mode(*optimizers):
            weights = {plain_name(name): value for name, value in self.model.state_dict().items()}
            contents = {"model": weights, **{name: one.state_dict() for name, one in self.checkpointables.items()}}
            state = self._plain({**contents, **kwargs})
            write = partial(self._write, path, tag_last=tag_last, outdated=outdated)
            self._pending = start_write(path, write, state, self.asynchronous), then
            if not self.asynchronous:
                self.wait()

    def _plain(self, contents: dict[str, Any]) -> object:
        """Return the state to write as plain data and tensors, which are not copied."""
        return to_plain(contents)

    def _write(self, path: str, state: Any, tag_last: bool, outdated: Iterable[str]) -> None:
        """Write a checkpoint, then point ``last_checkpoint`` to it, then remove outdated ones."""
        if not self._has_folder:
            self._make_folder()
        write_file(path, partial(write_checkpoint, data=state), self.path_manager)
        self._conclude(path, tag_last, outdated)

    def _conclude(self, path: str, tag_last: bool, outdated: Iterable[str]) -> None:
        if tag_last:
            self.tag_last_checkpoint(os.path.basename(path))
        for old in outdated:
            self.remove(old)

    def _make_folder(self) -> None:
        if "://" not in self.save_dir:  # not again later: a disk may be unmounted
            os.makedirs(self.save_dir, exist_ok=True)
            mend(self.save_dir)
        self._has_folder = True

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Point ``last_checkpoint`` to a file of ``save_dir``."""
        tag = os.path.join(self.save_dir, "last_checkpoint")
        write_file(tag, methodcaller("write", last_filename_basename.encode()), self.path_manager)

    def poll(self) -> None:
        """Call :meth:`wait` if an asynchronous save has ended. ``PeriodicCheckpointer`` does so in each step."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until an asynchronous save is on disk.

        Raises:
            CheckpointError: the write failed, and ``on_error`` is "stop".
        """
        if self._pending is None:
            return
        (write, then), self._pending = self._pending, None
        failure = write.result()
        if then is not None:
            then(failure)
        if failure is not None and self.on_error == "stop":
            raise failure
        if failure is not None:
            self.logger.error("Training continues without this checkpoint, until the next save: %s", failure)

    # ------------------------------------------------------------------ loading

    def load(
        self, path: str, checkpointables: list[str] | None = None, *, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        """Load a checkpoint, or weights in any format of :func:`~hookline.engine.checkpoint.weights.read_checkpoint`.

        Weights that do not fit the model are logged and skipped.

        Args:
            path: a file, a folder or a URI; with ``?matching_heuristics=True``, names of weights are matched by their
                ends. Empty: nothing is loaded.
            checkpointables: names of the other objects to load; None: all that are in the file.
            strict: require that the file's weights are exactly the model's.
            weights_from: "model", "averaged" or "auto": see :func:`~hookline.engine.checkpoint.weights.choose_weights`.

        Returns:
            The remaining content of the file, such as ``iteration``.

        Raises:
            ConfigError: the file is missing, corrupt or not a checkpoint, or does not fit the model.
        """
        if not path:
            kept = f"the model keeps the weights of {self.loaded_from}" if self.loaded_from else "training from scratch"
            self.logger.info("No checkpoint to load: %s", kept)
            return {}
        self.wait()
        local = self.fetch(path)
        # For weights alone, other content of a large file stays on disk. A subclass may have fvcore's arguments.
        mapped = checkpointables == [] and "mmap" in signature(self._load_file).parameters
        checkpoint = self._load_file(local, mmap=True) if mapped else self._load_file(local)
        self._verified, self.loaded_from = "", path
        checkpoint["model"], self._weights_loaded = choose_weights(checkpoint, weights_from, path)
        if "left_out" in checkpoint:  # by CHECKPOINT.TRAINABLE_ONLY
            from .trainable_only import add_frozen

            checkpoint["model"] = add_frozen(self, checkpoint["left_out"], checkpoint["model"])
        incompatible = self._load_model(checkpoint)
        if incompatible is not None:  # subclasses written for fvcore may return None
            self._log_incompatible_keys(incompatible)
        if strict:
            self.load_report.check_exact(path)
        for name in self.checkpointables if checkpointables is None else checkpointables:
            if name not in checkpoint:
                self.logger.warning("%s holds no %r: it stays as it is", path, name)
            else:
                self.logger.debug("Loading %s from %s", name, path)
                with as_config_error(f"{path}: the state of '{name}' in it"):
                    self.checkpointables[name].load_state_dict(checkpoint.pop(name))
        return checkpoint

    def resume_or_load(
        self, path: str, *, resume: bool | str = True, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        """Resume from the last checkpoint of ``save_dir``, or load the weights in ``path`` if there is none.

        Args:
            path: weights to start from; only the model is loaded.
            resume: whether to look for a last checkpoint and load all of it. Corrupt ones are skipped with a warning.
                Or the path of a checkpoint to resume from, or its name in ``save_dir``.
            strict: see :meth:`load`; applies to ``path`` only.
            weights_from: see :meth:`load`. A resume that also loads a trainer takes the model's weights.

        Returns:
            The remaining content of the file.
        """
        self.wait()
        self.base = path, weights_from
        find = partial(find_named, path=resume) if isinstance(resume, str) else find_resumable
        self.resumed_from = find(self) if resume else ""
        if self.resumed_from:
            # Of a file only rank 0's copy was compared: machines need no shared folder.
            if os.path.isdir(self.resumed_from) or not dist.is_initialized():
                self._verified = self.resumed_from
            return self.load(self.resumed_from, weights_from="model" if self.checkpointables else weights_from)
        return self.load(path, checkpointables=[], strict=strict, weights_from=weights_from)

    # ------------------------------------------------------------------ files

    def fetch(self, path: str) -> str:
        """Return the local path of a checkpoint. A URI's file is downloaded once.

        Raises:
            ConfigError: there is no such file.
        """
        return find_checkpoint(split_query(path)[0], self.path_manager)

    def get_all_checkpoint_files(self) -> list[str]:
        """Return the paths of all checkpoints in ``save_dir``: files, and folders of sharded models."""
        return super().get_all_checkpoint_files() if "://" in self.save_dir else checkpoints_in(self.save_dir)

    def get_checkpoint_file(self) -> str:
        """Return the path that ``last_checkpoint`` points to; empty if there is none or it is not a file name."""
        if "://" in self.save_dir:
            return str(super().get_checkpoint_file())
        name = read_tag(self.save_dir)
        return os.path.join(self.save_dir, name) if name else ""

    # ------------------------------------------------------------------ methods that subclasses for fvcore override

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """Read a local file or folder into a dict with "model"."""
        return read_checkpoint(f, mmap=mmap, verified=f == self._verified)

    def _load_model(self, checkpoint: Any) -> LoadReport:
        """Remove "model" from a checkpoint and load it."""
        by_suffix = checkpoint.get("matching_heuristics") or split_query(self.loaded_from)[1]
        weights = checkpoint.pop("model")
        self.load_report = load_weights(self.model, weights, path=self.loaded_from, by_suffix=bool(by_suffix))
        return self.load_report

    def _log_incompatible_keys(self, incompatible: LoadReport) -> None:
        self.load_report.log(self.logger, self.loaded_from, self._weights_loaded)


DetectionCheckpointer = Checkpointer
"""detectron2's name."""
