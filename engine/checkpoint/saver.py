"""Writes checkpoints one at a time, in place or on a thread, and handles errors."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...config.files.write_error import OnError, WriteError, check_on_error

__all__ = ["CheckpointError", "OnError", "Saver", "Then"]

logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds before a failed write is retried."""


class CheckpointError(WriteError):
    """A checkpoint could not be written. The message has the path, the cause and what to do. Earlier files remain."""

    verb = "save"


Then = Callable[[CheckpointError | None], Any]
"""Called with None when a file is written, or with the error that prevented it."""


class Saver:
    """Writes files, one at a time. Only the training thread calls its methods.

    A write that fails with an OSError is retried once. Then :meth:`write` reports the error. If ``asynchronous``, the
    first method called after the write has ended does.

    Args:
        asynchronous: write on a thread. It is not a daemon: the program waits for it before it exits.
        on_error: "stop" raises an OSError as a CheckpointError, "continue" logs it. Other errors are always raised.
    """

    def __init__(self, asynchronous: bool = False, on_error: OnError = "stop") -> None:
        check_on_error(on_error)
        self.asynchronous = asynchronous
        self.on_error = on_error
        self.pending: tuple[Future[None], str, Then | None] | None = None
        """The write whose result is not reported yet, its path and what to call then."""
        self._thread: ThreadPoolExecutor | None = None
        self._memory: dict[Any, torch.Tensor] = {}  # kept for the next copy
        self._copied: list[torch.cuda.Event] = []

    def keep(self, data: Any) -> Any:
        """Return plain data for the next write; if it is asynchronous, a copy in host memory.

        Tensors on a GPU are copied into pinned memory on the current stream. The host does not wait, and later steps
        on the stream change no weight before it is copied. A tensor that occurs twice is copied once.
        """
        if not self.asynchronous:
            return data
        earlier, self._memory = self._memory, {}
        copies: dict[Any, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
                return tensor.to("cpu", copy=True)
            key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
            if key not in copies:
                place = len(copies), *key[2:], tensor.is_cuda
                room = earlier.pop(place, None)
                if room is None:
                    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._memory[place] = copies[key] = room.copy_(tensor, non_blocking=tensor.is_cuda)
            return copies[key]

        data = tree_map_only(torch.Tensor, copy, data)
        for device in {device for device, *_ in copies if device.type == "cuda"}:
            self._copied.append(torch.cuda.current_stream(device).record_event())
        return data

    def write(self, path: str, write: Callable[[], Any], then: Then | None = None) -> None:
        """Wait for the previous write, call ``write()``, which writes ``path``, then call ``then``.

        Raises:
            CheckpointError: this write or the previous one failed; ``then`` was called.
        """
        self.wait()
        copied, self._copied = self._copied, []

        def write_twice() -> None:
            for event in copied:
                event.synchronize()
            try:
                write()
            except OSError as error:
                logger.warning("Retrying once: %s", CheckpointError.of(path, error))
                time.sleep(RETRY_AFTER)
                write()

        if self.asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, "hookline-checkpoint")
            self.pending = self._thread.submit(write_twice), path, then
            return
        done: Future[None] = Future()
        self.pending = done, path, then
        try:
            done.set_result(write_twice())
        except BaseException as error:
            done.set_exception(error)
        self.wait()

    def poll(self) -> None:
        """Report a write that has ended. Does not wait.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is not None and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the pending write and report it.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is None:
            return
        error = self.pending[0].exception()
        (_, path, then), self.pending = self.pending, None
        if error is not None and not isinstance(error, OSError):
            raise error
        failure = None if error is None else CheckpointError.of(path, error)
        if failure is not None and self.on_error == "continue":
            logger.error(
                "Training continues without this checkpoint; the next one is saved when it is due: %s", failure
            )
        if then is not None:
            then(failure)
        if failure is not None and self.on_error == "stop":
            raise failure from error

    def close(self) -> None:
        """Call :meth:`wait`, end the thread, and free the memory of copies."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
            self._memory.clear()
