"""Read and write YAML: safe, without duplicate keys, with numbers such as 1e-05."""

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import IO, Any

import yaml

from .errors import ConfigError, suggest, suggest_file
from .values import ObjectName, Plain, literal, spell

BASE_KEY = "_BASE_"

# Folders of the config files that this process has read.
folders: set[str] = set()

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_STR_TAG = "tag:yaml.org,2002:str"
# YAML 1.1 floats need a point and a signed exponent; Python writes 1e-05, people write 1e5.
_EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != _TIMESTAMP_TAG]  # dates are text
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

# Limits far above any real config.
_MAX_BYTES = 2**20
_MAX_FILES = 100


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = dict(_RESOLVERS)

    def construct_document(self, node: yaml.Node) -> Any:
        self.deep_construct = True  # makes PyYAML refuse a node that contains itself
        return super().construct_document(node)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.composer.ComposerError(None, None, f"the key '{key.value}' appears twice", key.start_mark)
            seen.add(name)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        return {str(key) if isinstance(key, str) else key: value for key, value in mapping.items()}

    def construct_text(self, node: yaml.ScalarNode) -> str:
        return str(node.value) if node.style else Plain(node.value)

    def refuse(self, node: yaml.Node) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"the tag '{tag}' is not allowed: the values of a config are plain data",
            node.start_mark,
        )


_Loader.add_constructor(_STR_TAG, _Loader.construct_text)
_Loader.add_constructor(None, _Loader.refuse)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = dict(_RESOLVERS)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Text that looks like a literal, such as "None", needs quotes.
        is_literal = not isinstance(literal(data), str) or literal(data) != data
        return self.represent_scalar(_STR_TAG, data, style="'" if is_literal else None)

    def represent_literal(self, data: tuple[Any, ...]) -> yaml.ScalarNode:
        return self.represent_scalar(_STR_TAG, spell(data))


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(ObjectName, _Dumper.represent_text)
_Dumper.add_representer(tuple, _Dumper.represent_literal)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


def load_text(text: str, source: str) -> dict[Any, Any]:
    """Parse YAML text with a mapping.

    Args:
        text: the YAML; empty text is an empty mapping.
        source: the file's name, for error messages.

    Returns:
        The mapping; its unquoted strings are :class:`~hookline.config.values.Plain`.

    Raises:
        ConfigError: it is not YAML or not a mapping, has a duplicate key, or has a tag other than plain data. The
            message starts with file and line.
    """
    try:
        loaded = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = str(error.problem or error.context)
        tab = "; indent with spaces, not with a tab" if "'\\t'" in problem else ""
        raise ConfigError(f"{place}: {problem}{tab}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep; write it flatter") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "text" if isinstance(loaded, str) else f"a {type(loaded).__name__}"
        raise ConfigError(f"{source}: a config file holds a mapping of keys, such as SEED: 1, not {kind}")
    return loaded


def dump_text(data: Mapping[str, Any], **kwargs: Any) -> str:
    """Write plain data as YAML that :func:`load_text` reads back.

    Args:
        data: nested dicts. A tuple becomes an unquoted scalar, ``(1, 2)``, and is read as a tuple.
        kwargs: options of ``yaml.dump``. In flow style, tuples are quoted and become strings.

    Returns:
        The YAML text.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": float("inf")}
    return yaml.dump(data, Dumper=_Dumper, **{**options, **kwargs})


def refuse_python(filename: str) -> None:
    """Raise ConfigError for a Python file."""
    if filename.lower().endswith((".py", ".pyc")):
        raise ConfigError(f"{filename}: configs are YAML; a Python file is not executed")


def load_layers(
    filename: str | os.PathLike[str],
    opener: Callable[[str], IO[Any]],
    chain: tuple[str, ...] = (),
) -> list[tuple[str, dict[Any, Any]]]:
    """Read a config file and the files in its ``_BASE_``.

    Args:
        filename: a path (``~`` is the home folder), a URI that ``opener`` knows, or the name of an example, which is
            looked for if there is no such file.
        opener: opens a file by its name.
        chain: the files whose ``_BASE_`` led here, outermost first.

    Returns:
        Pairs of file name and mapping (without ``_BASE_``), in the order of merging.

    Raises:
        ConfigError: a file is missing or bad, or bases form a circle.
    """
    name = os.fspath(filename)
    if not _URI.match(name):
        name = os.path.expanduser(name)
        name = name if chain else find_config(name)
    refuse_python(name)
    if _identity(name) in map(_identity, chain):
        raise ConfigError(f"{BASE_KEY} forms a circle: {' -> '.join((*chain, name))}")
    if len(chain) > _MAX_FILES:
        raise ConfigError(f"{name}: {BASE_KEY} leads to more than {_MAX_FILES} files; merge some of them into one")
    try:
        with opener(name) as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        origin = f" ({BASE_KEY} of {chain[-1]})" if chain else ""
        missing = isinstance(error, FileNotFoundError) and not _URI.match(name)
        near = suggest_file(name) or suggest(name, example_names()) if missing else ""
        if isinstance(error, IsADirectoryError) and os.path.exists(os.path.join(name, "config.yaml")):
            near = f"; did you mean '{os.path.join(name, 'config.yaml')}'?"
        raise ConfigError(f"{name}: cannot read this config file: {reason}{origin}{near}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{name}: larger than {_MAX_BYTES >> 20} MB, the limit for config files")
    folders.add(os.path.dirname(name))
    mapping = load_text(text, name)
    named = mapping.pop(BASE_KEY, [])
    bases = named if isinstance(named, list) else [named]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{name}: {BASE_KEY} is a file's name, or a list of them, not {named!r}")
    layers = [layer for base in bases for layer in load_layers(_beside(name, str(base)), opener, (*chain, name))]
    return [*layers, (name, mapping)]


def _beside(name: str, base: str) -> str:
    """The path of a base, relative to the file that names it. If there is no such file, the example of that name."""
    if _URI.match(base) or base.startswith("~") or os.path.isabs(base):
        return base
    path = os.path.join(os.path.dirname(name), base)
    return path if os.path.exists(path) else find_example(base) or path


def _identity(name: str) -> str:
    return name if _URI.match(name) else os.path.realpath(name)


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
