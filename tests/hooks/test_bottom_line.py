import io
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from terminals import Terminal

from hookline.hooks.bottom_line import BottomLine, output_terminal


@pytest.fixture
def terminal(monkeypatch):
    with Terminal(60) as terminal:
        terminal.monkeypatch = monkeypatch
        yield terminal


class Counted:
    """A line that shows a number, and when it changes."""

    def __init__(self, period=0.001):
        self.number = 0
        self.line = BottomLine(lambda columns: f"number {self.number}", lambda: self.number, period)

    def __enter__(self):
        self.shown = self.line.begin()
        return self

    def __exit__(self, *_):
        self.line.end()

    def next(self, terminal):
        self.number += 1
        terminal.until(f"number {self.number}")


def test_what_is_printed_comes_above_the_line_as_it_is(terminal):
    terminal.take_output()
    long = "a line that is longer than the terminal is wide, with  two spaces " * 2
    with Counted() as counted:
        counted.next(terminal)
        print("first")
        print(long)
        sys.stderr.write("\x1b[33mWARNING: [bold]in colour[/bold] :smile:\x1b[0m\n")
        counted.next(terminal)
    print("after")
    terminal.close()
    assert "\x1b[33mWARNING: [bold]in colour[/bold] :smile:\x1b[0m" in terminal.text
    lines = terminal.screen()
    assert lines[0] == "first"
    assert "".join(line.ljust(60) for line in lines[1:4]).rstrip() == long.rstrip()
    assert lines[4] == "WARNING: [bold]in colour[/bold] :smile:"
    assert lines[5:] == ["number 2", "after", ""]


def test_a_line_is_there_again_as_soon_as_something_was_printed(terminal):
    terminal.take_output()
    with Counted(period=60) as counted:
        counted.line._line = "drawn before"
        counted.number = 1
        print("text")
        terminal.until("text\ndrawn before")


def test_a_prompt_has_its_line_for_itself_until_that_ends(terminal):
    terminal.take_output()
    with Counted() as counted:
        counted.next(terminal)
        sys.stdout.write("what to do? ")
        sys.stdout.flush()
        counted.number += 1
        time.sleep(0.05)  # in which the line would be drawn
        terminal.until(r"what to do\?")
        assert terminal.screen() == ["what to do?"]
        print("nothing")
        counted.next(terminal)
        sys.stdout.write("\r 10%|#  |")  # another library's bar
        sys.stdout.write("\r100%|###|")
    terminal.close()
    assert terminal.screen() == ["what to do? nothing", "100%|###|", "number 3", ""]


def test_while_nothing_gets_on_nothing_is_drawn_so_that_a_debugger_can_be_used(terminal):
    terminal.take_output()
    with Counted() as counted:
        counted.next(terminal)
        print("-> code")
        print("and its value")
        os.write(terminal.slave, b"(Pdb) ")  # as readline writes it, past sys.stdout
        time.sleep(0.05)
        terminal.until("(Pdb)")
        assert terminal.screen() == ["-> code", "and its value", "(Pdb)"]


def test_whoever_asks_for_input_has_a_line_without_what_was_drawn_after_his_text(terminal):
    terminal.take_output()
    with Counted(period=60) as counted:
        counted.line._line = "drawn before"
        counted.number = 1
        print("-> code")
        terminal.until("drawn before")
        sys.stderr.flush()  # input() begins so
        sys.stdout.flush()
        os.write(terminal.slave, b"(Pdb) ")
        terminal.until("(Pdb)")
        assert terminal.screen() == ["-> code", "(Pdb)"]


def test_handlers_of_before_write_above_the_line_too_and_have_their_stream_again_after_it(terminal):
    terminal.take_output()
    stream = sys.stderr
    logger, handler = logging.getLogger("of somebody else"), logging.StreamHandler()
    logger.addHandler(handler)
    with Counted() as counted:
        counted.next(terminal)
        logger.warning("a warning")
        counted.next(terminal)
    assert handler.stream is stream
    logger.removeHandler(handler)
    terminal.close()
    assert terminal.screen() == ["a warning", "number 2", ""]


def test_a_stream_is_otherwise_what_it_was(terminal):
    terminal.take_output()
    before = sys.stdout
    with Counted():
        assert sys.stdout is not before
        assert sys.stdout.isatty()
        assert sys.stdout.encoding == before.encoding
        assert sys.stdout.fileno() == before.fileno()
        kept = sys.stdout
        assert sys.stdout.write("four\n") == 5
        sys.stdout.writelines(["five\n", "six\n"])
        with pytest.raises(TypeError):
            sys.stdout.write(7)
    assert sys.stdout is before
    kept.write("seven\n")  # by a logging handler that was made meanwhile
    kept.flush()
    terminal.close()
    assert terminal.screen() == ["four", "five", "six", "number 0", "seven", ""]


def test_errors_go_where_they_went_if_that_is_no_terminal_or_another_one(terminal, tmp_path, monkeypatch):
    terminal.take_output()
    with Terminal() as other, open(tmp_path / "err", "w") as file:
        for stream in (file, other.stream):
            monkeypatch.setattr(sys, "stderr", stream)
            with Counted():
                assert sys.stderr is stream


def test_what_somebody_else_put_in_place_of_a_stream_stays(terminal, monkeypatch):
    terminal.take_output()
    other = io.StringIO()
    with Counted():
        monkeypatch.setattr(sys, "stdout", other)
    assert sys.stdout is other


def test_there_is_one_line_at_a_time(terminal):
    terminal.take_output()
    before = sys.stdout
    with Counted() as first, Counted() as second:
        assert (first.shown, second.shown) == (True, False)
    with Counted() as third:
        assert third.shown
        third.line.end()
        third.line.end()
    assert sys.stdout is before


def test_a_terminal_that_is_closed_disturbs_nobody(monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    with Terminal() as terminal:
        monkeypatch.setattr(sys, "stdout", terminal.stream)
        with Counted() as counted:
            counted.next(terminal)
            terminal.stream.close()
            counted.number += 1
            counted.line._thread.join(30)
            assert not counted.line._thread.is_alive()
    assert not errors


def test_a_process_forked_in_the_midst_of_drawing_prints_above_the_line(terminal):
    terminal.take_output()
    count = 0

    def slow(columns):
        time.sleep(0.02)
        return "drawn slowly"

    def moment():
        nonlocal count
        count += 1
        return count

    line = BottomLine(slow, moment, 0.0001)
    line.begin()
    terminal.until("drawn slowly")
    try:
        for number in range(5):
            child = os.fork()
            if not child:
                print(f"child {number}")
                line.end()  # not its line
                os._exit(0 if isinstance(sys.stdout.fileno(), int) else 1)
            deadline = time.monotonic() + 30
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    pytest.fail("the child waits for a lock that nobody holds in it")
                time.sleep(0.005)
            print(f"parent {number}")
    finally:
        line.end()
    terminal.close()
    expected = [f"{who} {number}" for number in range(5) for who in ("child", "parent")]
    assert terminal.screen() == [*expected, "drawn slowly", ""]


def test_what_is_no_terminal_gets_no_line(tmp_path, monkeypatch):
    with open(tmp_path / "closed", "w") as closed:
        pass
    with open(tmp_path / "file", "w") as file:
        for stream in (None, io.StringIO(), closed, file):
            monkeypatch.setattr(sys, "stdout", stream)
            assert output_terminal() is None
            with Counted() as counted:
                assert not counted.shown
                assert sys.stdout is stream


def test_a_stream_that_only_says_it_is_a_terminal_gets_no_line(monkeypatch):
    class Notebook(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Notebook())
    assert output_terminal() is None
