"""The example configs that are installed with the package, as ``hookline/configs``."""

import os
from importlib.util import find_spec

__all__ = ["example_names", "find_config", "find_example"]


def find_config(name: str) -> str:
    """Return the path of a config file: ``name`` if it exists, or the example of that name, or ``name``."""
    return name if os.path.exists(name) else find_example(name) or name


def find_example(name: str) -> str:
    """Return the path of an example config, such as "digits/mlp.yaml" or "configs/digits/mlp.yaml"; empty if none."""
    parts = name.split("/")
    if parts[0] == "configs":
        parts = parts[1:]
    if len(parts) < 2 or ".." in parts or "" in parts:
        return ""
    path = os.path.join(_folder(), *parts)
    return path if os.path.isfile(path) else ""


def example_names() -> list[str]:
    """Return the names of the examples."""
    found = []
    for folder, _, files in os.walk(_folder()):
        parts = os.path.relpath(folder, _folder()).split(os.sep)
        found += ["/".join([*parts, file]) for file in files if file.endswith(".yaml") and parts != ["."]]
    return sorted(found)


def _folder() -> str:
    spec = find_spec("hookline.configs")
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""
