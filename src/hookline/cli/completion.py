"""Print a script that completes commands and keys in a shell."""

import argparse

EXAMPLE = """eval "$(hookline completion bash)"     # in ~/.bashrc; for zsh in ~/.zshrc"""

_SCRIPT = """_hookline() {{
    local words keys="{keys}"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands} --help --version"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hookline hookline"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def main(args: argparse.Namespace) -> None:
    """Print the script. Words that it does not know are completed as files."""
    from hookline.config import get_cfg

    from . import COMMANDS, parser_of

    cases = []
    for command in COMMANDS:
        words: list[str] = []
        for action in parser_of(command)._actions:
            words += action.option_strings[-1:] or action.choices or []
            words += ["$keys"] if action.dest == "opts" else []
        cases.append(f'        {command}) words="{" ".join(words)}" ;;')
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    keys, commands = " ".join(get_cfg().flatten()), " ".join(COMMANDS)
    print(_SCRIPT.format(keys=keys, cases="\n".join(cases), commands=commands))
