"""Finds the checkpoint that a path or a folder means, and the one to resume from."""

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from fvcore.common.checkpoint import Checkpointer
from iopath.common.file_io import PathManager

from ...config import ConfigError
from ...config.errors import suggest_file
from .. import comm
from .files import STATE_FILE, load_torch_file, read_tag, verify_checkpoint

logger = logging.getLogger(__name__)


# Files of a Hugging Face folder, in the order its libraries look for them.
_HUGGING_FACE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def find_checkpoint(path: str, path_manager: PathManager | None = None) -> str:
    """Return the checkpoint file that a path refers to.

    Args:
        path: a local file, or a folder: of a run, of Hugging Face, or of torch.distributed.checkpoint.
        path_manager: iopath's; downloads the file of a URI.

    Returns:
        The file; for torch.distributed.checkpoint, the folder.

    Raises:
        ConfigError: there is no such path, or it holds no weights.
    """
    if path_manager is not None and "://" in path and not os.path.exists(path):
        try:
            path = str(path_manager.get_local_path(path))
        except Exception as error:
            raise ConfigError(f"cannot read the checkpoint {path!r}: {error}") from error
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise ConfigError(f"there is no file {path}{suggest_file(path)}")
    if _is_distributed(path):
        return path
    is_run = os.path.isfile(os.path.join(path, "last_checkpoint"))
    for name in [read_tag(path)] if is_run else _HUGGING_FACE:
        found = os.path.join(path, name)
        if os.path.isfile(found) or _is_distributed(found):
            return found
    problem = "last_checkpoint, model.safetensors, pytorch_model.bin or .metadata"
    if is_run:
        problem = "the checkpoint that its last_checkpoint names"
    raise ConfigError(f"{path} is a folder without {problem}; name a file of weights")


def _is_distributed(path: str) -> bool:
    """Return whether a path is a folder of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(path, ".metadata"))


def find_resumable(checkpointer: Checkpointer) -> str:
    """Return the checkpoint to resume from: the last one, or else the newest that verifies; empty if there is none.

    All ranks call it, and resume from the same one.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`.

    Raises:
        ConfigError: ``last_checkpoint`` exists, and no checkpoint can be resumed from.
    """
    folder = checkpointer.save_dir
    tagged, last = comm.on_main_process(lambda: (checkpointer.has_checkpoint(), checkpointer.get_checkpoint_file()))
    if "://" in folder:
        if tagged and not last:
            raise ConfigError(f"{folder}/last_checkpoint cannot be read")
        return str(last)
    # Without last_checkpoint, a file of weights only may be from elsewhere.
    needed = checkpointer.checkpointables.keys() & {"trainer"} or ({"iteration"} if not tagged else set())
    found = last and first_resumable([last], needed)
    if not found:
        others = comm.on_main_process(
            lambda: newest_first(path for path in checkpointer.get_all_checkpoint_files() if path != last)
        )
        found = first_resumable(others, needed)
        if found:
            logger.warning("Resuming from %s, the newest intact checkpoint", found)
        elif tagged:
            raise ConfigError(
                f"{folder}: there is no intact checkpoint of this run; start without --resume, from weights "
                "(MODEL.WEIGHTS) if you like"
            )
    return found and os.path.join(folder, os.path.basename(found))  # each rank's copy: machines need no shared folder


def checkpoints_in(folder: str) -> list[str]:
    """Return the paths of all checkpoints in a local folder. Sharded ones are folders."""
    with suppress(OSError):  # there is no folder
        return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")]
    return []


def find_named(checkpointer: Checkpointer, path: str) -> str:
    """Return the checkpoint that a user has named to resume from.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`.
        path: see :func:`named_checkpoint`.

    Raises:
        ConfigError: there is no such file, or it cannot be resumed from.
    """
    found = comm.on_main_process(lambda: named_checkpoint(path, checkpointer.save_dir))
    check_resumable(found, checkpointer.checkpointables.keys() & {"trainer"})
    logger.info("Resuming from %s", found)
    return found


def named_checkpoint(path: str, folder: str) -> str:
    """Return the local checkpoint that a path names.

    Args:
        path: a file, a folder of shards, a run's folder (its last checkpoint), or the name of a file in ``folder``.
        folder: the run's folder.

    Raises:
        ConfigError: there is none.
    """
    here = os.path.join(folder, path)
    return find_checkpoint(here if os.path.exists(here) and not os.path.exists(path) else path)


def first_resumable(paths: Iterable[str], needed: Collection[str]) -> str:
    """Return the first checkpoint that :func:`check_resumable` accepts; empty if there is none. Logs the others.

    All ranks call it, with the same paths.
    """
    for path in paths:
        try:
            check_resumable(path, needed)
            return path
        except ConfigError as error:
            logger.warning("%s; trying the checkpoint before it", error)
    return ""


def newest_first(paths: Iterable[str]) -> list[str]:
    """Sort the checkpoints that a resume may use by the iteration they hold, newest first.

    Files that cannot be read come last. Best weights and checkpoints saved at a failure are left out: a run does not
    continue from them exactly.
    """
    names = [path for path in paths if not re.search("_best|_exception", os.path.basename(path))]
    return sorted(names, key=lambda path: (iteration_of(path), os.path.basename(path)), reverse=True)


def iteration_of(path: str) -> int:
    """Return the iteration in a checkpoint; -1 if there is none, or it cannot be read."""
    with suppress(ConfigError, AttributeError):
        return _iteration_in(_read(path), path)
    return -1


def _iteration_in(content: Any, path: str) -> int:
    """Return the larger of the iterations of a checkpoint and its trainer; -1 if it has none, or none is finished.

    Raises:
        ConfigError: one is not an iteration.
    """
    largest = -1
    for holder in (content, content.get("trainer", {})):
        iteration = holder.get("iteration", -1) if isinstance(holder, dict) else None
        if type(iteration) is not int or iteration < -1:
            raise ConfigError(f"{path}: its iteration is not a number of at least 0")
        largest = max(largest, iteration)
    return largest


def saved_run(path: str) -> Mapping[str, Any]:
    """Return what a local checkpoint says of its run, such as ``config`` and ``world_size``; empty if nothing."""
    with suppress(ConfigError, OSError, KeyError, TypeError):
        run = _read(path)["trainer"]["run"]
        return run if isinstance(run, Mapping) else {}
    return {}


def _read(path: str) -> Any:
    """Return the content of a checkpoint's file of ``torch.save``, which may be in a sharded one's folder."""
    return load_torch_file(os.path.join(path, STATE_FILE) if os.path.isdir(path) else path, mmap=True)


def check_resumable(path: str, needed: Collection[str]) -> None:
    """Check that a local checkpoint is intact and holds everything a resume needs. All ranks call it.

    Args:
        path: the file, or a sharded checkpoint's folder.
        needed: what it must hold beside the model.

    Raises:
        ConfigError: it cannot be resumed from; the message says why.
    """

    def check() -> bool:
        is_folder = os.path.isdir(path)
        if not is_folder:
            verify_checkpoint(path)
        content = _read(path)
        missing = {"model", *needed} - (content.keys() if isinstance(content, dict) else set())
        if missing:
            raise ConfigError(
                f"{path} cannot be resumed from: it has no {', '.join(sorted(missing))}. To start from its weights "
                "only, set MODEL.WEIGHTS to it"
            )
        _iteration_in(content, path)
        return is_folder

    if comm.on_main_process(check):
        from .sharded import verify_folder

        verify_folder(path)


def saved_config(folder: str) -> str:
    """Return the dump of the config in a run's newest checkpoint that has one; empty if no checkpoint has one.

    Args:
        folder: a run's local folder.
    """
    configs = (str(saved_run(path).get("config", "")) for path in newest_first(checkpoints_in(folder)))
    return next(filter(None, configs), "")
