"""Order of the test files, and fixtures that several of them use.

With the environment variable HOOKLINE_TEST_SEED, a number, files and the tests in each are in a random order.
"""

import logging
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from loggers import unchanged_logging

# Tests that promise that a file survives wait for the disk. The others do not: the machine goes on after them.
DURABLE = ("promises", "config/test_atomic.py", "config/test_run_folder.py")
# The longest files come first, so that the two processes end at about the same time.
FIRST = ("promises", "distributed", "test_package.py", "tools")


# Set before torch is imported. Processes that tests start inherit it: they share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    # Shells start background jobs with SIGINT ignored, and processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(here).parts[0], len(FIRST)))
    if seed := os.environ.get("HOOKLINE_TEST_SEED"):
        items.sort(key=lambda item: random.Random(f"{seed} {item.nodeid}").random())
        items.sort(key=lambda item: random.Random(f"{seed} {item.path}").random())


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log records of hookline of all levels, whatever handlers earlier tests have set."""
    logger = logging.getLogger("hookline")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.DEBUG, "hookline")
    return caplog


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if not request.path.relative_to(Path(__file__).parent).as_posix().startswith(DURABLE):
        monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def _restore_logging():
    with unchanged_logging():
        yield


@pytest.fixture(autouse=True, scope="module")
def _restore_logging_after_fixtures_of_a_module():
    with unchanged_logging():
        yield


@pytest.fixture(autouse=True)
def _forget_modules_of_this_test(tmp_path_factory: pytest.TempPathFactory):
    """A module that a test wrote and imported is gone after it: the next test may write one of that name."""
    before = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(vars(sys.modules[name]).get("__file__")).startswith(folder):
            del sys.modules[name]
