"""Reads the imports of config/, hooks/ and engine/, for tests/test_architecture.py.

A room is a folder. The files at the root of ``hooks/`` and ``engine/`` are rooms of their own.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LAYERS = ("config", "hooks", "engine")


def modules() -> dict[str, Path]:
    """Return the file of every module, by its full name."""
    found = {}
    for path in sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("hookline", *parts)).removesuffix(".__init__")] = path
    return found


def imports() -> dict[str, set[str]]:
    """Return what every module imports of the others, imports inside of functions and for types included."""
    there = modules()
    found: dict[str, set[str]] = {}
    for name, path in there.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                base = ".".join(part for part in (base, node.module) if part)
                targets |= {full if (full := f"{base}.{alias.name}") in there else base for alias in node.names}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[name] = (targets & there.keys()) - {name}
    return found


def room(module: str) -> str:
    """Return the room of a module: ``engine/data``, ``engine/train_loop.py``; ``engine`` for its face."""
    path = modules_cached()[module].relative_to(ROOT)
    at_root = len(path.parts) == 2 and path.name != "__init__.py" and path.parts[0] != "config"
    return str(path if at_root else path.parent)


_modules: dict[str, Path] = {}


def modules_cached() -> dict[str, Path]:
    """Return :func:`modules`, read once."""
    if not _modules:
        _modules.update(modules())
    return _modules


def room_arrows() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    arrows: dict[str, set[str]] = {}
    for module, targets in imports().items():
        arrows.setdefault(room(module), set()).update(room(target) for target in targets)
    return {name: targets - {name} for name, targets in arrows.items()}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of names that reach each other."""
    reached = {name: _reach(arrows, name) for name in arrows}
    groups = {frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in arrows}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen
