"""Read and write YAML: safe, without duplicate keys, with numbers such as 1e-05; and merge values into a config.

All problems of a merge are reported together; the config is then unchanged.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO, Any

import yaml

from .errors import ConfigError, UnknownKeyError, misspelt, suggest, suggest_file
from .other_names import hint_of_epochs, key_for
from .registry import args_key
from .values import MISSING, ObjectName, Plain, coerce, literal

logger = logging.getLogger(__name__)

BASE_KEY = "_BASE_"

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

# A limit far above any real config.
_MAX_BYTES = 2**20


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


_Loader.add_constructor(_STR_TAG, _Loader.construct_text)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    yaml_implicit_resolvers = dict(_RESOLVERS)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Text that looks like a literal, such as "None", needs quotes.
        value = literal(data)
        is_literal = not isinstance(value, str) or value != data
        return self.represent_scalar(_STR_TAG, str(data), style="'" if is_literal else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(ObjectName, _Dumper.represent_text)
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
        data: nested dicts. Tuples become lists.
        kwargs: options of ``yaml.dump``.

    Returns:
        The YAML text.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 2**31 - 1}
    return yaml.dump(data, Dumper=_Dumper, **{**options, **kwargs})


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
    name, in_folder = os.fspath(filename), False
    if not _URI.match(name):
        name = os.path.expanduser(name)
        name = name if chain else find_config(name)
        if in_folder := os.path.isdir(name):  # of a run
            name = os.path.join(name, "config.yaml")
    if name.lower().endswith((".py", ".pyc")):
        raise ConfigError(f"{name}: configs are YAML; a Python file is not executed")
    if _identity(name) in map(_identity, chain):
        raise ConfigError(f"{BASE_KEY} forms a circle: {' -> '.join((*chain, name))}")
    origin = f" ({BASE_KEY} of {chain[-1]})" if chain else ""
    if (chain or in_folder) and os.path.exists(name) and not os.path.isfile(name):  # opening a FIFO would wait
        raise ConfigError(f"{name}: is not a regular file{origin}")
    try:
        with opener(name) as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        missing = isinstance(error, FileNotFoundError) and not _URI.match(name)
        near = suggest_file(name) if missing else ""
        if missing and not near and (example := misspelt(name, example_names())):
            near = f"; did you mean '{example}'?"
        raise ConfigError(f"{name}: cannot read this config file: {reason}{origin}{near}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{name}: larger than {_MAX_BYTES >> 20} MB, the limit for config files")
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


# ---------------------------------------------------------------------- merging

_ASSIGNMENT = re.compile(r"[A-Za-z_][^\s=]*=")


class Merge:
    """Merges values into a tree, and collects the problems. See :func:`merging`.

    A new name of a component (see :mod:`~hookline.config.components`) clears its arguments, and so does ``ARGS: {}``.
    Names are therefore merged first within one mapping or list.

    Args:
        root: a :class:`~hookline.config.CfgNode`; full keys are relative to it.
        source: where the values come from, the prefix of messages. May change during the merge.
    """

    def __init__(self, root: Any, source: str = "") -> None:
        self.source = source
        self.problems: list[ConfigError] = []
        self._root = root

    def mapping(self, node: Any, values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> None:
        """Merge nested keys and values into a node of the tree; ``path`` are the parts of its full key."""
        for key in sorted(values, key=_names_first):
            self._item(node, key, values[key], path)

    def overrides(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Merge pairs of full key and value, in order, names of components first."""
        for full_key, value in sorted(pairs, key=lambda pair: _names_first(pair[0].rpartition(".")[2])):
            first, *rest = full_key.split(".")
            if "" in (first, *rest):
                self._fail(f"'{full_key}' is not a key")
                continue
            for name in reversed(rest):
                value = {name: value}
            self._item(self._root, first, value, ())

    def _item(self, node: Any, key: Any, value: Any, path: tuple[str, ...]) -> None:
        full_key = ".".join((*path, str(key)))
        if not isinstance(key, str):
            return self._fail(f"the key {full_key} is not a string; quote it")
        if key == BASE_KEY:
            return self._fail(f"{full_key} can only stand at the top of a file", UnknownKeyError)
        if not node.has(key):
            if self._is_outdated(full_key):
                return None
            if not node.is_new_allowed():
                return self._unknown(full_key, value)
        section, is_free = _as_section(value), node.takes_anything(key)
        if section is not None and node.is_section(key):
            if not section and key.endswith("ARGS") and node[key].is_new_allowed() and node[key]:
                node[key].clear()
            return self.mapping(node[key], section, (*path, key))
        if node.is_frozen():
            raise AttributeError(f"{full_key} cannot be merged: the config is frozen (defrost() it, or clone it first)")
        if section is not None and is_free:
            node.put(key, type(node)(new_allowed=True))
            return self.mapping(node[key], section, (*path, key))
        is_name = isinstance(value, str) and node.takes_name(key)
        if node.is_section(key) and not is_name and not is_free:
            if value is None:
                where = f"{self.source}: " if self.source else ""
                return logger.warning("%sthe section %s is empty, so it changes nothing", where, full_key)
            hint = f"; set {full_key}.NAME" if node[key].has("NAME") else ""
            if node[key].has("ENABLED"):
                number = type(value) is not bool and isinstance(value, int | float) and node[key].has("CLIP_VALUE")
                more = f', CLIP_TYPE: "norm", CLIP_VALUE: {value}' if number else ""
                hint = f"; set {full_key}: {{ENABLED: {value is not False}{more}}}"
            kind = "str" if isinstance(value, str) else type(value).__name__
            return self._fail(f"{full_key}: expected a mapping of keys, got {value!r} ({kind}){hint}")
        expected = object if is_free else str if is_name else type(node.get(key))
        try:
            value = coerce(value, node.declared(key), expected)
        except ConfigError as error:
            return self._fail(f"{full_key}: {error}")
        arguments = args_key(key)
        is_other = arguments and key in node and value != node[key]
        if is_other and node.is_section(arguments) and node[arguments].is_new_allowed():
            node[arguments].clear()
        node.put(key, value)

    def _unknown(self, full_key: str, value: Any) -> None:
        known = self._root.full_keys()
        if (
            full_key not in known and isinstance(value, Mapping) and len(value) == 1
        ):  # name the whole key of an override
            ((name, below),) = value.items()
            if not self._is_outdated(f"{full_key}.{name}"):
                self._unknown(f"{full_key}.{name}", below)
            return
        section, _, last = full_key.rpartition(".")
        ends = [key for key in known if section and key.startswith(f"{section}.") and key.endswith(f"_{last}")]
        other = key_for(full_key)
        if len(ends) == 1:  # LR means BASE_LR
            hint = f"; did you mean '{ends[0]}'?"
        elif other in known:
            hint = f"; did you mean '{other}'{hint_of_epochs(last)}?"
        else:
            hint = suggest(full_key, known)
        if full_key in known or (section in known and section.endswith("ARGS")):
            hint = "; write it nested, one section in the other"
        self._fail(f"unknown key '{full_key}'{hint}", UnknownKeyError)

    def _is_outdated(self, full_key: str) -> bool:
        """Whether a key is renamed (an error) or deprecated (a warning)."""
        state = vars(self._root)
        if new := state[self._root.RENAMED_KEYS].get(full_key):
            name, note = new if isinstance(new, tuple) else (new, "")
            self._fail(f"{full_key} was renamed to {name}" + (f": {note}" if note else ""), UnknownKeyError)
        elif full_key in state[self._root.DEPRECATED_KEYS]:
            logger.warning("The config key %s is deprecated: it is ignored.", full_key)
        else:
            return False
        return True

    def _fail(self, problem: str, kind: type[ConfigError] = ConfigError) -> None:
        self.problems.append(kind(f"{self.source}: {problem}" if self.source else problem))


@contextmanager
def merging(root: Any, source: str = "") -> Iterator[Merge]:
    """Merge into a tree, all or nothing.

    At the end of the block, all problems are raised together. After any error, the tree is as it was.
    """
    before = [(node, dict(node), node.declarations.copy()) for node in root.walk()]
    merge = Merge(root, source)
    try:
        yield merge
        if len(merge.problems) == 1:
            raise merge.problems[0]
        if merge.problems:
            all_unknown = all(isinstance(problem, UnknownKeyError) for problem in merge.problems)
            raise (UnknownKeyError if all_unknown else ConfigError)("\n".join(map(str, merge.problems)))
    except BaseException:
        for node, items, declarations in before:
            dict.clear(node)
            dict.update(node, items)
            node.declarations.clear()
            node.declarations.update(declarations)
        raise


def pairs_of(overrides: Sequence[Any]) -> list[tuple[str, Any]]:
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
        pairs.append((key, Plain(value) if isinstance(value, str) else value))
    return pairs


def _names_first(key: Any) -> bool:
    return not (isinstance(key, str) and args_key(key))


def _as_section(value: Any) -> Mapping[str, Any] | None:
    """The value as a mapping with string keys, or None. Text such as ``{a: 1}`` is parsed."""
    if type(value) is Plain and value.startswith("{"):
        value = literal(value)
    is_section = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return value if is_section else None
