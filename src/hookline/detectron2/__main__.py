"""Runs a script that imports detectron2: ``python -m hookline.detectron2 train_net.py --config-file …``."""

import os
import sys
from importlib.util import find_spec
from types import ModuleType

from .finder import installed_at
from .script import VARIABLE, run

USAGE = "usage: python -m hookline.detectron2 SCRIPT [ARGUMENTS]"


def main() -> None:
    """Make the script that the command line names the program."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{USAGE}\n\nRuns a script whose imports of detectron2 find hookline: see docs/porting/detectron2.md")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    path = os.path.abspath(sys.argv[1])
    if not os.path.isfile(path):
        _fail(f"{sys.argv[1]}: there is no such file. {USAGE}")
    sys.path[0] = os.path.dirname(path)  # as python SCRIPT does
    if installed := installed_at():
        _fail(
            f"detectron2 itself would be imported, from {installed}. Uninstall it (or rename the folder), or "
            "change the script's imports"
        )
    del sys.argv[0]
    os.environ[VARIABLE] = path
    module = ModuleType("__main__")
    module.__spec__ = find_spec("hookline.detectron2.script")  # new processes import this, not only the script
    sys.modules["__main__"] = module
    run(path, module.__dict__)


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
