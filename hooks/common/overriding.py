"""How methods of subclasses use the methods that they override."""

import inspect
from types import FunctionType

__all__ = ["calls_base"]


def calls_base(own: FunctionType, owner: type, cls: type | None = None) -> bool:
    """Return whether the code of a method has ``super()``, or names a class that it inherits from.

    Calls that are hidden, for example in a helper, are not found.

    Args:
        own: the method.
        owner: the class that defines it.
        cls: the class whose method it is, if not ``owner``: a subclass of it.
    """
    order = (cls or owner).__mro__
    names = {"super", *(parent.__name__ for parent in order[order.index(owner) + 1 :])}
    code = inspect.unwrap(own).__code__
    return "__class__" in code.co_freevars or not names.isdisjoint(code.co_names)
