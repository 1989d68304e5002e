"""The command ``hookline``: one module per subcommand, imported when the subcommand runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import hookline
from hookline.command_line import ArgumentParser

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS = {
    "train": "train",
    "eval": "eval",
    "predict": "predict",
    "export": "export",
    "inspect": "inspect",
    "plot": "plot",
    "compare": "compare",
    "replay": "replay",
    "samples": "samples",
    "diverge": "diverge",
    "config": "config",
    "tokenize": "tokenize",
    "check-data": "check_data",
    "find-lr": "find_lr",
    "find-batch-size": "find_batch_size",
    "new": "new",
    "completion": "completion",
}
"""Subcommands, and the names of their modules."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    Args:
        arguments: the command line without the program's name. Default: ``sys.argv[1:]``.

    Raises:
        SystemExit: as for any command line: ``--help``, a wrong option, an error that ends the run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"hookline {hookline.__version__}")
        return 0
    if words[0] not in COMMANDS:
        from hookline.config import suggest

        what = "option" if words[0].startswith("-") else "command"
        hint = suggest(words[0], COMMANDS) or "; hookline --help lists the commands"
        sys.stderr.write(f"error: unknown {what} '{words[0]}'{hint}\n")
        return 2
    module = _module(words[0])
    args = parser_of(words[0], module).parse_args(words[1:])
    try:
        code = module.main(args) or 0
        sys.stdout.flush()
        return code
    except ValueError as error:
        from hookline.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # the output is piped into a program that has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return 1


def parser_of(command: str, module: ModuleType | None = None) -> argparse.ArgumentParser:
    """Return the parser of a subcommand."""
    module = module or _module(command)
    parser = ArgumentParser(
        prog=f"hookline {command}",
        description=module.__doc__,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    words = [_usage(action) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])  # short, so that the help fits a screen
    return parser


def _usage(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _module(command: str) -> ModuleType:
    return import_module(f"{__name__}.{COMMANDS[command]}")


def _overview() -> str:
    lines = ["usage: hookline COMMAND [OPTIONS]", ""]
    for command in COMMANDS:
        lines.append(f"  {command:<16}  {(_module(command).__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "hookline COMMAND --help shows the options of a command and an example."])
