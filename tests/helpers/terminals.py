"""A terminal for tests: a real pseudo-terminal, and what its screen shows."""

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
    """A pseudo-terminal of so many columns, as a context. ``stream`` is its text stream, ``text`` all that it got."""

    def __init__(self, columns=120, encoding="utf-8"):
        self.columns = columns
        self.monkeypatch = None
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.stream = open(self.slave, "w", encoding=encoding)  # noqa: SIM115 (closed in close())
        self.text = ""
        self._decode = codecs.getincrementaldecoder(encoding)("replace").decode
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # nobody holds the other side any more
                return
            if not data:
                return
            self.text += self._decode(data)

    def __enter__(self):
        return self

    def take_output(self):
        """Be what this process prints to. Not for fixtures: after them pytest puts its own streams there."""
        for name in ("stdout", "stderr"):
            self.monkeypatch.setattr(sys, name, self.stream)

    def __exit__(self, *_):
        self.close()
        os.close(self.master)

    def close(self):
        """No more is written here; wait until all of it has been read."""
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
        """The lines that it shows, those that are scrolled off included."""
        return screen(self.text, self.columns)


def screen(text, columns):
    """The lines that a terminal shows of a text; of escape codes it knows colours and the clearing of lines only."""
    rows, row, column = [[]], 0, 0
    for code, char in _PIECES.findall(text):
        if code == "\x1b[2K":
            rows[row] = []
        elif code == "\x1b[K":
            del rows[row][column:]
        elif code:
            assert code.endswith("m") or code in ("\x1b[?25l", "\x1b[?25h"), f"unexpected control code {code!r}"
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            rows += [[]] if row == len(rows) else []
        else:
            if column == columns:
                row, column = row + 1, 0
                rows += [[]] if row == len(rows) else []
            line = rows[row]
            line += " " * (column - len(line))
            line[column : column + 1] = char
            column += 1
    return ["".join(line).rstrip() for line in rows]
