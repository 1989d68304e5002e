"""A line that stays at the bottom of a terminal, below what is printed meanwhile."""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["BottomLine", "output_terminal"]

_ERASE_LINE = "\r\x1b[2K"
_ERASE_REST = "\x1b[K"


def output_terminal() -> Any:
    """``sys.stdout`` if it is a terminal with a file of its own; None for files, pipes, notebooks and the like."""
    stream = sys.stdout
    try:
        return stream if stream.isatty() and os.isatty(stream.fileno()) else None
    except (AttributeError, OSError, ValueError):  # no stream, one that is no file (ValueError), or one that is closed
        return None


class BottomLine:
    """One line below everything that this process prints to its terminal, between :meth:`begin` and :meth:`end`.

    ``sys.stdout``, and ``sys.stderr`` if it is the same terminal, are replaced meanwhile: a text is put above the line
    as it is, with its colours, and without being wrapped. After a text without an end of line (a prompt, a bar of
    somebody else's) the line stays away until that end comes.

    The line is drawn by a thread, and only if ``moment()`` has changed since the line was drawn or anything was
    printed: while nothing gets on nothing is drawn, so that a debugger can be used. The cursor is not hidden, so that
    a process that is killed leaves nothing to be repaired. A process forked meanwhile prints above the line, too.

    Rich's ``Live`` does the like, but wraps what is printed and takes its styles and prompts apart, hides the cursor,
    and leaves its locks to be waited for in vain by a process that is forked while it draws.

    Args:
        render: called with a width in columns; returns the line, no wider than that.
        moment: what the line is drawn for, compared by ``==``; called often.
        period: seconds between two looks at it.
    """

    def __init__(self, render: Callable[[int], str], moment: Callable[[], Any], period: float = 0.25) -> None:
        self._render = render
        self._moment = moment
        self._period = period
        # Taken for whatever is written. By signal handlers too, in the midst of a writing, so it is one to take twice.
        self._lock = threading.RLock()
        self._stream: Any = None
        self._streams: dict[str, tuple[Any, _Above]] = {}
        self._process = 0
        self._running = False
        self._line = ""
        self._unfinished = False  # the last text had no end of line
        self._shown: Any = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> bool:
        """Show the line from now on.

        Returns:
            Whether it is shown: there may be no terminal, or there may be such a line already.
        """
        stream = output_terminal()
        if stream is None or not _Lines.claim(self):
            return False
        self._process = os.getpid()
        self._stream = stream
        self._line, self._unfinished, self._shown = "", False, None
        self._ending.clear()
        self._running = True
        for name in ("stdout", "stderr"):
            before = getattr(sys, name)
            if before is stream or _same_terminal(before, stream):
                self._streams[name] = before, _Above(before, self)
                setattr(sys, name, self._streams[name][1])
                self._move_handlers(before, self._streams[name][1])
        self._thread = threading.Thread(target=self._keep_drawing, name="hookline-bottom-line", daemon=True)
        self._thread.start()
        atexit.register(self.end)  # where an interruption comes between everything
        return True

    def end(self) -> None:
        """Draw the line a last time, and leave it standing. What is printed from now on comes below it."""
        if not self._running or os.getpid() != self._process:
            return
        self._ending.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._running = False
            for name, (before, ours) in self._streams.items():
                if getattr(sys, name) is ours:  # else somebody put another one there, and will put ours back
                    setattr(sys, name, before)
                self._move_handlers(ours, before)
            self._streams.clear()
            atexit.unregister(self.end)
            _Lines.release(self)
            with contextlib.suppress(*_GONE):
                self._write(self._stream, ("\n" if self._unfinished else "\r") + self._rendered() + f"{_ERASE_REST}\n")

    @staticmethod
    def _move_handlers(source: Any, target: Any) -> None:
        """Have logging's handlers that hold one stream, as those of ``logging.basicConfig()`` do, write to another."""
        for logger in (logging.root, *logging.root.manager.loggerDict.copy().values()):
            for handler in getattr(logger, "handlers", ()):  # some are placeholders
                if isinstance(handler, logging.StreamHandler) and handler.__dict__.get("stream") is source:
                    handler.stream = target

    def stand_aside(self) -> None:
        """Take the line away until there is something new to show: somebody is about to ask for input."""
        with self._lock:
            if self._running and not self._unfinished:
                self._shown = self._moment()
                self._write(self._stream, _ERASE_LINE)

    def print_above(self, stream: Any, text: str) -> int:
        """Write a text above the line.

        Args:
            stream: where to.
            text: what. It may be a part of a line.

        Returns:
            Its length.
        """
        with self._lock:
            if not self._running or not isinstance(text, str):  # which the stream refuses
                return stream.write(text)
            if not text:
                return 0
            before = "" if self._unfinished else _ERASE_LINE
            after = ""
            if text.endswith("\n"):
                # At once, for the line would flicker if it had to wait for its turn.
                now = self._moment()
                after, self._shown = self._line if now != self._shown else "", now
            self._write(stream, f"{before}{text}{after}")
            self._unfinished = not text.endswith("\n")
            return len(text)

    def _keep_drawing(self) -> None:
        while not self._ending.wait(self._period):
            try:
                self._draw()
            except _GONE:
                return

    def _draw(self) -> None:
        with self._lock:
            now = self._moment()
            if self._unfinished or now == self._shown:
                return
            self._shown, self._line = now, self._rendered()
            self._write(self._stream, f"\r{self._line}{_ERASE_REST}")

    def _rendered(self) -> str:
        # A terminal that does not know its width says 0. What is left free is room for the ^C of whoever types it.
        columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        return self._render(max(columns - 3, 1))

    def _write(self, stream: Any, text: str) -> None:
        stream.write(text)
        stream.flush()  # always: a process that is forked must find nothing that it would write once more

    def leave_to_parent(self) -> None:
        """This process has been forked: its texts come above the line, which the other process draws."""
        self._lock = threading.RLock()
        self._line = ""


# The terminal is closed (OSError, ValueError), or whoever is shown is no more.
_GONE = (OSError, ValueError, ReferenceError)


class _Above:
    """A stream of the terminal; what is written comes above the line."""

    def __init__(self, stream: Any, line: BottomLine) -> None:
        self._stream = stream
        self._line = line
        self._written = False

    def write(self, text: str) -> int:
        self._written = True
        return self._line.print_above(self._stream, text)

    def flush(self) -> None:
        # input(), which debuggers ask by, flushes both streams, also the one that nothing was written to.
        if not self._written:
            self._line.stand_aside()
        self._written = False
        self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _same_terminal(one: Any, other: Any) -> bool:
    try:
        return one.isatty() and os.path.sameopenfile(one.fileno(), other.fileno())
    except (AttributeError, OSError, ValueError):
        return False


class _Lines:
    """The line that there is in this process, and what becomes of it when the process is forked."""

    _one: BottomLine | None = None
    _claiming = threading.Lock()
    _forking = threading.local()

    @classmethod
    def claim(cls, line: BottomLine) -> bool:
        """Make ``line`` the only one, if there is none."""
        cls._watch_forks()
        with cls._claiming:
            if cls._one is not None:
                return False
            cls._one = line
            return True

    @classmethod
    def release(cls, line: BottomLine) -> None:
        if cls._one is line:
            cls._one = None

    @classmethod
    @functools.cache
    def _watch_forks(cls) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=cls._before, after_in_parent=cls._in_parent, after_in_child=cls._in_child)

    @classmethod
    def _before(cls) -> None:
        # With the lock taken nobody is in the midst of writing, with locks that nobody would release in the child.
        line = cls._forking.line = cls._one
        if line is not None:
            line._lock.acquire()

    @classmethod
    def _in_parent(cls) -> None:
        line = cls._forking.line
        if line is not None:
            line._lock.release()

    @classmethod
    def _in_child(cls) -> None:
        line = cls._forking.line
        cls._one, cls._claiming = None, threading.Lock()
        if line is not None:
            line.leave_to_parent()
