"""Which of a run's checkpoints to go on from."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ...config import ConfigError
from .checkpoint_file import verify_checkpoint
from .matching import plain_name
from .torch_files import load_torch_file

__all__ = ["OtherModelError", "check_resumable", "iterations", "newest_first", "saved_config"]


class OtherModelError(ConfigError):
    """A checkpoint is whole, and of another model."""


def newest_first(paths: Iterable[str]) -> list[str]:
    """The checkpoints that a resume may go on from, in the order they are to be tried in.

    By the iteration that they hold; files that cannot be read come last. Copies of the best weights and what was saved
    at a failure are left out: a run does not go on exactly from those. Of files behind a URI the numbers in their
    names count.
    """
    return sorted(filter(_is_of_the_course, paths), key=_age, reverse=True)


def _is_of_the_course(path: str) -> bool:
    return not any(word in os.path.basename(path) for word in ("_best", "_exception"))


def _age(path: str) -> tuple[int, int, str]:
    name = os.path.basename(path)
    try:
        return _iteration(path), os.stat(path).st_mtime_ns, name
    except OSError:
        numbers = re.findall(r"\d+", name)
        return int(numbers[-1]) if numbers else -1, 0, name


def _iteration(path: str) -> int:
    """The iteration that a local checkpoint says it holds; -1 if it does not."""
    os.stat(path)
    try:
        return max(iterations(load_torch_file(_state_of(path), mmap=True)), default=-1)
    except ConfigError:
        return -1


def iterations(content: Any) -> list[int]:
    """The iterations that a checkpoint gives, its own and its trainer's.

    Raises:
        ConfigError: one is not an iteration. A trainer that has finished none has -1.
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


def _state_of(path: str) -> str:
    """The file of a checkpoint that is no sharded tensors."""
    from .sharded import STATE_FILE

    return os.path.join(path, STATE_FILE) if os.path.isdir(path) else path


def check_resumable(path: str, needed: Collection[str], name: str = "", model: nn.Module | None = None) -> None:
    """Make sure that a local checkpoint is whole, and holds all that a resume needs.

    Args:
        path: the file, or the folder of sharded ones.
        needed: names of what it must hold beside the model.
        name: what to call it, where that is not the path.
        model: the weights must be of this one, if it is given. (Those of a folder are not looked at.)

    Raises:
        ConfigError: it does not; the message says what is wrong. OtherModelError, which is one: it is whole.
    """
    try:
        if os.path.isdir(path):
            from .sharded import verify_folder

            verify_folder(path)
        else:
            verify_checkpoint(path)
        content = load_torch_file(_state_of(path), mmap=True)
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
        missing = {"model", *needed} - content.keys()
        if missing:
            raise ConfigError(f"{path} cannot be resumed from: it has no {', '.join(sorted(missing))}")
        try:
            iterations(content)
        except ConfigError as error:
            raise ConfigError(f"{path} cannot be resumed from: {error}") from None
        if model is not None and not os.path.isdir(path) and not _is_of(content["model"], model):
            raise OtherModelError(f"{path} is a checkpoint of another model")
    except ConfigError as error:
        raise type(error)(str(error).replace(path, name or path)) from None


def _is_of(weights: Any, model: nn.Module) -> bool:
    """Whether weights have the names of a model's, and the shapes. Buffers may grow in training."""
    own = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    if not isinstance(weights, Mapping) or weights.keys() != own.keys():
        return False
    pairs = [(weights[name], value) for name, value in own.items() if isinstance(value, nn.Parameter)]
    return all(is_lazy(value) or getattr(there, "shape", None) == value.shape for there, value in pairs)


def saved_config(folder: str) -> str:
    """The config in a run's last checkpoint, or in the newest that has one; what is damaged is passed over.

    Args:
        folder: a run's, local.

    Returns:
        The dump of the config; empty if no checkpoint has one.
    """
    paths = []
    with suppress(OSError):
        paths = newest_first(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
    tag = os.path.join(folder, "last_checkpoint")
    with suppress(OSError, UnicodeDecodeError):
        if os.path.isfile(tag):
            with open(tag) as file:
                paths.insert(0, os.path.join(folder, os.path.basename(file.read(4096).strip())))
    for path in paths:
        with suppress(ConfigError, OSError, KeyError, TypeError):
            verify_checkpoint(_state_of(path))
            return str(load_torch_file(_state_of(path), mmap=True)["trainer"]["run"]["config"])
    return ""
