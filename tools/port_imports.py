#!/usr/bin/env python
"""Rewrite a project's imports of detectron2 to imports of hookline.

    python tools/port_imports.py path/to/project            # print the changes
    python tools/port_imports.py path/to/project --write    # apply them

Only import statements change. What needs a hand is printed with file and line: names that hookline does not have (the
reasons are in docs/porting/detectron2.md), modules used by their full name, names of modules in strings.

Exit codes: 0: everything can be ported (or is); 1: something needs a hand; 2: bad input.
"""

import argparse
import ast
import difflib
import io
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # detectron2 may be installed here
    from hookline.detectron2.finder import describe
    from hookline.detectron2.names import HOMES, homes_of

SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


@dataclass
class Report:
    """What is done in a file: edits as (start, end, text) in characters, and lines that need a hand."""

    edits: list[tuple[int, int, str]] = field(default_factory=list)
    by_hand: list[tuple[int, str]] = field(default_factory=list)


class Source:
    """The text of a file, and positions in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the position of a line (from 1) and a column in bytes, as nodes of ``ast`` have it."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.stmt | ast.alias) -> tuple[int, int]:
        """Return the start and the end of a node."""
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)


# ---------------------------------------------------------------------- statements


def port(text: str) -> Report:
    """Find the edits of a file, and what needs a hand."""
    report, source, tree = Report(), Source(text), ast.parse(text)
    uses = sorted({node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "detectron2"})
    modules: dict[str, str] = {}  # local name of a module → module of detectron2
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            _port_import(node, source, report, modules, uses)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module):
            _port_from(node, source, report, modules)
    _check_uses(tree, report, modules)
    report.by_hand.sort()
    return report


def _is_ours(name: object) -> bool:
    """Whether it is the name of a module of detectron2."""
    return isinstance(name, str) and re.fullmatch(r"detectron2(\.\w+)*", name) is not None


def _port_import(node: ast.Import, source: Source, report: Report, modules: dict[str, str], uses: list[int]) -> None:
    for alias in node.names:
        if not _is_ours(alias.name):
            continue
        home = _home_of_module(alias.name)
        if alias.name not in HOMES:
            report.by_hand.append((node.lineno, describe(alias.name)))
        elif alias.asname is None:
            lines = f"lines {', '.join(map(str, uses))}" if uses else "no line"
            report.by_hand.append((node.lineno, f"import {alias.name}: 'detectron2' is used in {lines}"))
        elif home is None:
            report.by_hand.append((node.lineno, f"import {alias.name} as …: {_spread(alias.name)}"))
        else:
            start = source.span(alias)[0]
            report.edits.append((start, start + len(alias.name), home))
            modules[alias.asname] = alias.name


def _port_from(node: ast.ImportFrom, source: Source, report: Report, modules: dict[str, str]) -> None:
    module = str(node.module)
    if module not in HOMES:
        report.by_hand.append((node.lineno, describe(module)))
        return
    groups: dict[str, list[tuple[ast.alias, str]]] = {}  # module to import from → names, as they are called there
    for alias in node.names:
        home, name = _home_of(module, alias.name)
        if home == module:
            submodule = f"{module}.{alias.name}"
            why = (
                f"from {module} import {alias.name}: {_spread(submodule)}"
                if submodule in HOMES
                else describe(submodule)
            )
            report.by_hand.append((alias.lineno, why))
        elif f"{module}.{alias.name}" in HOMES:
            modules[alias.asname or alias.name] = f"{module}.{alias.name}"
        groups.setdefault(home, []).append((alias, _written(alias, name)))
    if set(groups) == {module}:
        return
    start, end = source.span(node)
    if len(groups) > 1:
        report.edits.append((start, end, _split(node, source, groups)))
        return
    (home, names), at = next(iter(groups.items())), source.text.index(module, start)
    report.edits.append((at, at + len(module), home))
    for alias, name in names:
        if name != _written(alias, alias.name):
            report.edits.append((*source.span(alias), name))


def _home_of_module(module: str) -> str | None:
    """Return the module of hookline that has all names of a module, if there is one."""
    homes = list(HOMES.get(module, ()))
    return homes[0] if len(homes) == 1 else None


def _home_of(module: str, name: str) -> tuple[str, str]:
    """Return where to import a name from, and its name there; the module itself if it is not in hookline."""
    if name == "*":
        return _home_of_module(module) or module, name
    if name in homes_of(module):
        return homes_of(module)[name]
    home = _home_of_module(f"{module}.{name}")
    if home is None:
        return module, name
    parent, _, name = home.rpartition(".")
    return parent, name


def _spread(module: str) -> str:
    return f"its names are in {' and '.join(HOMES[module]) or 'no one module of hookline'}: import the names"


def _written(alias: ast.alias, name: str) -> str:
    local = alias.asname or alias.name
    return name if name == local else f"{name} as {local}"


def _split(node: ast.ImportFrom, source: Source, groups: dict[str, list[tuple[ast.alias, str]]]) -> str:
    """Write one statement for each module. Comments stay with their names."""
    start, end = source.span(node)
    indent = source.text[source.at(node.lineno, 0) : start]
    newline = ("\r\n" if "\r\n" in source.text else "\n") + indent
    if node.lineno == node.end_lineno:
        statements = [f"from {home} import {', '.join(name for _, name in names)}" for home, names in groups.items()]
        return ("; " if indent.strip() else newline).join(statements)
    comments = _comments(source.text[start:end], node)
    statements = []
    for home, names in groups.items():
        lines = ["  ".join([f"from {home} import (", *comments.pop(("beside", None), [])])]
        for alias, name in names:
            lines += [f"    {comment}" for comment in comments.get(("above", alias), [])]
            lines.append("  ".join([f"    {name},", *comments.get(("beside", alias), [])]))
        statements.append(lines)
    statements[-1] += [f"    {comment}" for comment in comments.get(("above", None), [])]
    return newline.join(newline.join([*lines, ")"]) for lines in statements)


def _comments(text: str, node: ast.ImportFrom) -> dict[tuple[str, ast.alias | None], list[str]]:
    """Return the comments above and beside each name, beside "import (", and above the closing bracket."""
    found: dict[tuple[str, ast.alias | None], list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0] + node.lineno - 1
        beside = [alias for alias in node.names if alias.end_lineno == line]
        below = [alias for alias in node.names if alias.lineno > line]
        if beside or line == node.lineno:
            place: tuple[str, ast.alias | None] = ("beside", beside[-1] if beside else None)
        else:
            place = ("above", below[0] if below else None)
        found.setdefault(place, []).append(token.string.strip())
    return found


# ---------------------------------------------------------------------- uses


def _check_uses(tree: ast.Module, report: Report, modules: dict[str, str]) -> None:
    """Report names used through a module that are not where the module is now, and names of modules in strings."""
    allowed = {id(text) for node in ast.walk(tree) for text in _docstring_or_logger(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            home, name = homes_of(module).get(node.attr, ("", ""))
            if not home:
                report.by_hand.append((node.lineno, describe(f"{module}.{node.attr}")))
            elif name != node.attr:
                report.by_hand.append((node.lineno, f"{module}.{node.attr} is {home}.{name}"))
        elif id(node) not in allowed and isinstance(node, ast.Constant) and _is_ours(node.value):
            report.by_hand.append((node.lineno, f"the string {node.value!r} names a module of detectron2"))


def _docstring_or_logger(node: ast.AST) -> list[ast.expr]:
    """Return the docstring of a definition, or the name of a logger: hookline logs what "detectron2" loggers get."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.body[0].value] if node.body and isinstance(node.body[0], ast.Expr) else []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger":
        return node.args
    return []


# ---------------------------------------------------------------------- files


def apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Return the text with the edits."""
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def python_files(path: Path) -> Iterator[Path]:
    """Yield a file, or the Python files of a folder, except those of environments and builds."""
    if path.is_file():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or a folder")
    parser.add_argument("--write", action="store_true", help="apply the changes")
    args = parser.parse_args()
    for path in args.paths:
        if not path.exists():
            sys.stderr.write(f"error: {path}: there is no such file or folder\n")
            return 2
    changed = imports = 0
    by_hand = []
    for file in (file for path in args.paths for file in python_files(path)):
        try:
            with tokenize.open(file) as opened:
                encoding = opened.encoding
            text = file.read_bytes().decode(encoding)
            report = port(text) if "detectron2" in text else Report()
            new = apply(text, report.edits)
            if args.write and report.edits:
                file.write_bytes(new.encode(encoding))
        except (SyntaxError, ValueError, OSError) as error:
            line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or error
            by_hand.append(f"{file}:{line}: cannot be read or written: {why}")
            continue
        by_hand += [f"{file}:{line}: {what}" for line, what in report.by_hand]
        changed, imports = changed + bool(report.edits), imports + len(report.edits)
        if not args.write:
            before, after = (part.splitlines(keepends=True) for part in (text, new))
            sys.stdout.writelines(difflib.unified_diff(before, after, str(file), str(file)))
    if by_hand:
        print("By hand:", *by_hand, sep="\n  ")
    done = "changed" if args.write else "to change (--write applies this)"
    print(f"{imports} imports in {changed} files {done}; {len(by_hand)} places need a hand")
    return 1 if by_hand else 0


if __name__ == "__main__":
    sys.exit(main())
