"""Finds the modules of detectron2 in hookline: an import hook for the table in ``names.py``."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .names import HOMES, REFUSED, homes_of

__all__ = ["GUIDE", "describe", "install", "installed_at"]

GUIDE = "docs/porting/detectron2.md"


def install() -> None:
    """Let ``import detectron2`` find hookline, unless detectron2 is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def installed_at() -> str | None:
    """Return where detectron2 itself is, or None. A folder without ``__init__.py`` does not count."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find("detectron2", None) if find and not isinstance(finder, _Finder) else None
        if spec is not None and spec.origin is not None:
            return spec.origin
    return None


def describe(full: str) -> str:
    """Say why a name of detectron2, such as ``detectron2.structures.Boxes``, is not in hookline."""
    parts = full.split(".")
    for end in range(len(parts), 1, -1):  # the name itself, or the nearest module around it
        reason = REFUSED.get(".".join(parts[:end]))
        if reason:
            return f"{full} is not in hookline: {reason} (see {GUIDE})"
    module, _, name = full.rpartition(".")
    there = {*homes_of(module), *(key.rpartition(".")[2] for key in HOMES if key.rpartition(".")[0] == module)}
    near = difflib.get_close_matches(name, there, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{full} is not in hookline{hint} (see {GUIDE})"


class _Finder(Loader):
    """Finds aliases of detectron2's modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "detectron2" and not name.startswith("detectron2."):
            return None
        parent = name.rpartition(".")[0]
        if not isinstance(sys.modules.get(parent), _Alias) if parent else installed_at():
            return None  # detectron2 itself, or a module of it
        if name in HOMES:
            return ModuleSpec(name, self, is_package=True)
        # "from module import name" comes here for every name that the module has not
        raise ImportError(describe(name), name=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, f"Names of {spec.name} in hookline.")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = [name for name in homes_of(module.__name__) if not name.startswith("_")]


class _Alias(ModuleType):
    """A module whose names are in other modules. What is set here is set there."""

    def __getattr__(self, name: str) -> Any:
        home, full = homes_of(self.__name__).get(name), f"{self.__name__}.{name}"
        if home is None and full in HOMES:
            return importlib.import_module(full)  # detectron2's modules import each other
        if home is None:
            raise AttributeError(describe(full), name=name, obj=self)
        module, its_name = home
        return getattr(importlib.import_module(module), its_name)

    def __setattr__(self, name: str, value: Any) -> None:
        home = homes_of(self.__name__).get(name)
        if home is None or isinstance(value, _Alias):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(home[0]), home[1], value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *homes_of(self.__name__)})
