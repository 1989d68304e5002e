"""Objects in the place of names: what Python code puts into a config, and a file cannot hold."""

import functools
import inspect
from typing import Any

from .errors import ConfigError
from .frozen import thawed

__all__ = ["ObjectName", "is_object_text", "kind_of", "refuse_object_text", "without_objects"]

_PREFIX = "<object "


class ObjectName(str):
    """A name in a config that holds the object it stands for. Its text, in files and logs, is ``<object module.Name>``.

    Copies of the config hold the same object.

    Args:
        value: a class or function, which is called like one that a config names; or the component itself.
        is_component: whether ``value`` is the component itself. Default: unless it is a class, function or partial.
    """

    value: Any
    is_component: bool

    def __new__(cls, value: Any, is_component: bool | None = None) -> "ObjectName":
        named = value.func if isinstance(value, functools.partial) else value
        if not (inspect.isclass(named) or inspect.isroutine(named)):
            named = type(named)
        module, name = getattr(named, "__module__", "?"), getattr(named, "__qualname__", type(named).__qualname__)
        self = super().__new__(cls, f"{_PREFIX}{module}.{name}>")
        self.value = value
        if is_component is None:
            is_component = not (
                inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)
            )
        self.is_component = is_component
        return self

    def __copy__(self) -> "ObjectName":
        return self

    def __deepcopy__(self, memo: Any) -> "ObjectName":
        return self

    def __reduce__(self) -> Any:
        return ObjectName, (self.value, self.is_component)

    def component(self, *_: Any) -> Any:
        """Return the component itself. Takes what its constructor would be given by position."""
        return self.value


def kind_of(target: Any) -> Any:
    """Return the class of a component that a config holds itself; any other target of a registry as it is."""
    name = getattr(target, "__self__", None)
    return type(name.value) if isinstance(name, ObjectName) else target


def without_objects(cfg: Any) -> Any:
    """Return a copy of a :class:`~hookline.config.CfgNode` with the texts of objects in place of the objects."""
    copied = cfg.clone()
    for node in copied.walk():
        dict.update(node, {key: _text_only(value) for key, value in node.items()})  # also in a frozen config
    return copied


def _text_only(value: Any) -> Any:
    if isinstance(value, ObjectName):
        return str(value)
    value = thawed(value)
    if type(value) is dict:
        return {key: _text_only(item) for key, item in value.items()}
    return type(value)(map(_text_only, value)) if type(value) in (list, tuple) else value


def is_object_text(name: str) -> bool:
    """Return whether a name is the text of an :class:`ObjectName`."""
    return name.startswith(_PREFIX)


def refuse_object_text(name: str, prefix: str) -> None:
    """Raise an error if a name is the text of an :class:`ObjectName`, as in the ``config.yaml`` of a run from Python.

    Args:
        name: the name.
        prefix: the beginning of the message.
    """
    if is_object_text(name):
        raise ConfigError(
            f"{prefix}{name} is an object that the Python script of this run passed to Trainer; a config file cannot "
            'hold it. Run that script, or name a class or function here, as "module:Name"'
        )
