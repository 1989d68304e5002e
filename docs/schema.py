"""Writes what is made from config/defaults.py: the JSON schema of config files, and the types of keys for editors.

    python docs/schema.py            # rewrite both files
    python docs/schema.py --check    # exit with 1 if one of them is out of date

Run it after a change of a key, or of a registered component's signature or docstring.
"""

import inspect
from pathlib import Path

from written import write_or_check

from hookline.config import defaults, get_cfg
from hookline.config.schema.comments import key_comments
from hookline.config.schema.file import text_of
from hookline.config.schema.stub import stub_of
from hookline.engine.setup.schema import schema_of_configs

CONFIG = Path(__file__).resolve().parents[1] / "config"


def files() -> dict[Path, str]:
    """Return what each file should be."""
    comments = key_comments(inspect.getsource(defaults))
    return {
        CONFIG / "schema" / "hookline.schema.json": text_of(schema_of_configs()),
        CONFIG / "defaults.pyi": stub_of(get_cfg(), comments),
    }


if __name__ == "__main__":
    write_or_check(files())
