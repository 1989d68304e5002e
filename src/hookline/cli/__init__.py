"""The command ``hookline``."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import hookline
from hookline.command_line import config_errors_exit, slow_imports

from .commands import COMMANDS, parser_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    Args:
        arguments: the command line without the program's name. Default: ``sys.argv[1:]``.

    Raises:
        SystemExit: as for any command line: ``--help``, a wrong option, an error that ends the run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<16}  {command.help.splitlines()[0]}" for name, command in COMMANDS.items()]
        print("usage: hookline COMMAND [OPTIONS]", "", *lines, "", sep="\n")
        print("hookline COMMAND --help shows the options of a command and an example.")
        return 0
    if words[0] == "--version":
        print(f"hookline {hookline.__version__}")
        return 0
    if words[0] not in COMMANDS:
        from hookline.config import suggest

        what = "option" if words[0].startswith("-") else "command"
        hint = suggest(words[0], COMMANDS) or "; hookline --help lists the commands"
        print(f"error: unknown {what} '{words[0]}'{hint}", file=sys.stderr)
        return 2
    args = parser_of(words[0]).parse_args(words[1:])
    command = COMMANDS[words[0]]
    if command.torch:
        with slow_imports():
            import_module("hookline.engine")
    try:
        with config_errors_exit():
            code = command.run(args) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except BrokenPipeError:  # the output is piped into a program that has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return 1
