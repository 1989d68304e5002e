"""The site has all pages and public names, and short pages. ``.ci/run`` builds it with ``--strict``, so links work."""

import ast
import importlib
import re
from textwrap import dedent

import pytest
import yaml
from snippets import ROOT, Page

from hookline.config import ConfigError, get_cfg
from hookline.hooks.base import EVENTS


def pages_of(nav):
    """The pages in a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


NAV = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_page_is_in_the_navigation():
    assert len(NAV) == len(set(NAV))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs == {page for page in NAV if (ROOT / "docs" / page).exists()}


def test_every_public_name_has_a_place_in_the_reference():
    faces = [ROOT / name / "__init__.py" for name in ("engine", "hooks", "config")]
    for path in [*faces, ROOT / "engine/comm.py", *(ROOT / "engine").glob("*/__init__.py")]:
        if "__all__" in path.read_text():
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            assert f"reference/{module}.md" in NAV, f"add hookline.{module} to mkdocs.yml and docs/site_pages.py"


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_fits_beside_the_navigation(page):
    lines = [line for snippet in Page(ROOT / page).snippets for line in snippet.text.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


def test_code_in_docstrings_fits_beside_the_navigation():
    found = []
    for path in (path for folder in ("config", "hooks", "engine", "src") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                # After "::", until a line is indented less.
                blocks = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", (ast.get_docstring(node) or "") + "\n")
                found += [(node.name, line) for block in blocks for line in dedent(block).splitlines()]
    assert ("HookBase", "before_train()") in found
    assert [line for line in found if len(line[1]) > 88] == []


def test_pages_are_plain_markdown():
    """GitHub, and any theme of MkDocs, show no admonitions, tabs, icons, attributes or HTML."""
    for page in PAGES:
        text = re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^\s*(!!!|\?\?\?|===) |\{[:.#]|:material-|</?[a-z]", text, re.MULTILINE), page
        # A list inside of a list: MkDocs needs four spaces.
        assert not re.search(r"^ {1,3}([-*]|\d+\.) ", text, re.MULTILINE), page


def test_pages_are_short():
    words = {path.stem: len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= 24_000
    assert max(words[page] for page in ("distributed", "checkpoints", "detectron2")) <= 1200


def test_pictures_are_small_and_shown():
    pictures = {*(ROOT / "docs/pictures").iterdir()}
    shown = {
        (page.parent / target).resolve()
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown == pictures
    assert sum(picture.stat().st_size for picture in pictures) < 300_000


def test_errors_on_the_page_of_errors_exist():
    page = (ROOT / "docs/errors.md").read_text()
    assert issubclass(ConfigError, ValueError)
    for name in re.findall(r"`(\w+Error)`", page):
        places = (
            "hookline.engine.checkpoint",
            "hookline.config",
            "hookline.config.atomic",
            "torch",
            "builtins",
        )
        assert any(hasattr(importlib.import_module(place), name) for place in places), name


def test_events_and_keys_that_pages_name_exist():
    table = (ROOT / "docs/events.md").read_text()
    assert [name for name in EVENTS if not re.search(rf"^\| `{name}\b", table, re.MULTILINE)] == []
    keys = set(re.findall(r"`((?:[A-Z0-9_]+\.)+[A-Z0-9_]+)\b", (ROOT / "docs/features.md").read_text()))
    for key in keys:
        section = get_cfg()
        for part in key.split("."):
            assert part in section, key
            section = section[part]
