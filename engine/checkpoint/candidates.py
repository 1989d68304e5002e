"""Chooses the checkpoint to resume from."""

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from ...config.files.run_folder import run_folder
from .. import comm
from .files import STATE_FILE, is_local, verify_checkpoint
from .state import plain_name
from .torch_files import load_torch_file

__all__ = [
    "check_resumable",
    "config_in",
    "find_resumable",
    "iteration_of",
    "iterations",
    "newest_first",
    "saved_config",
    "saved_ranks",
]

logger = logging.getLogger(__name__)


def find_resumable(checkpointer: Any) -> str:
    """Return the checkpoint to resume from: the last one, or else the newest that verifies; empty if there is none.

    The main process searches, so that all ranks resume from the same one.

    Args:
        checkpointer: a :class:`~hookline.engine.checkpoint.Checkpointer`.

    Raises:
        ConfigError: ``last_checkpoint`` exists, and no checkpoint can be resumed from.
    """
    found = comm.on_main_process(lambda: _find_resumable(checkpointer))
    return os.path.join(checkpointer.save_dir, os.path.basename(found)) if found else ""  # in this machine's folder


def _find_resumable(checkpointer: Any) -> str:
    folder = checkpointer.save_dir
    if is_local(folder):
        with suppress(ConfigError, OSError):  # a run trains there, or the folder is not writable
            for name in run_folder(folder).recover():
                logger.warning("Restored %s: a run was killed while it replaced it", name)
    tagged, last = checkpointer.has_checkpoint(), checkpointer.get_checkpoint_file()
    if tagged and not last:
        logger.warning("%s names no file", os.path.join(folder, "last_checkpoint"))
    # Without last_checkpoint, a file of weights only may be from elsewhere.
    needed = checkpointer.checkpointables.keys() or ({"iteration"} if not tagged else set())
    files: list[str] = []
    with suppress(OSError, NotImplementedError):  # no folder, or a handler that cannot list one
        files = checkpointer.get_all_checkpoint_files()
    others = newest_first(path for path in files if path != last)
    for candidate in [last, *others] if last else others:
        try:
            # The last checkpoint is this run's even if the model has changed. Others may have been copied there.
            model = None if candidate == last else checkpointer.model
            check_resumable(checkpointer.fetch(candidate), needed, name=candidate, model=model)
        except ConfigError as error:
            logger.warning("%s; trying the checkpoint before it", error)
            continue
        if candidate != last:
            logger.warning("Resuming from %s, the newest undamaged checkpoint", candidate)
        return candidate
    if tagged:
        raise ConfigError(
            f"{folder}: there is no undamaged checkpoint of this run and model; start without --resume, from weights "
            "(MODEL.WEIGHTS) if you like"
        )
    return ""


def newest_first(paths: Iterable[str]) -> list[str]:
    """Sort the checkpoints that a resume may use by the iteration they hold, newest first.

    Files that cannot be read come last. Best weights and checkpoints saved at a failure are left out: a run does not
    continue from them exactly.
    """
    names = [path for path in paths if not re.search("_best|_exception", os.path.basename(path))]
    return sorted(names, key=lambda path: (iteration_of(path), os.path.basename(path)), reverse=True)


def iteration_of(path: str) -> int:
    """Return the iteration in a local checkpoint, or else the number in its name; -1 if there is none."""
    try:
        return max(iterations(load_torch_file(_state_file(path), mmap=True)), default=-1)
    except ConfigError:
        numbers = re.findall(r"\d+", os.path.basename(path)) if "://" in path else []
        return int(numbers[-1]) if numbers else -1


def saved_ranks(path: str) -> int:
    """Return the number of ranks of the run that saved a local checkpoint; 0 if it is not known."""
    return int(_saved_run(path).get("world_size", 0))


def config_in(path: str) -> str:
    """Return the dump of the config in a local checkpoint; empty if it has none."""
    return str(_saved_run(path).get("config", ""))


def _saved_run(path: str) -> Mapping[str, Any]:
    with suppress(ConfigError, OSError, KeyError, TypeError):
        run = load_torch_file(_state_file(path), mmap=True)["trainer"]["run"]
        return run if isinstance(run, Mapping) else {}
    return {}


def iterations(content: Any) -> list[int]:
    """Return the iterations in a checkpoint: its own and its trainer's, where it has them.

    Raises:
        ConfigError: one is not an iteration. -1 is allowed: the trainer has finished none.
    """
    content = content if isinstance(content, dict) else {}
    trainer = content.get("trainer", {})
    if not isinstance(trainer, dict):
        raise ConfigError(f"the state of the trainer is a {type(trainer).__name__}, not a dict")
    found = [part["iteration"] for part in (content, trainer) if "iteration" in part]
    for value in found:
        if type(value) is not int or value < -1:
            shown = value if type(value) is int else f"a {type(value).__name__}"
            raise ConfigError(f"its iteration is {shown}, not a number of at least 0")
    return found


def _state_file(path: str) -> str:
    """Return the ``torch.save`` file of a checkpoint, which may be a sharded one's folder."""
    return os.path.join(path, STATE_FILE) if os.path.isdir(path) else path


def check_resumable(path: str, needed: Collection[str], name: str = "", model: nn.Module | None = None) -> None:
    """Check that a local checkpoint is undamaged and holds everything a resume needs.

    Args:
        path: the file, or a sharded checkpoint's folder.
        needed: what it must hold beside the model.
        name: what error messages call it; by default the path.
        model: the weights must be this model's, if it is given. Weights in folders are not compared.

    Raises:
        ConfigError: it cannot be resumed from; the message says why.
    """
    try:
        if os.path.isdir(path):
            from .sharded import verify_folder

            verify_folder(path)
        else:
            verify_checkpoint(path)
        content = load_torch_file(_state_file(path), mmap=True)
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
        missing = {"model", *needed} - content.keys()
        if missing:
            raise ConfigError(f"{path} cannot be resumed from: it has no {', '.join(sorted(missing))}")
        iterations(content)
        if model is not None and not os.path.isdir(path) and not _fits(content["model"], model):
            raise ConfigError(f"{path} is a checkpoint of another model")
    except ConfigError as error:
        text = str(error) if path in str(error) else f"{path} cannot be resumed from: {error}"
        raise ConfigError(text.replace(path, name or path)) from None


def _fits(weights: Any, model: nn.Module) -> bool:
    """Return whether weights have a model's names and its parameters' shapes. Buffers may grow in training."""
    own = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    if not isinstance(weights, Mapping) or weights.keys() != own.keys():
        return False
    pairs = [(weights[name], value) for name, value in own.items() if isinstance(value, nn.Parameter)]
    return all(is_lazy(value) or getattr(saved, "shape", None) == value.shape for saved, value in pairs)


def saved_config(folder: str) -> str:
    """Return the config in a run's newest undamaged checkpoint that has one.

    Args:
        folder: a run's local folder.

    Returns:
        The dump of the config; empty if no checkpoint has one.
    """
    paths: list[str] = []
    with suppress(OSError):
        paths = newest_first(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
    for path in paths:
        with suppress(ConfigError, OSError):
            verify_checkpoint(_state_file(path))
            if text := config_in(path):
                return text
    return ""
