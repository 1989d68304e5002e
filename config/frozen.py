"""Lists of a frozen config, which cannot be changed in place."""

from typing import Any, NoReturn

from yaml.representer import Representer, SafeRepresenter

__all__ = ["FrozenList", "frozen", "thawed"]


class FrozenList(list[Any]):
    """A list that refuses changes. Copies of any kind, slices and pickled ones are plain lists.

    Args:
        values: the elements; lists among them are frozen, too.
        key: the config key that holds the list, for messages.
    """

    __slots__ = ("_key",)

    def __init__(self, values: list[Any], key: str) -> None:
        super().__init__(frozen(value, key) for value in values)
        self._key = key

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"the list {self._key} cannot be changed: the config is frozen. Copy it, list(cfg.{self._key}), or "
            "defrost() the config first"
        )

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:  # for copy, deepcopy and pickle
        return list, (thawed(self),)


def frozen(value: Any, key: str) -> Any:
    """Return a list as a :class:`FrozenList`, and any other value as it is. Lists in a tuple are frozen, too."""
    if type(value) is tuple and any(isinstance(item, list | tuple) for item in value):
        return tuple(frozen(item, key) for item in value)
    return FrozenList(value, key) if type(value) is list else value


def thawed(value: Any) -> Any:
    """Return a frozen list as a plain list; the inverse of :func:`frozen`."""
    if type(value) is FrozenList:
        return [thawed(item) for item in value]
    if type(value) is tuple and any(isinstance(item, list | tuple) for item in value):
        return tuple(map(thawed, value))
    return value


for _representer in (SafeRepresenter, Representer):
    _representer.add_representer(FrozenList, _representer.represent_list)
