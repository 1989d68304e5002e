"""Order of the test files, and fixtures that several of them use."""

import logging
import os
import signal
from pathlib import Path

import pytest
from loggers import unchanged_logging

# The longest files come first, so that the two processes end at about the same time.
FIRST = ("faults", "distributed", "test_readme.py", "test_package.py", "tools")


# Set before torch is imported. Processes that tests start inherit it: they share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    # Shells start background jobs with SIGINT ignored, and processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(here).parts[0], len(FIRST)))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log records of hookline of all levels, whatever handlers earlier tests have set."""
    logger = logging.getLogger("hookline")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.DEBUG, "hookline")
    return caplog


@pytest.fixture(autouse=True)
def _restore_logging():
    with unchanged_logging():
        yield


@pytest.fixture(autouse=True, scope="module")
def _restore_logging_after_fixtures_of_a_module():
    with unchanged_logging():
        yield
