"""Every row of docs/features.md names tests that are there, or says why the feature is left out."""

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "features.md"


def rows():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line != HEAD]


HEAD = "| feature | there | here | test |"


@functools.cache
def functions(path):
    file = TESTS / path
    assert file.is_file(), f"there is no {file}"
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_are_there():
    assert len(rows()) > 200
    for feature, there, here, tests in rows():
        assert all((feature, there, here)), feature
        if here.startswith("out: "):
            assert "::" not in tests, feature
            continue
        ids = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert ids, f"{feature}: no test"
        assert len(ids) == tests.count("::"), feature
        for path, name in ids:
            assert name in functions(path), f"{feature}: there is no {path}::{name}"


def test_no_feature_is_named_twice():
    names = [row[0] for row in rows()]
    assert len(names) == len(set(names))
