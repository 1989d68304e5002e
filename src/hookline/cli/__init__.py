"""The command ``hookline``. Its subcommands import what takes time when they run."""

import argparse
import os
import sys
from collections.abc import Sequence

import hookline
from hookline.command_line import ArgumentParser, slow_imports

from .commands import COMMANDS, Command

__all__ = ["COMMANDS", "main", "parser_of"]


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
    args = parser_of(words[0]).parse_args(words[1:])
    try:
        code = _run(COMMANDS[words[0]], args) or 0
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


def _run(command: Command, args: argparse.Namespace) -> int | None:
    if not command.torch:
        return command.run(args)
    with slow_imports():
        from hookline.engine import config_errors_exit
    with config_errors_exit():
        return command.run(args)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand."""
    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"hookline {name}",
        description=command.help,
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    words = [_usage(action) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])  # short, so that the help fits a screen
    return parser


def _usage(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _overview() -> str:
    lines = ["usage: hookline COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<16}  {command.help.splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "hookline COMMAND --help shows the options of a command and an example."])
