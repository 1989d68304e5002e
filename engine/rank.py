"""One process of several: how it joins the others, leaves them, and tells them that it failed.

The ranks meet in a key-value store that the launcher (``launch`` or torchrun) keeps, so that it outlives any of
them. The first rank that fails says so there. The others look there once a second: whoever is still at work a little
later, in a collective that will never end for example, writes down where it stands, and ends too.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from ..config import ConfigError
from . import comm

__all__ = ["GOOD_ORDER", "Failure", "Place", "log_file", "run_rank", "tell_log_file"]

logger = logging.getLogger(__name__)

GOOD_ORDER = (0, 75, 130)
"""Exit codes of ranks that all of them agreed on: done, stopped to be resumed (EX_TEMPFAIL), interrupted."""

_FAILURE, _LOG_FILE = "hookline/failure", "hookline/log_file"
_LOOK_EVERY = 0.5
# Seconds that a rank is left to end by itself after another one failed; or was interrupted, as most likely it is too,
# and may be writing its metrics.
_GRACE, _GRACE_INTERRUPTED = 4.0, 20.0


@dataclass(frozen=True)
class Place:
    """Where a process stands among all of them.

    Attributes:
        rank, world_size: its number, and that of processes, over all machines.
        local_rank, local_size: the same on this machine.
        cuda: whether it has the GPU of its local rank.
        timeout: how long a collective waits for the others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cuda: bool
    timeout: timedelta


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: its number.
        kind: "config" for bad input, whose message is all there is to say; "interrupted" by KeyboardInterrupt;
            "exception"; "killed".
        text: the message, or the traceback.
    """

    rank: int
    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """From an exception that ends a rank."""
        if isinstance(error, ConfigError):
            return cls(rank, "config", str(error))
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
        return cls(rank, kind, "".join(traceback.format_exception(error)).rstrip())

    def tell(self, store: "dist.Store") -> "Failure":
        """Put it into the store unless another rank was faster; returns what is there then: the first failure."""
        try:
            mine = json.dumps([self.rank, self.kind, self.text])
            return Failure(*json.loads(store.compare_set(_FAILURE, "", mine)))
        except RuntimeError:  # the store is gone, and the launcher with it
            return self

    @classmethod
    def first(cls, store: "dist.Store") -> "Failure | None":
        """The first failure, if there was one.

        Raises:
            RuntimeError: the store is gone.
        """
        return cls(*json.loads(store.get(_FAILURE))) if store.check([_FAILURE]) else None

    def describe(self) -> str:
        """For a log, in one piece."""
        return f"Rank {self.rank} {self.how} first:\n{self.text}"

    @property
    def how(self) -> str:
        """In words: it "failed", or "was interrupted"."""
        return "was interrupted" if self.kind == "interrupted" else "failed"


def tell_log_file(path: str) -> None:
    """Let the launcher know the run's log, so that it can write there which rank failed."""
    store = comm.get_store()
    if store is not None and comm.is_main_process():
        store.set(_LOG_FILE, os.path.abspath(path))


def log_file(store: "dist.Store") -> str:
    """What was told by :func:`tell_log_file`; empty if nothing was."""
    try:
        return store.get(_LOG_FILE).decode() if store.check([_LOG_FILE]) else ""
    except RuntimeError:
        return ""


def run_rank(main_func: Callable[..., Any], args: tuple[Any, ...], store: "dist.Store", place: Place) -> Any:
    """Join the other ranks, run ``main_func(*args)``, and leave when all are done.

    Args:
        main_func: the function.
        args: its arguments.
        store: where the ranks meet; kept by somebody who outlives them.
        place: of this process.

    Returns:
        What ``main_func`` returns.

    Raises:
        Exception: what it raises; the other ranks have been told then.
    """
    if place.cuda:
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.cuda else "gloo",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=place.timeout,
    )
    stop = threading.Event()
    # A connection of its own: those that are waited on are closed to others meanwhile.
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    threading.Thread(target=_watch, args=(own, place.rank, stop), daemon=True, name="hookline-watch").start()
    try:
        result = main_func(*args)
        _leave(place.timeout)
    except SystemExit as end:
        # A code that all ranks end with is waited for; any other is that of one rank, while others may be at work.
        _leave(place.timeout if end.code in (None, *GOOD_ORDER) else timedelta(seconds=5))
        raise
    except KeyboardInterrupt as error:
        Failure.of(error, place.rank).tell(store)  # what the others fail with, if they are not interrupted too
        raise
    except BaseException as error:
        first = Failure.of(error, place.rank).tell(store)
        if first.rank != place.rank and first.kind != "config":
            # Of interest is what came first; what follows from it must not be the last thing that is read.
            logger.error("%s", first.describe())
        elif first.kind == "exception" and not getattr(error, "logged_by_trainer", False):
            logger.error("Rank %d fails", place.rank, exc_info=error)
        raise
    finally:
        stop.set()
    dist.destroy_process_group()
    return result


def _leave(timeout: timedelta) -> None:
    """Wait for the others to be done: a rank whose process ends too soon takes the connections of all with it."""
    # The store may be gone already when the slowest asks who else is there: then all have come.
    with contextlib.suppress(TimeoutError, RuntimeError):
        comm.barrier("leave", timeout)


def _watch(store: "dist.Store", rank: int, stop: threading.Event) -> None:
    """On a thread of its own: when another rank has failed, and this one does not end, end it."""
    while not stop.wait(_LOOK_EVERY):
        try:
            failure = Failure.first(store)
        except RuntimeError:  # the launcher was killed: each rank gets a signal then
            return
        if failure is None or failure.rank == rank:
            continue
        if stop.wait(_GRACE_INTERRUPTED if failure.kind == "interrupted" else _GRACE):
            return
        with _log_stream() as stream:
            stream.write(
                f"rank {rank} is ended, since rank {failure.rank} {failure.how} and it did not end by itself; "
                f"its threads stand here:\n"
            )
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        os._exit(1)


@contextlib.contextmanager
def _log_stream() -> Iterator[IO[str]]:
    """This rank's log file, or else standard error."""
    paths = [getattr(handler, "log_path", None) for handler in logging.getLogger("hookline").handlers]
    path = next((path for path in paths if path), None)
    if path is None:
        yield sys.stderr
        return
    with open(path, "a", encoding="utf-8") as file:
        yield file


def watch_parent(parent: Any, grace: float = 60.0) -> None:
    """End this process some time after its launcher was killed; the signal that it then gets asks for good order."""

    def wait() -> None:
        parent.join()
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-parent").start()


def environment(place: Place, address: str, port: int) -> Mapping[str, str]:
    """The variables that torchrun sets, for libraries that look at them."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
