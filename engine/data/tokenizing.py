"""Text files to folders of tokens (their format: ``token_files.py``): the work of ``hookline tokenize``."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np

from ...config import ConfigError, locate, suggest
from ...config.errors import suggest_file

__all__ = ["tokenize_files"]

_DTYPES = ("uint8", "uint16", "uint32")  # smallest first
_CHUNK = 1 << 20  # characters that a worker gets at once
_Document = tuple[str, str]  # its place, for messages, and its text


def tokenize_files(
    inputs: Sequence[str],
    output: str,
    tokenizer: str = "bytes",
    *,
    end_token: str | None = None,
    field: str = "text",
    lines: bool = False,
    dtype: Literal["uint8", "uint16", "uint32"] | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[str, Any]:
    """Write the documents of text files as a folder of tokens. Memory does not grow with the size of the input.

    Documents without tokens are skipped. The folder appears when it is complete.

    Args:
        inputs: files in UTF-8: ``.jsonl`` with one document per line, any other with one document per file. With
            ``.gz`` after that they are decompressed.
        output: the folder to write, which must not exist.
        tokenizer: "bytes", "package.module:function" (called with a text, returns ints), or a JSON file of Hugging
            Face's ``tokenizers``, whose special tokens are not added.
        end_token: a token after each document: its number, or its name in the tokenizer's file.
        field: where a line of a ``.jsonl`` file has the text.
        lines: each line of a text file is a document.
        dtype: type of the numbers. Default: the smallest for the tokenizer's vocabulary (a function's attribute
            ``vocab_size``; uint32 without one).
        workers: processes that tokenize; 0: this one.
        progress: called with the number of documents and tokens so far, about once per megabyte of text.

    Returns:
        The content of ``info.json``.

    Raises:
        ConfigError: bad input, or the output exists. Nothing is left behind.
    """
    for path in inputs:
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a folder; give its files, such as {os.path.join(path, '*.txt')}")
        if not os.path.exists(path):
            raise ConfigError(f"there is no file {path}{suggest_file(path)}")
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; choose another name, or remove it")
    if workers < 0:
        raise ConfigError(f"workers: must be at least 0, not {workers}")
    encoder = _Encoder(tokenizer, end_token, dtype)
    folder, name = os.path.split(os.path.abspath(output))
    try:
        os.makedirs(folder, exist_ok=True)
        partial = tempfile.mkdtemp(prefix=f"{name}.partial-", dir=folder)
        try:
            documents, tokens = _write(partial, encoder, _documents(inputs, field, lines), workers, progress)
            info = {
                "tokenizer": encoder.identity,
                "vocab_size": encoder.vocab_size,
                "end_token": encoder.end_token,
                "dtype": encoder.dtype.name,
                "documents": documents,
                "tokens": tokens,
            }
            if not tokens:
                raise ConfigError(f"{', '.join(inputs)}: there are no tokens")
            with open(os.path.join(partial, "info.json"), "w", encoding="utf-8") as file:
                file.write(json.dumps(info, indent=2) + "\n")
            os.chmod(partial, 0o777 & ~_umask())
            os.rename(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from error
    return info


class _Encoder:
    """A tokenizer, by name. Workers build their own."""

    def __init__(self, tokenizer: str, end_token: str | None, dtype: str | None) -> None:
        self.arguments = (tokenizer, end_token, dtype)
        self.identity = tokenizer
        self.vocab_size: int | None
        number_of: Callable[[str], int | None] | None = None
        if tokenizer == "bytes":
            self._encode: Callable[[str], Any] = lambda text: np.frombuffer(text.encode(), np.uint8)
            self.vocab_size = 256
        elif tokenizer.endswith(".json"):
            library = _tokenizers(tokenizer)
            self._encode = lambda text: library.encode(text, add_special_tokens=False).ids
            self.vocab_size, number_of = library.get_vocab_size(), library.token_to_id
            with open(tokenizer, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()[:16]
            self.identity = f"{os.path.basename(tokenizer)} sha256:{digest}"
        elif ":" in tokenizer or "." in tokenizer:
            self._encode = locate(tokenizer)
            if not callable(self._encode):
                raise ConfigError(f"tokenizer: {tokenizer} is not a function")
            self.vocab_size = getattr(self._encode, "vocab_size", None)
        else:
            raise ConfigError(
                f"tokenizer: unknown '{tokenizer}'{suggest(tokenizer, ['bytes'])} It is 'bytes', "
                "'package.module:function', or a .json file of Hugging Face's tokenizers"
            )
        self.end_token: int | None = None
        if end_token is not None:
            if end_token.isdecimal():
                self.end_token = int(end_token)
            elif number_of is not None:
                self.end_token = number_of(end_token)
            if self.end_token is None:
                raise ConfigError(f"end token: {tokenizer} has no token '{end_token}'; give a number")
        if self.vocab_size is not None and self.end_token is not None:
            self.vocab_size = max(self.vocab_size, self.end_token + 1)
        if dtype is None:
            most = 2**32 if self.vocab_size is None else self.vocab_size
            dtype = next((name for name in _DTYPES if most <= np.iinfo(name).max + 1), _DTYPES[-1])
        self.dtype = np.dtype(dtype)

    def __call__(self, chunk: list[_Document]) -> tuple[np.ndarray, list[int]]:
        """Return the tokens of documents, and how many each has."""
        parts = [part for place, text in chunk if len(part := self._one(place, text))]
        return np.concatenate(parts or [np.empty(0, self.dtype)]), [len(part) for part in parts]

    def _one(self, place: str, text: str) -> np.ndarray:
        try:
            tokens = np.asarray(self._encode(text))
        except Exception as error:
            raise ConfigError(f"{place}: the tokenizer fails: {type(error).__name__}: {error}") from error
        if not tokens.size:
            return np.empty(0, self.dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ConfigError(f"{place}: the tokenizer must return a list of ints, not {tokens.dtype} {tokens.shape}")
        if self.end_token is not None:
            tokens = np.append(tokens.astype(np.int64), self.end_token)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            token = low if low < 0 else high
            raise ConfigError(f"{place}: the token {token} does not fit into {self.dtype}; choose another dtype")
        return tokens.astype(self.dtype)


def _tokenizers(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizer: {path} needs tokenizers: pip install 'hookline[huggingface]'") from error
    if not os.path.isfile(path):
        raise ConfigError(f"tokenizer: there is no file {path}")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"tokenizer: {path} is no tokenizer of Hugging Face's tokenizers: {error}") from error


def _documents(inputs: Sequence[str], field: str, lines: bool) -> Iterator[_Document]:
    """Yield the documents of files, with their places."""
    for path in inputs:
        plain = path.removesuffix(".gz")
        opener: Any = open if plain == path else gzip.open
        try:
            with opener(path, "rt", encoding="utf-8", newline="") as file:
                if plain.endswith(".jsonl"):
                    yield from _json_lines(path, file, field)
                elif lines:
                    yield from ((f"{path}:{number}", text.rstrip("\r\n")) for number, text in enumerate(file, 1))
                else:
                    yield path, file.read()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: is not text in UTF-8: {error.reason} ({error.object[error.start]:#x})"
            ) from None
        except (OSError, EOFError) as error:
            raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', '') or error}") from error


def _json_lines(path: str, file: Iterable[str], field: str) -> Iterator[_Document]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: is not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
            names = list(entry) if isinstance(entry, dict) else []
            hint = suggest(field, names) or (f"; it has: {', '.join(names)}" if names else "")
            raise ConfigError(f"{path}:{number}: has no text in the field '{field}'{hint}")
        yield f"{path}:{number}", entry[field]


def _chunks(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    """Group documents to about a megabyte."""
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[1]) + 100
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _write(
    folder: str,
    encoder: _Encoder,
    documents: Iterator[_Document],
    workers: int,
    progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write ``tokens.npy`` and ``ends.npy``; return the numbers of documents and tokens."""
    with ExitStack() as stack:
        tokens, ends = (
            stack.enter_context(_GrowingArray(os.path.join(folder, name), dtype))
            for name, dtype in (("tokens.npy", encoder.dtype), ("ends.npy", np.dtype(np.int64)))
        )
        for block, lengths in _encoded(encoder, _chunks(documents), workers):
            ends.append(tokens.length + np.cumsum(lengths, dtype=np.int64))
            tokens.append(block)
            progress(ends.length, tokens.length)
        return ends.length, tokens.length


def _encoded(
    encoder: _Encoder, chunks: Iterator[list[_Document]], workers: int
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Tokenize in the order of the chunks. At most three chunks per worker are in memory."""
    if not workers:
        yield from map(encoder, chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start_worker, encoder.arguments)
    try:
        waiting = deque(pool.submit(_in_worker, chunk) for chunk in islice(chunks, 3 * workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(_in_worker, chunk) for chunk in islice(chunks, 1))
    except BrokenProcessPool as error:
        raise ConfigError("a worker was killed, perhaps for its memory; try fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: _Encoder


def _start_worker(*arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    global _worker_encoder
    _worker_encoder = _Encoder(*arguments)


def _in_worker(chunk: list[_Document]) -> tuple[np.ndarray, list[int]]:
    return _worker_encoder(chunk)


class _GrowingArray:
    """A one-dimensional ``.npy`` file to which values are appended. The header has room for any length."""

    def __init__(self, path: str, dtype: np.dtype[Any]) -> None:
        self.length = 0
        self._dtype = dtype
        self._file = open(path, "wb")  # noqa: SIM115 (closed in __exit__)
        self._write_header()

    def __enter__(self) -> "_GrowingArray":
        return self

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).data)
        self.length += len(values)

    def __exit__(self, *error: Any) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
