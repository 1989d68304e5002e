import logging

import pytest

from hookline.engine.compat.logger import (
    create_small_table,
    log_every_n,
    log_every_n_seconds,
    log_first_n,
    setup_logger,
)


@pytest.fixture(autouse=True)
def loggers_are_put_back():
    loggers = [logging.getLogger(name) for name in ("hookline", "detectron2")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_loggers_of_ported_code_are_set_up(tmp_path, capsys):
    logger = setup_logger(str(tmp_path))
    assert logger.name == "detectron2"
    logging.getLogger("detectron2.trainer").info("ported")
    logging.getLogger("hookline.engine").info("own")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert "ported" in text
        assert "own" in text


def test_a_line_logs_the_first_n_times(caplog):
    with caplog.at_level(logging.INFO):
        for i in range(4):
            log_first_n(logging.INFO, f"a{i}", 2)
            log_first_n(logging.WARNING, "b", name="mine")
            log_first_n(logging.INFO, f"c{i // 2}", key="message")
    assert messages(caplog) == ["a0", "b", "c0", "a1", "c1"]
    assert caplog.records[0].name == __name__
    assert caplog.records[1].name == "mine"


def test_a_line_logs_every_n_times(caplog):
    with caplog.at_level(logging.INFO):
        for i in range(7):
            log_every_n(logging.INFO, str(i), 3)
    assert messages(caplog) == ["0", "3", "6"]


def test_a_line_logs_once_in_n_seconds(caplog):
    with caplog.at_level(logging.INFO):
        for i in range(3):
            log_every_n_seconds(logging.INFO, f"rare {i}", 1000)
            log_every_n_seconds(logging.INFO, f"always {i}", 0)
    assert messages(caplog) == ["rare 0", "always 0", "always 1", "always 2"]


def test_an_unknown_key_is_an_error():
    with pytest.raises(ValueError, match="line"):
        log_first_n(logging.INFO, "x", key="line")


def test_a_small_table_has_one_row():
    assert create_small_table({"AP": 12.34567, "name": "box"}).split("\n") == [
        "|   AP   | name |",
        "|:------:|:----:|",
        "| 12.346 | box  |",
    ]
