"""What the programs share that write a part of the documentation."""

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(files: Mapping[Path, str]) -> None:
    """Write the files that are out of date. With ``--check`` name them and exit with 1."""
    old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(path.name for path in old)
        sys.exit(f"out of date: {names}; run: python docs/{Path(sys.argv[0]).name}" if old else 0)
    for path in old:
        path.write_text(files[path])
