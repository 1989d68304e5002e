"""Config files: YAML with ``_BASE_``, safe, without duplicate keys, with numbers such as 1e-05; and overrides."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import IO, Any

import yaml

from .errors import ConfigError, misspelt, suggest_file
from .values import MISSING, ObjectName, literal

BASE_KEY = "_BASE_"

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_LITERAL_TAG = "!literal"
# YAML 1.1 floats need a point and a signed exponent; Python writes 1e-05, people write 1e5.
_EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

# Unquoted, these are Python's literals, as in yacs: (1, 2); 1, 2; None.
_LITERAL = re.compile(r"\(.*\)$|[-+.\d].*,.*$|None$")
_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != _TIMESTAMP_TAG]  # dates are text
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = dict(_RESOLVERS)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.composer.ComposerError(None, None, f"the key '{key.value}' appears twice", key.start_mark)
            seen.add(name)
        return node


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    yaml_implicit_resolvers = dict(_RESOLVERS)


_Loader.add_constructor(_LITERAL_TAG, lambda _, node: literal(node.value))
_Dumper.add_representer(ObjectName, lambda dumper, name: dumper.represent_str(str(name)))
for _class in (_Loader, _Dumper):  # the dumper quotes text that would be read as something else
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))
    _class.add_implicit_resolver(_LITERAL_TAG, _LITERAL, list("(N-+.0123456789"))


def load_text(text: str, source: str) -> dict[Any, Any]:
    """Parse YAML text with a mapping. Unquoted, tuples and None are Python's, as in yacs.

    Args:
        text: the YAML; empty text is an empty mapping.
        source: the file's name, for error messages.

    Raises:
        ConfigError: it is not YAML or not a mapping, has a duplicate key, or has a tag other than plain data. The
            message starts with file and line.
    """
    try:
        loaded = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "text" if isinstance(loaded, str) else f"a {type(loaded).__name__}"
        raise ConfigError(f"{source}: a config file holds a mapping of keys, such as SEED: 1, not {kind}")
    return loaded


def dump_text(data: Mapping[str, object], **kwargs: Any) -> str:
    """Write plain data as YAML that :func:`load_text` reads back.

    Args:
        data: nested dicts. Tuples become lists.
        kwargs: options of ``yaml.dump``.

    Returns:
        The YAML text.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 2**31 - 1}
    return yaml.dump(data, Dumper=_Dumper, **{**options, **kwargs})


def load_layers(
    filename: str | os.PathLike[str], opener: Callable[[str], IO[str]], chain: tuple[str, ...] = ()
) -> list[tuple[str, dict[Any, Any]]]:
    """Read a config file and the files in its ``_BASE_``.

    Args:
        filename: a path (``~`` is the home folder), the folder of a run, a URI that ``opener`` knows, or the name of an
            example, which is looked for if there is no such file.
        opener: opens a file by its name.
        chain: the files whose ``_BASE_`` led here, outermost first.

    Returns:
        Pairs of file name and mapping (without ``_BASE_``), in the order of merging.

    Raises:
        ConfigError: a file is missing or bad, or bases form a circle.
    """
    name, origin = os.fspath(filename), f" ({BASE_KEY} of {chain[-1]})" if chain else ""
    if not _is_uri(name):
        name = os.path.expanduser(name)
        name = name if chain else find_config(name)
        if os.path.isdir(name):  # of a run
            name = os.path.join(name, "config.yaml")
    if name.endswith(".py"):
        raise ConfigError(f"{name}: configs are YAML; a Python file is not executed")
    if name in chain:
        raise ConfigError(f"{BASE_KEY} forms a circle: {' -> '.join((*chain, name))}")
    try:
        with opener(name) as file:
            mapping = load_text(file.read(), name)
    except (OSError, UnicodeDecodeError) as error:
        reason, near = getattr(error, "strerror", None) or str(error), ""
        if isinstance(error, FileNotFoundError) and not _is_uri(name):
            example = misspelt(name, example_names())
            near = suggest_file(name) or (f"; did you mean '{example}'?" if example else "")
        raise ConfigError(f"{name}: cannot read this config file: {reason}{origin}{near}") from error
    named = mapping.pop(BASE_KEY, [])
    bases = named if isinstance(named, list) else [named]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{name}: {BASE_KEY} is a file's name, or a list of them, not {named!r}")
    layers = [layer for base in bases for layer in load_layers(_beside(name, base), opener, (*chain, name))]
    return [*layers, (name, mapping)]


def _beside(name: str, base: str) -> str:
    """The path of a base, relative to the file that names it. If there is no such file, the example of that name."""
    if _is_uri(base) or base.startswith("~"):
        return base
    path = os.path.normpath(os.path.join(os.path.dirname(name), base))
    return path if os.path.exists(path) else find_example(base) or path


def _is_uri(name: str) -> bool:
    return "://" in name


# ---------------------------------------------------------------------- the examples, installed as hookline/configs


def find_config(name: str) -> str:
    """Return the path of a config file: ``name`` if it exists, or the example of that name, or ``name``."""
    return name if os.path.exists(name) else find_example(name) or name


def find_example(name: str) -> str:
    """Return the path of an example config, such as "digits/mlp.yaml" or "configs/digits/mlp.yaml"; empty if none."""
    parts = name.removeprefix("configs/").split("/")
    if len(parts) < 2 or ".." in parts or "" in parts:
        return ""
    path = os.path.join(_examples(), *parts)
    return path if os.path.isfile(path) else ""


def example_names() -> list[str]:
    """Return the names of the examples."""
    found = []
    for folder, _, files in os.walk(_examples()):
        parts = os.path.relpath(folder, _examples()).split(os.sep)
        found += ["/".join([*parts, file]) for file in files if file.endswith(".yaml") and parts != ["."]]
    return sorted(found)


def _examples() -> str:
    spec = find_spec("hookline.configs")
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""


# ---------------------------------------------------------------------- overrides

_ASSIGNMENT = re.compile(r"[A-Za-z_][^\s=]*=")


def pairs_of(overrides: Sequence[object]) -> list[tuple[str, Any]]:
    """Split a list of overrides into pairs.

    Args:
        overrides: ``KEY, VALUE, ...`` or ``"KEY=VALUE"``, mixed.

    Returns:
        Pairs of full key and value.

    Raises:
        ConfigError: a key is not a string, or the last one has no value.
    """
    pairs: list[tuple[str, Any]] = []
    tokens = iter(overrides)
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(f"command line: expected a key, got {token!r}; give pairs KEY VALUE, or KEY=VALUE")
        key, value = token.split("=", 1) if _ASSIGNMENT.match(token) else (token, next(tokens, MISSING))
        if key.endswith((".yaml", ".yml")):
            raise ConfigError(f"command line: '{key}' is a file: write --config-file {key}")
        if value is MISSING:
            raise ConfigError(f"command line: '{key}' at the end has no value; give pairs KEY VALUE, or KEY=VALUE")
        pairs.append((key, value))
    return pairs
