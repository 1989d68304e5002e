"""Shows docstrings on the site: their reStructuredText becomes Markdown."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Turns roles (``:class:`HookBase```) into code, and ``::`` before a block into a colon."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?<=\S)::$", ":", text, flags=re.MULTILINE)
