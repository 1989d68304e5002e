"""Folders of tokens: documents one after another in one array, made from text by ``hookline tokenize``.

A folder has three files:

- ``tokens.npy``: the tokens of all documents, one-dimensional, of an unsigned type. It is mapped into memory.
- ``ends.npy``: for each document the number of tokens up to its end, int64, increasing.
- ``info.json``: the tokenizer and the numbers of tokens and documents, for people and for checks.
"""

import json
import os
from collections.abc import Sequence
from glob import glob, has_magic
from typing import Any

import numpy as np

from ...config import ConfigError
from ...config.errors import suggest_file

__all__ = ["TokenFile", "token_files"]


class TokenFile:
    """The tokens of one file or folder, mapped into memory. A copy in another process maps the files again.

    Args:
        path: a folder of ``hookline tokenize``, or a file of numbers without a header.
        dtype: type of the numbers in a file without a header.

    Attributes:
        tokens: (N,) of any integer type.
        ends: (documents,) int64, the end of each document; None for a file without documents.
        tokenizer: what made the tokens; None if it is not known.
    """

    def __init__(self, path: str, dtype: str) -> None:
        self.path, self._dtype = path, dtype
        self.ends: np.ndarray | None = None
        self.tokenizer: str | None = None
        if not os.path.exists(path):
            raise ConfigError(f"there is no file or folder {path}{suggest_file(path)}")
        if not os.path.isdir(path):
            size, rest = divmod(os.path.getsize(path), np.dtype(dtype).itemsize)
            if rest:
                raise ConfigError(f"{path} does not end with a whole {dtype}: it was cut, or its dtype is another")
            self.tokens: np.ndarray = np.memmap(path, dtype=dtype, mode="r", shape=(size,)) if size else np.empty(0)
            return
        try:
            self.tokens, self.ends = (
                np.load(os.path.join(path, name), mmap_mode="r") for name in ("tokens.npy", "ends.npy")
            )
            with open(os.path.join(path, "info.json"), encoding="utf-8") as file:
                self.tokenizer = json.load(file)["tokenizer"]
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is not a folder of hookline tokenize: it has no {os.path.basename(error.filename)}"
            ) from error
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise ConfigError(f"{path} is damaged: {error}; make it again with hookline tokenize") from error
        if self.tokens.ndim != 1 or not len(self.ends) or self.ends[-1] != len(self.tokens):
            raise ConfigError(f"{path} is damaged: the last document does not end with the last token; make it again")

    def __reduce__(self) -> Any:
        return TokenFile, (self.path, self._dtype)

    def ends_in(self, start: int, stop: int) -> np.ndarray:
        """Return the ends of documents after token ``start``, up to ``stop`` tokens, counted from ``start``."""
        assert self.ends is not None
        first, last = np.searchsorted(self.ends, [start, stop], side="right")
        return np.asarray(self.ends[first:last]) - start


def token_files(path: str | Sequence[str], dtype: str) -> list[TokenFile]:
    """Open the files of paths and glob patterns, in the order of the list, and sorted within a pattern.

    Raises:
        ConfigError: there is no such file, it is damaged, or the tokenizers differ.
    """
    files = []
    for name in [path] if isinstance(path, str) else path:
        found = sorted(glob(name)) if has_magic(name) and not os.path.exists(name) else [name]
        if not found:
            raise ConfigError(f"no file fits the pattern {name}")
        files += [TokenFile(one, dtype) for one in found]
    if not files:
        raise ConfigError("path: is empty; name at least one file or folder")
    for file in files:
        if file.tokenizer != files[0].tokenizer:
            raise ConfigError(
                f"{files[0].path} and {file.path} were made by different tokenizers: "
                f"{files[0].tokenizer or 'unknown'} and {file.tokenizer or 'unknown'}"
            )
    return files
