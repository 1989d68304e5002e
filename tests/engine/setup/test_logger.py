import logging
import re

import pytest

from hookline.engine import setup_logger


@pytest.fixture
def logger():
    logger = logging.getLogger("hookline_test_logger")
    yield logger
    logger.handlers.clear()


def console(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_console_shows_time_and_message(logger, capsys):
    setup_logger(name=logger.name)
    logger.info("hello %s", "there")
    logger.debug("only for the file")
    (line,) = console(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  hello there", line)


def test_a_warning_shows_its_level_and_no_color_outside_a_terminal(logger, capsys):
    setup_logger(name=logger.name)
    logger.warning("careful")
    (line,) = console(capsys)
    assert line.endswith("  WARNING: careful")
    assert "\033" not in line


def test_the_file_has_all_lines_with_rank_time_name_and_level(logger, capsys, tmp_path):
    setup_logger(str(tmp_path), name=logger.name)
    logger.debug("details")
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rank0\] hookline_test_logger DEBUG: details", line)


def test_a_traceback_is_in_console_and_file(logger, capsys, tmp_path):
    setup_logger(str(tmp_path), name=logger.name)
    try:
        raise ValueError("the reason")
    except ValueError:
        logger.exception("it failed")
    assert "ValueError: the reason" in (tmp_path / "log.txt").read_text()
    assert "ValueError: the reason" in capsys.readouterr().out


def test_other_ranks_write_only_to_their_own_files(logger, capsys, tmp_path):
    setup_logger(str(tmp_path), distributed_rank=1, name=logger.name)
    logger.info("from another rank")
    assert console(capsys) == []
    assert "rank1] " in (tmp_path / "log.txt.rank1").read_text()
    assert (tmp_path / "log.txt").read_text() == ""


def test_errors_of_other_ranks_are_shown_and_in_rank_0s_file(logger, capsys, tmp_path):
    setup_logger(str(tmp_path), distributed_rank=3, name=logger.name)
    logger.error("it failed\nhere")
    line, rest = console(capsys)
    assert line.endswith("  rank 3: ERROR: it failed")
    assert rest == "here"
    for name in ("log.txt", "log.txt.rank3"):
        assert "rank3] hookline_test_logger ERROR: it failed\nhere\n" in (tmp_path / name).read_text()


def test_setup_twice_does_not_duplicate_lines(logger, capsys, tmp_path):
    for _ in range(2):
        setup_logger(str(tmp_path), name=logger.name)
    logger.info("once")
    assert len(console(capsys)) == 1
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 1


def test_a_named_file_can_be_added_later(logger, capsys, tmp_path):
    setup_logger(name=logger.name)
    logger.info("before")
    setup_logger(str(tmp_path / "sub" / "my.log"), name=logger.name)
    logger.info("after")
    assert len(console(capsys)) == 2
    assert (tmp_path / "sub" / "my.log").read_text().endswith("after\n")


def test_two_loggers_share_a_file(logger, capsys, tmp_path):
    other = setup_logger(str(tmp_path), name="hookline_test_logger_2")
    setup_logger(str(tmp_path), name=logger.name)
    try:
        for i in range(3):
            logger.info("a%d", i)
            other.info("b%d", i)
    finally:
        other.handlers.clear()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_second_run_appends_to_the_file(logger, capsys, tmp_path):
    (tmp_path / "log.txt").write_text("earlier\n")
    setup_logger(str(tmp_path), name=logger.name)
    logger.info("later")
    assert (tmp_path / "log.txt").read_text().startswith("earlier\n[")


def test_a_rank_that_is_known_later_prints_errors_only(capsys):
    logger = setup_logger(name="hookline.test_of_ranks")
    setup_logger(name="hookline.test_of_ranks", distributed_rank=1)
    logger.info("once per run")
    logger.error("wrong")
    out = capsys.readouterr().out
    assert "once per run" not in out
    assert "rank 1: ERROR: wrong" in out
