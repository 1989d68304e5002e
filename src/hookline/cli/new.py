"""Write a project to start from.

Five files: a config, a model, data, a hook and a test. It trains at once.
"""

import argparse
import shlex
from pathlib import Path

EXAMPLE = "hookline new my_project"

TEMPLATES = Path(__file__).parent / "project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder, which is created if it is missing")


def main(args: argparse.Namespace) -> None:
    """Copy the files, and print what to do next."""
    from hookline.config import ConfigError

    folder = Path(args.folder)
    try:
        names = sorted(path.name for path in TEMPLATES.iterdir() if path.suffix in (".py", ".yaml"))
        if there := [name for name in names if (folder / name).exists()]:
            raise ConfigError(f"{folder / there[0]}: exists, and no file is replaced; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).write_bytes((TEMPLATES / name).read_bytes())
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{args.folder!r}: cannot be written: {getattr(error, 'strerror', '') or error}") from error
    print(
        f"Wrote {', '.join(names)} into {folder}. Next:\n\n"
        f"  cd {shlex.quote(str(folder))}\n  hookline train --config-file config.yaml\n  python -m pytest"
    )
