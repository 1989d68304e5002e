"""Whether a person types commands."""

import sys

__all__ = ["in_notebook", "is_session"]


def is_session() -> bool:
    """Return whether this is a notebook, IPython, Python's prompt, or a script of ``python -i``."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def in_notebook() -> bool:
    """Return whether this code runs in the kernel of a notebook, which shows more than text."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
