"""Which of a run's checkpoints to go on from."""

import os
import re
from collections.abc import Collection, Iterable

from ...config import ConfigError
from .checkpoint_file import verify_checkpoint
from .torch_files import load_torch_file

__all__ = ["check_resumable", "newest_first"]


def newest_first(paths: Iterable[str]) -> list[str]:
    """The checkpoints that a resume may go on from, in the order they are to be tried in.

    What was saved at a failure comes last; copies of the best weights are left out. Files behind a URI tell no time:
    there the number in the name counts.
    """
    paths = [path for path in paths if "_best" not in os.path.basename(path)]
    return sorted(paths, key=_age, reverse=True)


def _age(path: str) -> tuple[bool, int, int, str]:
    name = os.path.basename(path)
    numbers = re.findall(r"\d+", name)
    try:
        modified = os.stat(path).st_mtime_ns
    except OSError:
        modified = 0
    return "_exception" not in name, modified, int(numbers[-1]) if numbers else -1, name


def check_resumable(path: str, needed: Collection[str], name: str = "") -> None:
    """Make sure that a local checkpoint is whole, and holds all that a resume needs.

    Args:
        path: the file, or the folder of sharded ones.
        needed: names of what it must hold beside the model.
        name: what to call it, where that is not the path.

    Raises:
        ConfigError: it does not; the message says what is wrong.
    """
    try:
        state = path
        if os.path.isdir(path):
            from .sharded import STATE_FILE, verify_folder

            verify_folder(path)
            state = os.path.join(path, STATE_FILE)
        else:
            verify_checkpoint(path)
        content = load_torch_file(state, mmap=True)
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
        missing = {"model", *needed} - content.keys()
        if missing:
            raise ConfigError(f"{path} cannot be resumed from: it has no {', '.join(sorted(missing))}")
    except ConfigError as error:
        raise ConfigError(str(error).replace(path, name or path)) from None
