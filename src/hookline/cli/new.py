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
    parser.add_argument("folder", metavar="FOLDER", help="the folder to create, which must be missing or empty")


def main(args: argparse.Namespace) -> None:
    """Copy the files, and print what to do next."""
    from hookline.config import ConfigError

    folder = Path(args.folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not an empty folder; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in TEMPLATES.iterdir() if path.suffix in (".py", ".yaml"))
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
