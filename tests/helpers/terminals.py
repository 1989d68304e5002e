"""A pseudo-terminal for tests, and the content of its screen."""

import codecs
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time

_PIECES = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """A context with a pseudo-terminal. ``stream`` is its text stream, ``text`` all output so far."""

    def __init__(self, columns=120, encoding="utf-8", rows=40):
        self.columns = columns
        self.monkeypatch = None
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.stream = open(self.slave, "w", encoding=encoding)  # noqa: SIM115 (closed in close())
        self.text = ""
        self._decode = codecs.getincrementaldecoder(encoding)("replace").decode
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            self.text += self._decode(data)

    def __enter__(self):
        return self

    def take_output(self):
        """Replace the standard streams. Not for fixtures: pytest replaces the streams after them."""
        for name in ("stdout", "stderr"):
            self.monkeypatch.setattr(sys, name, self.stream)

    def __exit__(self, *_):
        self.close()
        os.close(self.master)

    def close(self):
        """Close the stream, and wait until all output has been read."""
        if not self.stream.closed:
            self.stream.close()
        self._reader.join(30)

    def until(self, what, seconds=30):
        """Wait until the screen shows ``what``, a pattern."""
        deadline = time.monotonic() + seconds
        while not re.search(what, "\n".join(self.screen())):
            assert time.monotonic() < deadline, f"{what!r} never came, but:\n{self.text!r}"
            time.sleep(0.002)

    def screen(self):
        """The lines on the screen, including scrolled ones. Colors and line clearing are its only escape codes."""
        rows, row, column = [[]], 0, 0
        for code, char in _PIECES.findall(self.text):
            if code == "\x1b[2K":
                rows[row] = []
            elif code == "\x1b[K":
                del rows[row][column:]
            elif code:
                assert code.endswith("m") or code in ("\x1b[?25l", "\x1b[?25h"), f"unexpected control code {code!r}"
            elif char == "\r":
                column = 0
            else:
                if char == "\n" or column == self.columns:
                    row, column = row + 1, column if char == "\n" else 0
                    rows += [[]] if row == len(rows) else []
                if char != "\n":
                    rows[row] += " " * (column - len(rows[row]))
                    rows[row][column : column + 1] = [char]
                    column += 1
        return ["".join(line).rstrip() for line in rows]
