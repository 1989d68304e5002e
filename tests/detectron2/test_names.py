"""The table of detectron2's names: every row leads to a name of hookline, and the page shows the table."""

import importlib
import runpy
from pathlib import Path

import pytest

from hookline.detectron2.names import HOMES, REFUSED, homes_of

DOCS = Path(__file__).parents[2] / "docs" / "porting"


@pytest.mark.parametrize("module", HOMES)
def test_every_name_of_the_table_is_in_hookline(module):
    for home, name in homes_of(module).values():
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"


def test_every_module_of_the_table_has_its_parent():
    for module in HOMES:
        assert module == "detectron2" or module.rpartition(".")[0] in HOMES


def test_what_is_refused_is_not_in_the_table():
    for name in REFUSED:
        module, _, attribute = name.rpartition(".")
        assert attribute not in homes_of(module)


def test_the_page_shows_the_table():
    names = runpy.run_path(str(DOCS / "names.py"))
    text = (DOCS / "detectron2.md").read_text()
    assert names["BEGIN"] + names["table"]() + names["END"] in text, "run: python docs/porting/names.py"
