"""Names of a module that are imported from others when they are used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["imported_when_used"]


def imported_when_used(module_name: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module or package (PEP 562).

    Args:
        module_name: its name.
        modules: by name of an attribute, the module that has it, such as ``".weights.ema"``.
    """

    def get(name: str) -> Any:
        module = sys.modules[module_name]
        if name not in modules:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], module.__package__), name)
        setattr(module, name, value)
        return value

    return get
