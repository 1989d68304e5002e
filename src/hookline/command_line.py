"""Command lines, and how a program ends by an error or a signal. Imports nothing that takes time."""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with detectron2's options and a few more. ``hookline.engine.run()`` handles all of them.

    A script may add an option with one of their names: then the option is the script's, and hookline ignores it.

    Args:
        epilog: text at the end of ``--help``. Default: examples.
    """
    parser = ArgumentParser(
        epilog=epilog or _EXAMPLES.format(prog=sys.argv[0]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    add_options(parser, "config_file", "resume", "eval_only", "predict", "replay", "samples", "dry_run")
    add_options(parser, *PROCESSES, "opts")
    # torch.distributed.launch adds it to the command line; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.ours = list(parser._actions)
    return parser


PROCESSES = ("num_gpus", "num_machines", "machine_rank", "dist_url")
"""The options for runs of several processes."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "config_file": {"default": "", "metavar": "FILE", "help": "YAML file of the run, or an example's name"},
    "trainer": {"default": "", "metavar": "NAME", "help": "your subclass of DefaultTrainer, as my_trainer:Trainer"},
    "resume": {
        **{"nargs": "?", "default": False, "type": lambda path: path or True, "metavar": "PATH"},
        "help": "resume from the last checkpoint in OUTPUT_DIR, or from a named one",
    },
    "eval_only": {"action": "store_true", "help": "evaluate MODEL.WEIGHTS on DATASETS.TEST and exit"},
    "predict": {"action": "store_true", "help": "write predictions of MODEL.WEIGHTS for DATASETS.TEST"},
    "replay": {"type": int, "metavar": "N", "help": "run step N of the run in OUTPUT_DIR again"},
    "samples": {"type": int, "metavar": "N", "help": "print the indices of the samples in that run's step N"},
    "dry_run": {"action": "store_true", "help": "print what a run would do, write nothing"},
    "num_gpus": {"type": int, "default": 1, "metavar": "N", "help": "processes per machine: one per GPU, or on CPU"},
    "num_machines": {"type": int, "default": 1, "metavar": "N", "help": "machines that train together"},
    "machine_rank": {"type": int, "default": 0, "metavar": "I", "help": "index of this machine, from 0"},
    "dist_url": {"default": "auto", "metavar": "URL", "help": "tcp://host:port of machine 0, for several machines"},
    "opts": {"nargs": "*", "metavar": "KEY VALUE", "help": "config keys and their values, as pairs"},
}


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add some of the options of :func:`default_argument_parser`, by their names in the parsed result."""
    for name in names:
        parser.add_argument(name if name == "opts" else f"--{name.replace('_', '-')}", **_OPTIONS[name])


class ArgumentParser(argparse.ArgumentParser):
    """Accepts options between and after the KEY VALUE pairs, and suggests the nearest option for an unknown one."""

    ours: Sequence[argparse.Action] = ()
    """The options of :func:`default_argument_parser`."""

    def error(self, message: str) -> NoReturn:
        from hookline.config import suggest
        from hookline.config.other_names import hint_of_epochs, key_for

        unknown = [word for word in message.split() if word.startswith("--")]
        hint = suggest(unknown[0], self._option_string_actions) if "unrecognized" in message and unknown else ""
        key = unknown[0].strip("-") if unknown and unknown[0].strip("-").isupper() else key_for((unknown or [""])[0])
        if key and "unrecognized" in message and "opts" in {action.dest for action in self._actions}:
            hint = f"; write config keys without dashes: {key} VALUE{hint_of_epochs(unknown[0])}"
            hint = suggest(key, [key]) if key.startswith("--") else hint
        self.exit(2, f"error: {message}{hint}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._words(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self._words(args), namespace)

    def _words(self, args: Any) -> Any:
        resume = self._option_string_actions.get("--resume")
        if resume is None or resume.nargs != "?":  # a script's own
            return args
        return _join_resume(sys.argv[1:] if args is None else list(args))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if namespace is not None or not self.ours:
            return self.parse_intermixed_args(args, namespace)
        parsed = self.parse_intermixed_args(args, Namespace())
        scripts = {action.dest for action in self._actions if action not in self.ours}
        parsed.ours = {action.dest for action in self.ours if action in self._actions} - scripts
        return parsed


def _join_resume(words: list[str]) -> list[str]:
    """Join ``--resume`` and a path behind it, which may also be the first of the KEY VALUE pairs."""
    joined: list[str] = []
    for word in words:
        is_path = word.endswith(".pth") or os.sep in word or (os.path.exists(word) and not word.isupper())
        if joined and joined[-1] == "--resume=" and is_path:
            joined[-1] += word
        else:
            joined.append("--resume=" if word in ("--res", "--resu", "--resum", "--resume") else word)
    return joined


class Namespace(argparse.Namespace):
    """What an :class:`ArgumentParser` has parsed."""

    __slots__ = ("handled", "ours")  # not in vars()

    ours: set[str]
    """The names of the options of :func:`default_argument_parser` that the script has not replaced."""
    handled: bool
    """Whether ``run()`` got them, which handles all options."""


@contextmanager
def slow_imports() -> Iterator[None]:
    """Import torch in this block, and all else that takes seconds, before ``run()``: stopped by signals, and quicker.

    In the block signals end the process with their exit codes (docs/errors.md).
    """
    with handling_signals(SIGINT=_exit(130), SIGTERM=_exit(75), SIGUSR1=_exit(75)), without_collecting():
        yield


@contextmanager
def without_collecting() -> Iterator[None]:
    """Collect no garbage in the block if torch is imported there, which is quicker.

    Later collections leave out what was imported: half a million objects.
    """
    collects = gc.isenabled() and "torch" not in sys.modules
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def _exit(code: int) -> Callable[..., None]:
    return lambda *_: os._exit(code)


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Turn a :class:`ConfigError` into its message and exit code, 2 or in training 1, and Ctrl-C into exit code 130.

    Before and after training, SIGTERM and SIGUSR1 exit with 75 ("start it again"); during training
    :class:`~hookline.hooks.SignalHandler` handles them. Earlier handlers are restored at the end.
    """
    from hookline.config.errors import ConfigError, error_text

    try:
        with handling_signals(SIGTERM=_start_again, SIGUSR1=_start_again, SIGINT=signal.default_int_handler):
            yield
    except ConfigError as error:
        # With torchrun, other ranks have the same error.
        if "MASTER_ADDR" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(error_text(error), end="", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _start_again(number: int, frame: object) -> NoReturn:
    name = signal.Signals(number).name
    os.write(2, f"{name}: saved checkpoints are intact; start again, with --resume if training had begun\n".encode())
    raise SystemExit(75)


@contextmanager
def handling_signals(**handlers: Any) -> Iterator[None]:
    """Handle signals, given by name, in the block. Those that are ignored (nohup, "&") stay ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name, handler in handlers.items():
            number = getattr(signal, name, None)  # not every system has it
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


_EXAMPLES = """examples:
  train:            {prog} --config-file configs/digits/convnet.yaml
  change some keys: {prog} --config-file configs/digits/convnet.yaml SOLVER.BASE_LR 0.01 SEED 7
  resume:           {prog} --config-file configs/digits/convnet.yaml --resume
  two processes:    {prog} --config-file configs/digits/convnet.yaml --num-gpus 2
                    torchrun --nproc-per-node 2 {prog} --config-file configs/digits/convnet.yaml
  evaluate:         {prog} --config-file configs/digits/convnet.yaml --eval-only MODEL.WEIGHTS path/to/model.pth
  predict:          {prog} --config-file configs/digits/convnet.yaml --predict MODEL.WEIGHTS path/to/model.pth
"""
