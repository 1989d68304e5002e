"""The state of loggers."""

import contextlib
import logging


@contextlib.contextmanager
def unchanged_logging():
    """Restore the loggers of hookline, fvcore and detectron2 at the end."""
    loggers = [logging.getLogger(name) for name in ("hookline", "fvcore", "detectron2")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
