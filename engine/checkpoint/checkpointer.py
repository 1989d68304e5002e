"""Saving and loading a run's state: fvcore's interface, atomic files, nothing executed on loading.

What hooks may count on::

    checkpointer = Checkpointer(model, folder, asynchronous=False, on_error="stop", trainer=trainer)
    checkpointer.save(name, tag_last=True, outdated=paths, then=call, **data)
    checkpointer.poll()     # at the end of each step: an attribute is looked at, unless a write has ended meanwhile;
                            # True: it failed, and what it came to is told by the next save, which all ranks must begin
    checkpointer.wait()     # at the end of a run, whatever ended it: until what was begun is on the disk
    checkpointer.close()    # wait(), and the memory of asynchronous saves is given back

``save`` takes the state as it is now. Once the file is whole and has its name, ``last_checkpoint`` points to it
(``tag_last``), and only then the files ``outdated`` (paths as ``get_all_checkpoint_files`` gives them) are removed.
``then(error)`` is called last, always on the thread that called ``save``, ``poll``, ``wait`` or ``close``: with None
when all that is done (so emit ``after_save`` there), or with the OSError that kept the file from being written, in
which case nothing was removed. A synchronous save calls it before it returns; an asynchronous one at the next
``save``, ``poll``, ``wait`` or ``close``. Where this process saves nothing (no ``save_dir``, or another rank writes),
``then(None)`` is called at once.

A write that fails is tried once more. Then, with ``on_error="stop"``, a CheckpointError (an OSError) is raised, by
``save`` itself or, of an asynchronous one, by the next of these calls; with ``"continue"`` an ERROR is logged and the
run goes on to its next save. State that has no plain form is a TypeError of ``save`` in any case.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, Any

from fvcore.common.checkpoint import Checkpointer as _FvcoreCheckpointer
from fvcore.common.checkpoint import PeriodicCheckpointer, _IncompatibleKeys
from torch import nn

from ...config import ConfigError
from ...config.files.atomic import put_back, remove_leftovers, replace_file
from ...config.files.run_folder import claim, is_claimed
from ...hooks.common.models import unwrap_model
from .. import comm
from .candidates import OtherModelError, check_resumable, iterations, newest_first
from .checkpoint_file import write_checkpoint
from .matching import LoadReport, load_weights, plain_name
from .saver import CheckpointError, OnError, Saver, Then
from .staging import Staging
from .state import to_plain
from .storages import compact
from .torch_files import first_line
from .weights import choose_weights, find_checkpoint, read_checkpoint

__all__ = ["CheckpointError", "Checkpointer", "DetectionCheckpointer", "PeriodicCheckpointer", "unwrap_model"]

# No more than this is read of last_checkpoint.
_MAX_NAME = 4096


class Checkpointer(_FvcoreCheckpointer):
    """Saves and loads a model and whatever else has ``state_dict()`` and ``load_state_dict()``.

    The interface is fvcore's. Files are written under a temporary name and renamed when they are whole and on the
    disk; they hold tensors and plain data only, and are loaded with ``weights_only=True``, so that loading one runs no
    code. Checksums cover every byte of them. Names of weights are the plain model's, whether or not it is compiled or
    wrapped for data-parallel training.

    Args:
        model: the model.
        save_dir: folder of the checkpoints, or a URI that ``path_manager`` knows; empty: nothing is saved. Behind a
            URI a file is as safe from being cut off as the URI's handler makes it.
        save_to_disk: whether this process writes; by default the main one does.
        asynchronous: :meth:`save` takes a copy of the state, which is kept for the next (so this needs as much memory
            as the state), and the file is written while training goes on.
        on_error: when a file cannot be written: "stop" with a CheckpointError, or log an error and "continue".
        **checkpointables: the rest of the state, by name, such as ``optimizer=optimizer``.
    """

    needs_all_ranks = False
    """Whether all ranks must call :meth:`save` together."""

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
        save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        super().__init__(unwrap_model(model), save_dir, save_to_disk=save_to_disk, **checkpointables)
        self.logger = logging.getLogger(__name__)
        self.loaded_from = ""
        """The file that :meth:`load` loaded last."""
        self.missing_keys: list[str] = []
        """The model's weights that it did not hold, or held in another shape."""
        self.load_report = LoadReport(0, 0)
        """What became of its weights."""
        self._taken = "model"
        self.resumed_from = ""
        """The checkpoint that the last :meth:`resume_or_load` went on from; empty if there was none."""
        self._saver = Saver(asynchronous, on_error)
        self._staging = Staging()
        self._cleaned = ""
        self._tagged = False
        self._seen = save_dir if _is_local(save_dir) and os.path.isdir(save_dir) else ""

    def save(
        self, name: str, *, tag_last: bool = True, outdated: Iterable[str] = (), then: Then | None = None, **kwargs: Any
    ) -> None:
        """Save everything as ``<save_dir>/<name>.pth``.

        Args:
            name: of the file, without folder or extension.
            tag_last: have ``last_checkpoint`` point to it: a resume goes on from there.
            outdated: paths of files that are to go once this one is whole.
            then: called when all that is done, with None, or with the error that kept the file from being written;
                by an asynchronous save at a later call of one of these methods (see the top of this module).
            **kwargs: further data to save; :meth:`load` returns it.

        Raises:
            TypeError: some state is neither a tensor nor plain data; the message says where.
            CheckpointError: the disk is full, or the folder cannot be written; by an asynchronous save: at the one
                before. What was there is as it was.
        """
        if not self.save_dir or not self._takes_part:
            if then is not None:
                then(None)
            return
        if os.path.basename(name) != name:
            raise ValueError(f"a checkpoint's name must not contain a folder: {name!r}")
        self.wait()
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.debug("Saving checkpoint to %s", path)
        write = self._prepare(path, kwargs)
        outdated = [old for old in outdated if old != path]

        def write_all() -> None:
            self._staging.wait()
            write()
            self._conclude(f"{name}.pth" if tag_last else "", outdated)

        self._saver.write(path, write_all, then)

    @property
    def _takes_part(self) -> bool:
        """Whether this process has anything to do with a save."""
        return bool(self.save_to_disk)

    def _prepare(self, path: str, further: dict[str, Any]) -> Callable[[], None]:
        """Take the state as it is now; what is returned writes it to ``path``."""
        data = compact(self._state(further))
        if self._saver.asynchronous:
            data = self._staging.copy(data)
        return lambda: self._write(path, lambda file: write_checkpoint(file, data))

    def _conclude(self, last: str, outdated: Iterable[str]) -> None:
        """A checkpoint is whole: have ``last_checkpoint`` point to ``last``, unless that is empty; old ones go."""
        if last:
            self.tag_last_checkpoint(last)
        for old in outdated:
            self._remove(old)

    def poll(self) -> bool:
        """If an asynchronous save has ended since, do what is to be done then; at next to no cost if none has.

        Returns:
            Whether it failed and cannot be told of here: call :meth:`save`, on all ranks together. (Of checkpoints
            that one process writes: never.)

        Raises:
            CheckpointError: it failed, and ``on_error`` is "stop".
        """
        if self._saver.pending is not None:
            self._saver.poll()
        return False

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointError: it is not, and ``on_error`` is "stop".
        """
        if self._saver.pending is not None:
            self._saver.wait()

    def close(self) -> None:
        """:meth:`wait`, and give back the memory of asynchronous saves. A later save takes it anew."""
        try:
            self.wait()
        finally:
            self._staging.free()

    def _state(self, further: dict[str, Any]) -> dict[str, Any]:
        weights = to_plain(self.model.state_dict(), "model")
        data: dict[str, Any] = {"model": {plain_name(key): value for key, value in weights.items()}}
        for name, obj in self.checkpointables.items():
            data[name] = to_plain(obj.state_dict(), name)
        for name, value in further.items():
            data[name] = to_plain(value, name)
        return data

    def _write(self, path: str, write: Callable[[IO[bytes]], Any]) -> None:
        """Have a file of ``save_dir`` written by ``write``, which is given a local one."""
        if _is_local(path):
            claim(path)
            self._prepare_folder()
            replace_file(path, write)
            return
        with tempfile.NamedTemporaryFile() as file:
            write(file)
            file.seek(0)
            try:
                with suppress(NotImplementedError):  # nothing to make, where there are no folders
                    self.path_manager.mkdirs(self.save_dir)
                with self.path_manager.open(path, "wb") as there:
                    shutil.copyfileobj(file, there, 1 << 24)
            except OSError:
                raise
            except Exception as error:  # handlers have errors of their own
                raise OSError(f"{type(error).__name__}: {error}") from error

    def _prepare_folder(self) -> None:
        """Make the folder and, before the first save, remove what a run that was killed left half written there.

        Raises:
            OSError: it cannot be made; or it was there and is gone: where a disk was unmounted or somebody removed it,
                a new folder of that name is not what the run was to write to.
        """
        if self._seen == self.save_dir:
            os.stat(self.save_dir)
        else:
            os.makedirs(self.save_dir, exist_ok=True)
        self._seen = self.save_dir
        last = os.path.join(self.save_dir, "last_checkpoint")
        if self._tagged and not os.path.exists(last):
            self._tagged = False
            self.logger.warning(
                "%s is gone, which this run has written: somebody removed or replaced the folder, or a disk is not "
                "mounted. The run goes on in what is there now",
                last,
            )
        if self._cleaned != self.save_dir:
            removed = remove_leftovers(self.save_dir)
            if removed:
                self.logger.info("Removed what a run that was killed left half written: %s", ", ".join(removed))
            self._cleaned = self.save_dir

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Have ``last_checkpoint`` point to a file of ``save_dir``."""
        content = last_filename_basename.encode()
        self._write(os.path.join(self.save_dir, "last_checkpoint"), lambda file: file.write(content))
        self._tagged = True

    def _remove(self, path: str) -> None:
        if not is_claimed(path):
            self.logger.warning("%s was not written by this run, and so it is not removed", path)
            return
        try:
            if os.path.isdir(path):  # of ranks that wrote their parts
                shutil.rmtree(path)
            elif self.path_manager.exists(path):
                self.path_manager.rm(path)
        except Exception as error:  # of the disk, or a handler's own; no reason to have the save fail
            self.logger.warning("Cannot remove the old checkpoint %s: %s", path, error)

    def get_checkpoint_file(self) -> str:
        """The file that ``last_checkpoint`` points to; empty if there is none, or what it says is no file's name."""
        tag = os.path.join(self.save_dir, "last_checkpoint")
        try:
            if _is_local(tag) and not os.path.isfile(tag):  # a pipe would be waited for
                return ""
            with self.path_manager.open(tag, "r") as file:
                name = file.read(_MAX_NAME).strip()
        except (OSError, UnicodeDecodeError):
            return ""
        if not name or os.path.basename(name) != name or not name.isprintable():
            return ""
        return os.path.join(self.save_dir, name)

    def load(
        self,
        path: str,
        checkpointables: list[str] | None = None,
        *,
        strict: bool = False,
        weights_from: str = "model",
    ) -> dict[str, Any]:
        """Load a checkpoint, or weights in any format of :func:`~hookline.engine.checkpoint.weights.read_checkpoint`.

        What of the weights does not fit is logged; what does is loaded.

        Args:
            path: a file, a folder or a URI. Empty: nothing is loaded.
            checkpointables: names of what to load beside the model; None: everything that is in the file.
            strict: the file's weights must be the model's, no more and no less.
            weights_from: "model", "averaged" or "auto": see :func:`~hookline.engine.checkpoint.weights.choose_weights`.

        Returns:
            What else the file holds, such as ``iteration``.

        Raises:
            ConfigError: there is no such file, it is damaged or no checkpoint, no weight in it fits the model, or
                some do not and ``strict`` is set.
        """
        if not path:
            self.logger.info("No weights to start from: the model is as it was built")
            return {}
        self.wait()
        local = self._fetch(path)
        checkpoint = self._load_weights(local) if checkpointables == [] else self._load_file(local)
        try:
            checkpoint["model"], self._taken = choose_weights(checkpoint, weights_from)
            if self.checkpointables and checkpointables != []:
                iterations(checkpoint)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        self.loaded_from = path
        incompatible = self._load_model(checkpoint)
        if incompatible is not None:  # subclasses written for fvcore may say nothing
            self._log_incompatible_keys(incompatible)
            if strict and any(incompatible):
                different = "\n".join(self.load_report.differences())
                raise ConfigError(f"{path} does not fit the model exactly, which is asked for:\n{different}")
        for name in self.checkpointables if checkpointables is None else checkpointables:
            if name in checkpoint:
                self.logger.debug("Loading %s from %s", name, path)
                self._load_state(name, checkpoint.pop(name))
        return checkpoint

    def _load_state(self, name: str, state: Any) -> None:
        try:
            self.checkpointables[name].load_state_dict(state)
        except (ConfigError, OSError):
            raise
        except Exception as error:  # of any kind, as the state happens to be
            self.logger.debug("Cannot load %s", name, exc_info=True)
            raise ConfigError(
                f"{self.loaded_from}: the state of '{name}' in it cannot be loaded ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from error

    def _fetch(self, path: str) -> str:
        """Where a file or folder is locally; what a URI names is downloaded, once.

        Raises:
            ConfigError: there is no such file.
        """
        if os.path.exists(path) or _is_local(path):
            return find_checkpoint(path)
        try:
            return self.path_manager.get_local_path(path)
        except Exception as error:
            raise ConfigError(f"cannot read the checkpoint {path!r}: {error}") from error

    def resume_or_load(
        self, path: str, *, resume: bool = True, strict: bool = False, weights_from: str = "model"
    ) -> dict[str, Any]:
        """Go on from the last checkpoint of ``save_dir``, or start from the weights in ``path``.

        Args:
            path: weights to start from; only the model is loaded.
            resume: whether to look for a last checkpoint, and load all of it. One that is damaged is passed over,
                with a warning, for the newest that is whole, also where ``last_checkpoint`` is lost.
            strict: see :meth:`load`; of ``path`` alone.
            weights_from: see :meth:`load`. A resume that also loads a trainer takes the model's: averages are the
                trainer's hooks' to load.

        Returns:
            What the file holds beyond the model and the checkpointables.
        """
        self.wait()
        self.resumed_from = self._last_whole_for_all() if resume else ""
        if self.resumed_from:
            return self.load(self.resumed_from, weights_from="model" if self.checkpointables else weights_from)
        return self.load(path, checkpointables=[], strict=strict, weights_from=weights_from)

    def _last_whole_for_all(self) -> str:
        """:meth:`_last_whole`, found out by one rank, so that all have the same."""
        found = ("", "")
        if comm.is_main_process():
            try:
                found = (self._last_whole(), "")
            except ConfigError as error:
                found = ("", str(error))
        path, message = comm.broadcast_object(found)
        if message:
            raise ConfigError(message)
        return path

    def _last_whole(self) -> str:
        """The checkpoint to resume from: the last one, or the newest that is whole; empty if there is none.

        Raises:
            ConfigError: ``last_checkpoint`` is there, and no checkpoint is whole.
        """
        if _is_local(self.save_dir):
            for name in put_back(self.save_dir):
                self.logger.warning("%s is in its place again: a run was killed as it replaced it", name)
        tagged, last = self.has_checkpoint(), self.get_checkpoint_file()
        # Without last_checkpoint a file of weights alone need not be of this run.
        needed = self.checkpointables.keys() or ({"iteration"} if not tagged else set())
        if tagged and not last:
            self.logger.warning("%s names no file", os.path.join(self.save_dir, "last_checkpoint"))
        others = newest_first(path for path in self._files() if path != last)
        of_another_model = False
        for candidate in [last, *others] if last else others:
            try:
                # The last one is this run's, whatever the model is now; others may have been put there.
                model = None if candidate == last else self.model
                check_resumable(self._fetch(candidate), needed, name=candidate, model=model)
            except ConfigError as error:
                self.logger.warning("%s; trying the checkpoint before it", error)
                of_another_model |= isinstance(error, OtherModelError)
                continue
            if candidate != last:
                self.logger.warning("Resuming from %s, the newest that is whole", candidate)
            return candidate
        if tagged:
            if of_another_model:
                raise ConfigError(
                    f"{self.save_dir}: no checkpoint of this model is whole there; resume with the model that the run "
                    "had (MODEL), or start without --resume, from its weights (MODEL.WEIGHTS) if you like"
                )
            raise ConfigError(f"{self.save_dir}: no checkpoint there is whole; start without --resume")
        return ""

    def _files(self) -> list[str]:
        try:
            return self.get_all_checkpoint_files()
        except (OSError, NotImplementedError):  # no folder, or a handler that cannot list one
            return []

    def get_all_checkpoint_files(self) -> list[str]:
        """The paths of all checkpoints in ``save_dir``; those that ranks wrote their parts of are folders."""
        names = [name for name in self.path_manager.ls(self.save_dir) if name.endswith(".pth")]
        return [os.path.join(self.save_dir, name) for name in names]

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """What a local file or folder holds, as a dict with "model"."""
        return read_checkpoint(f, mmap=mmap)

    def _load_weights(self, f: str) -> dict[str, Any]:
        """The same, when the weights alone are wanted: of a large file no more is read."""
        own_reader = type(self)._load_file is Checkpointer._load_file  # another may have fvcore's arguments
        return self._load_file(f, mmap=True) if own_reader else self._load_file(f)

    def _load_model(self, checkpoint: Any) -> _IncompatibleKeys:
        """Take "model" out of a checkpoint, and load it."""
        weights, by_suffix = checkpoint.pop("model"), bool(checkpoint.get("matching_heuristics"))
        report = load_weights(self.model, weights, path=self.loaded_from or "the file", by_suffix=by_suffix)
        self.load_report = report
        self.missing_keys = [*report.missing, *(name for name, _, _ in report.mismatched)]
        return _IncompatibleKeys(report.missing, report.unexpected, report.mismatched)

    def _log_incompatible_keys(self, incompatible: _IncompatibleKeys) -> None:
        self.load_report.log(self.logger, self.loaded_from, self._taken)


DetectionCheckpointer = Checkpointer
"""detectron2's name."""


def _is_local(path: str) -> bool:
    return "://" not in path
