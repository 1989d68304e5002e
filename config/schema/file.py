"""The schema as a file of the package."""

import json
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["read_schema", "text_of"]

PATH = Path(__file__).with_name("hookline.schema.json")
_WIDTH = 240


@cache
def read_schema() -> dict[str, Any]:
    """Return the schema of the package: the keys of ``get_cfg()`` and the components of hookline itself."""
    schema: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return schema


def text_of(schema: Any, indent: str = "") -> str:
    """Return a schema as JSON, with a line for each part that fits on one."""
    line = json.dumps(schema, ensure_ascii=False)
    if len(indent + line) <= _WIDTH or not isinstance(schema, dict | list):
        return line
    deeper = indent + " "
    if isinstance(schema, dict):
        parts = [f"{json.dumps(key)}: {text_of(value, deeper)}" for key, value in schema.items()]
    else:
        parts = [text_of(value, deeper) for value in schema]
    first, last = ("{", "}") if isinstance(schema, dict) else ("[", "]")
    return f"{first}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{last}" + ("" if indent else "\n")
