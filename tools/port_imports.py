#!/usr/bin/env python
"""Rewrite a project's imports of detectron2 to imports of hookline.

    python tools/port_imports.py path/to/project            # print the changes
    python tools/port_imports.py path/to/project --write    # apply them

Only import statements change, in files in UTF-8. What needs a hand is printed with file and line: names that hookline
does not have (the reasons are in docs/porting/detectron2.md), modules used by their full name, names of modules in
strings, and statements whose comments would move.

Exit codes: 0: everything can be ported (or is); 1: something needs a hand; 2: bad input.
"""

import argparse
import ast
import difflib
import os
import re
import sys
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
    """What is done in a file: edits as (start, end, new bytes), and lines that need a hand."""

    edits: list[tuple[int, int, bytes]] = field(default_factory=list)
    by_hand: list[tuple[int, str]] = field(default_factory=list)


# ---------------------------------------------------------------------- statements


def port(source: bytes) -> Report:
    """Find the edits of a file in UTF-8, and what needs a hand."""
    report, tree, starts = Report(), ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.stmt | ast.alias) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (
            node.end_col_offset or 0
        )

    uses = sorted({node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "detectron2"})
    modules: dict[str, str] = {}  # local name of a module → module of detectron2
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    new = _ported_module(alias, uses, modules)
                    if new.startswith("hookline"):
                        start = span(alias)[0]
                        report.edits.append((start, start + len(alias.name), new.encode()))
                    else:
                        report.by_hand.append((node.lineno, new))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module):
            start, end = span(node)
            before = source[starts[node.lineno - 1] : start]
            newline = b"\r\n" if b"\r\n" in source else b"\n"
            between = b"; " if before.strip() else newline + before
            _port_from(node, start, source[start:end], between, report, modules)
    _check_uses(tree, report, modules)
    report.by_hand.sort()
    return report


def _is_ours(name: object) -> bool:
    """Whether it is the name of a module of detectron2."""
    return isinstance(name, str) and re.fullmatch(r"detectron2(\.\w+)*", name) is not None


def _ported_module(alias: ast.alias, uses: list[int], modules: dict[str, str]) -> str:
    """Return the module of hookline for ``import module as name``, or why it needs a hand."""
    home = _home_of_module(alias.name)
    if alias.name not in HOMES:
        return describe(alias.name)
    if alias.asname is None:
        lines = f"lines {', '.join(map(str, uses))}" if uses else "no line"
        return f"import {alias.name}: 'detectron2' is used in {lines}"
    if home is None:
        return f"import {alias.name} as …: {_spread(alias.name)}"
    modules[alias.asname] = alias.name
    return home


def _port_from(
    node: ast.ImportFrom, start: int, text: bytes, between: bytes, report: Report, modules: dict[str, str]
) -> None:
    module = str(node.module)
    if module not in HOMES:
        report.by_hand.append((node.lineno, describe(module)))
        return
    groups: dict[str, list[str]] = {}  # module to import from → names, as they are written
    renamed = False
    for alias in node.names:
        home, name = _home_of(module, alias.name)
        submodule = f"{module}.{alias.name}"
        if home == module:
            why = (
                f"from {module} import {alias.name}: {_spread(submodule)}"
                if submodule in HOMES
                else describe(submodule)
            )
            report.by_hand.append((alias.lineno, why))
        elif submodule in HOMES:
            modules[alias.asname or alias.name] = submodule
        renamed = renamed or name != alias.name
        local = alias.asname or alias.name
        groups.setdefault(home, []).append(name if name == local else f"{name} as {local}")
    if set(groups) == {module}:
        return
    if len(groups) == 1 and not renamed:
        report.edits.append((start, start + len(text), text.replace(module.encode(), next(iter(groups)).encode(), 1)))
        return
    statements = [f"from {home} import {', '.join(names)}".encode() for home, names in groups.items()]
    if b"#" in text:
        needed = "; ".join(statement.decode() for statement in statements)
        report.by_hand.append((node.lineno, f"the comments stay where they are, so write this by hand: {needed}"))
        return
    report.edits.append((start, start + len(text), between.join(statements)))


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
            source = new = file.read_bytes()
            report = port(source) if b"detectron2" in source else Report()
            for start, end, edit in sorted(report.edits, reverse=True):
                new = new[:start] + edit + new[end:]
            text, after = source.decode(), new.decode()
            if args.write and report.edits:
                file.write_bytes(new)
        except (SyntaxError, ValueError, OSError) as error:
            line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or error
            by_hand.append(f"{file}:{line}: cannot be read or written: {why}")
            continue
        by_hand += [f"{file}:{line}: {what}" for line, what in report.by_hand]
        changed, imports = changed + bool(report.edits), imports + len(report.edits)
        if not args.write:
            lines = (part.splitlines(keepends=True) for part in (text, after))
            sys.stdout.writelines(difflib.unified_diff(*lines, str(file), str(file)))
    if by_hand:
        print("By hand:", *by_hand, sep="\n  ")
    done = "changed" if args.write else "to change (--write applies this)"
    print(f"{imports} imports in {changed} files {done}; {len(by_hand)} places need a hand")
    return 1 if by_hand else 0


if __name__ == "__main__":
    sys.exit(main())
