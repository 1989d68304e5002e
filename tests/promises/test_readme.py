"""Checks README.md, CONTRIBUTING.md and docs/: snippets run, and links and modules exist."""

import importlib
import json
import re
import shlex
import tomllib

import pytest
from snippets import ROOT, Page, shell_commands

from hookline.cli import main

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md"))
)
README = Page(ROOT / "README.md")
MAIN_COMMAND, TEST_COMMAND = (s.text.strip() for s in README.runnable if "-m venv" in s.text)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_every_snippet_of_a_page_runs(name, tmp_path):
    page = Page(ROOT / name)
    ran = page.run(tmp_path)
    assert ran.count == len(page.runnable)
    if name == "README.md":
        check_what_the_readme_promises(tmp_path, ran.output)


def check_what_the_readme_promises(folder, output):
    listing = next(s.text for s in README.snippets if s.text.startswith("config.yaml "))
    for pattern in (line.split()[0] for line in listing.splitlines()):
        pattern = re.sub(r"\d{7}", "*", pattern)
        # A run of a few iterations has no periodic checkpoint.
        pattern = pattern.replace("model_*", "model_final")
        assert list((folder / "output/digits_convnet").glob(pattern)), pattern
    rows = [json.loads(line) for line in (folder / "output/with_hook/metrics.json").read_text().splitlines()]
    assert any("weight_norm" in row for row in rows)
    assert "my_task:rings/accuracy" in (folder / "output/my_task/metrics.json").read_text()
    # The resumed run continued where the first one ended.
    assert "Starting training from iteration 0" not in output.split("--resume")[-1].split("hookline eval")[0]


def test_every_link_of_a_page_has_a_target():
    for name in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text_of(ROOT / name)):
            if "://" in target:
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            assert path.exists(), f"{name} links to {target}"
            assert not anchor or anchor in anchors(path), f"{name} links to {target}#{anchor}"


def text_of(path):
    """A page without its code blocks."""
    return re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_module_that_a_page_names_exists():
    for module in {name for page in PAGES for name in re.findall(r"`(hookline(?:\.\w+)*)`", (ROOT / page).read_text())}:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            parent, _, attribute = module.rpartition(".")
            assert hasattr(importlib.import_module(parent), attribute), module


def test_every_extra_that_a_page_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"""["']\S*(?:hookline|whl|\.)\[([\w,]+)\]["']""", (ROOT / page).read_text()):
            assert extras.keys() >= set(names.split(",")), f"{page}: {names}"


def test_sessions_in_the_readme_print_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sessions = [s.text for s in README.snippets if s.language == "console"]
    assert sessions
    for session in sessions:
        for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
            command, *answer = part.splitlines()
            program, *arguments = shlex.split(command)
            assert program == "hookline"
            with pytest.raises(SystemExit):
                main(arguments)
            # The page wraps long lines.
            assert "".join(capsys.readouterr()).split() == " ".join(answer).split()
    assert not list(tmp_path.iterdir())


def test_setup_takes_one_command_to_train_and_one_to_test():
    for command, last in (
        (MAIN_COMMAND, ".venv/bin/python tools/train_net.py --config-file configs/digits/convnet.yaml"),
        (TEST_COMMAND, ".venv/bin/python -m pytest"),
    ):
        assert "\n" not in command.replace("\\\n", "")
        venv, install, run = shell_commands(command)
        assert venv == "python3 -m venv .venv"
        assert "-r requirements.txt -e " in install
        assert run == last


def test_a_snippet_that_fails_is_found(tmp_path):
    (tmp_path / "page.md").write_text("```yaml\nSOLVER: {MAX_ITERS: 3}\n```\n")
    (tmp_path / "run").mkdir()
    with pytest.raises(AssertionError, match=r"did you mean 'SOLVER\.MAX_ITER'"):
        Page(tmp_path / "page.md").run(tmp_path / "run")
