"""The table of docs/events.md names every event there is, and its arguments as hooks are given them."""

import inspect
import re
from itertools import dropwhile, takewhile
from pathlib import Path

from hookline.hooks import EVENTS, HookBase

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
SYSTEMS = ["detectron2", "HF Trainer", "pytorch-accelerated", "fastNLP", "Lightning", "MMEngine"]


def rows():
    """The cells of the lines of the page's first table, its head first and without the line of dashes."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    lines = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [table[0], *table[2:]]


def test_the_table_has_every_event_in_the_order_of_a_run():
    names = [re.fullmatch(r"`(\w+)(\(.*\))?`", row[0])[1] for row in rows()[1:]]
    assert tuple(names) == EVENTS


def test_the_table_shows_the_arguments_of_each_event():
    for cell, *_ in rows()[1:]:
        name, arguments = re.fullmatch(r"`(\w+)(?:\((.*)\))?`", cell).groups()
        parameters = list(inspect.signature(getattr(HookBase, name)).parameters)[1:]
        assert (arguments or "").split(", ") == (parameters or [""]), name


def test_the_table_has_a_cell_for_every_system_and_none_is_empty():
    head, *events = rows()
    assert head[-len(SYSTEMS) :] == SYSTEMS
    for row in events:
        assert len(row) == len(head), row
        assert all(row), row
