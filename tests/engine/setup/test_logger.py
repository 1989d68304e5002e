"""The lines of the console and of the log files."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest

from hookline.engine import setup_logger


@pytest.fixture
def logger():
    logger = logging.getLogger("hookline_test_logger")
    yield logger
    logger.handlers.clear()


def console(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_console_shows_time_and_message_and_the_file_rank_name_and_level(logger, capsys, tmp_path):
    (tmp_path / "log.txt").write_text("earlier\n")
    for _ in range(2):  # a second call does not duplicate lines
        setup_logger(str(tmp_path), name=logger.name)
    logger.info("hello %s", "there")
    logger.debug("only for the file")
    logger.warning("careful")
    first, second = console(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  hello there", first)
    assert second.endswith("  WARNING: careful")
    assert "\033" not in second  # no color outside a terminal
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0] == "earlier"
    assert len(lines) == 4
    time = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rank0\]"
    assert re.fullmatch(rf"{time} hookline_test_logger DEBUG: only for the file", lines[2])
    try:
        raise ValueError("the reason")
    except ValueError:
        logger.exception("it failed")
    for text in ((tmp_path / "log.txt").read_text(), capsys.readouterr().out):
        assert "ValueError: the reason" in text


def test_other_ranks_write_to_their_own_files_and_errors_to_the_console_too(logger, capsys, tmp_path):
    setup_logger(str(tmp_path), distributed_rank=3, name=logger.name)
    logger.info("from another rank")
    logger.error("it failed\nhere")
    line, rest = console(capsys)
    assert line.endswith("  rank 3: ERROR: it failed")
    assert rest == "here"
    error = "rank3] hookline_test_logger ERROR: it failed\nhere\n"
    for name, has_all in (("log.txt", False), ("log.txt.rank3", True)):
        text = (tmp_path / name).read_text()
        assert error in text
        assert ("from another rank" in text) == has_all


@pytest.mark.parametrize("no_color", ["", "1"])
def test_warnings_stand_out_in_a_terminal_unless_no_color_is_set(logger, capsys, monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    setup_logger(name=logger.name)
    logger.warning("careful")
    logger.info("all is well")
    warning, info = console(capsys)
    assert warning.startswith("\033[33m") != bool(no_color)
    assert "\033" not in info


def test_any_standard_output_will_do(logger, capsys, monkeypatch):
    closed, ascii_only, written = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii"), []
    closed.close()
    tee = SimpleNamespace(write=written.append, flush=lambda: None)  # as scripts have it that also write a file
    for stream in (None, closed, tee, ascii_only):
        monkeypatch.setattr(sys, "stdout", stream)
        setup_logger(name=logger.name)
        logger.warning("Gr\u00f6\u00dfe")
        logger.handlers.clear()
    assert capsys.readouterr().err == ""
    assert "".join(written).endswith("WARNING: Gr\u00f6\u00dfe\n")
    ascii_only.seek(0)
    assert ascii_only.read().endswith("WARNING: Gr\\xf6\\xdfe\n")
