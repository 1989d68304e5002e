"""Read and write YAML: safe, without duplicate keys, with numbers such as 1e-05."""

import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import IO, Any

import yaml

from .errors import ConfigError, suggest, suggest_file
from .examples import example_names, find_config, find_example
from .literals import Plain, literal, spell
from .objects import ObjectName

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


# Limits far above any real config. They stop a hostile file from taking minutes or all memory.
_MAX_BYTES = 2**20
_MAX_DEPTH = 100
_MAX_VALUES = 10**5
_MAX_FILES = 100


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = dict(_RESOLVERS)

    def construct_document(self, node: yaml.Node) -> Any:
        values, levels = _size(node, {})
        if values > _MAX_VALUES:
            raise ConfigError(f"more than {_MAX_VALUES} values; an alias (*name) counts as all its values")
        if levels > _MAX_DEPTH:
            raise RecursionError
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


def _size(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Count values and levels of a node, with its aliases expanded.

    A node inside itself counts as one value: PyYAML refuses it later.
    """
    if node not in known:
        known[node] = (1, 1)
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        sizes = [_size(part, known) for part in parts]
        known[node] = (1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0))
    return known[node]


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
        The mapping; its unquoted strings are :class:`~hookline.config.literals.Plain`.

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
        raise ConfigError(f"{source}: nested more than {_MAX_DEPTH} levels deep; write it flatter") from None
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
    too_many = ConfigError(f"{name}: {BASE_KEY} leads to more than {_MAX_FILES} files; merge some of them into one")
    if len(chain) > _MAX_FILES:
        raise too_many
    if _identity(name) in map(_identity, chain):
        raise ConfigError(f"{BASE_KEY} forms a circle: {' -> '.join((*chain, name))}")
    try:
        _check_readable(name)
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
    if BASE_KEY not in mapping:
        return [(name, mapping)]
    named = mapping.pop(BASE_KEY)
    bases = named if isinstance(named, list) else [named]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{name}: {BASE_KEY} is a file's name, or a list of them, not {named!r}")
    layers = []
    for base in bases:
        layers += load_layers(_beside(name, str(base)), opener, (*chain, name))
        if len(layers) > _MAX_FILES:
            raise too_many
    return [*layers, (name, mapping)]


def _check_readable(name: str) -> None:
    """Refuse pipes and devices, whose reading may never end."""
    if _URI.match(name) or not os.path.exists(name):
        return  # open() raises the error
    mode = os.stat(name).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(f"it is a {'pipe' if stat.S_ISFIFO(mode) else 'device or socket'}, not a regular file")


def _beside(name: str, base: str) -> str:
    """The path of a base, relative to the file that names it. If there is no such file, the example of that name."""
    if _URI.match(base) or base.startswith("~") or os.path.isabs(base):
        return base
    path = os.path.join(os.path.dirname(name), base)
    return path if os.path.exists(path) else find_example(base) or path


def _identity(name: str) -> str:
    return name if _URI.match(name) else os.path.realpath(name)
