"""Errors of writing files, with advice, and ``CHECKPOINT.ON_ERROR``."""

import errno
from typing import Literal, Self

from ..errors import ConfigError

__all__ = ["OnError", "WriteError", "check_on_error"]

OnError = Literal["stop", "continue"]
"""What a run does if a file (checkpoint, metrics, events) cannot be written twice in a row."""


def check_on_error(value: str) -> None:
    """Raise a ConfigError unless ``value`` is an :data:`OnError`."""
    if value not in ("stop", "continue"):
        raise ConfigError(f'on_error must be "stop" or "continue", not {value!r}')


class WriteError(OSError):
    """A file could not be written. The message has the path, the cause and advice."""

    verb = "write"

    @classmethod
    def of(cls, path: str, cause: OSError) -> Self:
        return cls(cause.errno, cause.strerror or str(cause) or type(cause).__name__, path)

    def __str__(self) -> str:
        advice = _ADVICE.get(self.errno or 0, _GENERAL_ADVICE)
        return f"cannot {self.verb} {self.filename}: {self.strerror}; {advice}"


_GENERAL_ADVICE = "see to the disk or choose another folder (OUTPUT_DIR)"
_NO_SPACE = "make room there, keep fewer checkpoints (CHECKPOINT.MAX_TO_KEEP) or choose another folder (OUTPUT_DIR)"
_NOT_ALLOWED = "allow writing there, or choose another folder (OUTPUT_DIR)"
_NO_FOLDER = "its folder was removed; create it again, or choose another one (OUTPUT_DIR)"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another file system (OUTPUT_DIR)",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.ENOENT: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
}
