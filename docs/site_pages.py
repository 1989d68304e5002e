"""Makes the pages of the site (mkdocs.yml) that are not in docs/.

- README.md is the first page, and CONTRIBUTING.md and CHANGELOG.md are pages.
- Links are written for GitHub. A link to a file outside of docs/ leads to a page of the site that shows the file.
- ``reference/`` has a page for each public module, with every name of its ``__all__``.
"""

import ast
import os
import posixpath
import re
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("config", "hooks", "engine")
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Public modules, in the order of the reference.
MODULES = ["hookline", "hookline.engine", "hookline.hooks", "hookline.config", "hookline.runs"] + [
    f"hookline.engine.{name}"
    for name in ("checkpoint", "comm", "data", "evaluation", "modeling", "parallel", "program", "solver")
]
# Public names of other packages.
ELSEWHERE = {
    "hookline.engine.checkpoint.PeriodicCheckpointer": "fvcore.common.checkpoint.PeriodicCheckpointer",
    "hookline.engine.solver.LRScheduler": "torch.optim.lr_scheduler.LRScheduler",
}
PACKAGE = tempfile.TemporaryDirectory()
FENCES = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and show mkdocstrings a copy of the package under its installed name."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    shutil.copytree(ROOT / "src/hookline", f"{PACKAGE.name}/hookline")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, f"{PACKAGE.name}/hookline/{folder}")
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [PACKAGE.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, page in PAGES.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    sources = {
        target
        for file in files.documentation_pages()
        for target in map(repository_path, *links(file))
        if page_of(target).startswith("source/")
    }
    for path in sorted(sources):
        files.append(File.generated(config, page_of(path), content=source_page(path)))
    for module in MODULES:
        files.append(File.generated(config, reference_page(module), content=reference(module)))
    files.append(File.generated(config, "reference/index.md", content=reference_index()))
    return files


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    here = page.file.src_uri
    if here.startswith(("source/", "reference/")):
        return markdown

    def link(match: re.Match) -> str:
        return posixpath.relpath(page_of(repository_path(here, match[1])), posixpath.dirname(here) or ".")

    return outside_of_code(markdown, lambda text: LINK.sub(link, text))


def outside_of_code(markdown: str, change) -> str:
    """Apply ``change`` to the text between code blocks."""
    done, end = [], 0
    for block in FENCES.finditer(markdown):
        done += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*done, change(markdown[end:])])


def links(file: File) -> tuple[list[str], list[str]]:
    """Return the page, once for each of its links, and the targets of the links."""
    targets = [] if file.src_uri.startswith("source/") else LINK.findall(FENCES.sub("", file.content_string))
    return [file.src_uri] * len(targets), targets


def repository_path(page: str, target: str) -> str:
    """Return the path in the repository of what a page links to."""
    place = next((name for name, other in PAGES.items() if other == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def page_of(path: str) -> str:
    """Return the page of the site for a path in the repository."""
    if (ROOT / path).is_dir():  # docs/porting/: its first page
        path = min(p.relative_to(ROOT).as_posix() for p in (ROOT / path).glob("*.md"))
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"source/{path}.md"


def source_page(path: str) -> str:
    """Return a page that shows a file, without a table of contents: lines of 120 columns need its room."""
    language = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}.get(os.path.splitext(path)[1], "text")
    return f"---\nhide: [toc]\n---\n\n# {path}\n\n~~~~{language}\n{(ROOT / path).read_text()}\n~~~~\n"


def reference_page(module: str) -> str:
    return f"reference/{module.removeprefix('hookline.')}.md"


def public_names(module: str) -> list[str]:
    """Return the names in a module's ``__all__``, sorted, without those that ``hookline.engine`` has of the hooks."""
    if module == "hookline":
        return ["Trainer"]
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path if path.parts[len(ROOT.parts)] in FOLDERS else ROOT / "src" / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return sorted(set(names) - {"hooks"}, key=str.lower)


def reference(module: str) -> str:
    """Return the page of a module."""
    lines = [f"# {module}", ""]
    if module == "hookline.engine":
        lines += ["Also has every name of [hookline.hooks](hooks.md).", ""]
    for name in public_names(module):
        full = f"{module}.{name}"
        if full in ELSEWHERE:
            lines += [f"### {name} {{#{full}}}", "", f"The same as `{ELSEWHERE[full]}`.", ""]
        else:
            lines += [f"::: {full}", ""]
    return "\n".join(lines)


def reference_index() -> str:
    """Return the list of all public names."""
    lines = ["# Public names", "", "Import them from the module that lists them.", ""]
    for module in MODULES:
        page = posixpath.basename(reference_page(module))
        names = [f"[`{name}`]({page}#{module}.{name})" for name in public_names(module)]
        lines += [f"## {module}", "", " · ".join(names), ""]
    return "\n".join(lines)
