"""How the tests are shared out: a file goes to one of the processes, so that its fixtures are made once."""

import os
import signal
from pathlib import Path

import pytest

# What takes longest comes first: the process that is done sooner then has short files to go on with.
FIRST = ("faults", "distributed", "test_readme.py", "test_package.py", "tools")


# Before torch is imported, and for all processes that tests start: several at a time share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    # Shells start what runs in the background without Ctrl-C, and so would all processes be that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(here).parts[0], len(FIRST)))
