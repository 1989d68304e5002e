"""The subcommands of ``hookline``: a function each, whose docstring is its help.

They import torch only when they run, since that takes seconds.
"""

import argparse
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookline.configs
from hookline.command_line import PROCESSES, ArgumentParser, add_options

if TYPE_CHECKING:  # takes time
    from hookline.config import CfgNode

TEMPLATES = Path(hookline.configs.__file__).parent / "project"

_Run = Callable[[argparse.Namespace], int | None]
_Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        run: runs it, and may return an exit code. Its docstring is the help, whose first line is in the overview.
        example: command lines.
        arguments: names of options of all command lines, and what ``add_argument`` takes for others.
        torch: whether it needs torch, which takes seconds to import.
    """

    run: _Run
    example: str
    arguments: tuple[str | _Argument, ...]
    torch: bool

    @property
    def help(self) -> str:
        return cleandoc(self.run.__doc__ or "")


COMMANDS: dict[str, Command] = {}
"""The subcommands by name, in the order of the overview."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand."""
    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"hookline {name}",
        description=command.help,
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in command.arguments:
        if isinstance(one, str):
            add_options(parser, one)
        else:
            parser.add_argument(*one[0], **one[1])
    forms = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    positional = [action for action in parser._actions if not action.option_strings]
    words = [forms.get(str(action.nargs), "{}").format(action.metavar) for action in positional]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])  # short, so that the help fits a screen
    return parser


def _command(example: str, *arguments: str | _Argument, torch: bool = True) -> Callable[[_Run], _Run]:
    """Add a function to the commands."""

    def add(run: _Run) -> _Run:
        COMMANDS[run.__name__.replace("_", "-")] = Command(run, example, arguments, torch)
        return run

    return add


def _arg(*names: str, **options: Any) -> _Argument:
    return names, options


def _config(args: argparse.Namespace) -> "CfgNode":
    """Return the config of the options, with what a run needs."""
    from hookline.engine.program.options import check_options, merge_options

    cfg = merge_options(args)
    check_options(args, cfg)
    return cfg


_RUN = _arg("run", metavar="RUN", help="the folder of a run")
_ITER = _arg("--iter", type=int, required=True, metavar="N", help="the step, as in metrics.json")
_RUNS = "folders of runs, or folders that contain some"


@_command(
    """hookline train --config-file digits/convnet.yaml SOLVER.BASE_LR 0.01
  torchrun --nproc-per-node 2 -m hookline train --config-file digits/mlp.yaml""",
    *("config_file", "trainer", "resume", "dry_run", *PROCESSES, "opts"),
)
def train(args: argparse.Namespace) -> None:
    """Train the model that a config describes."""
    from hookline.engine import run
    from hookline.engine.program.options import named_trainer

    run(named_trainer(args.trainer), args)


@_command(
    "hookline eval --config-file digits/mlp.yaml MODEL.WEIGHTS path/to/model.pth",
    *("config_file", "trainer", "resume", *PROCESSES, "opts"),
)
def eval(args: argparse.Namespace) -> None:
    """Evaluate weights on the test sets of a config."""
    args.eval_only = True
    train(args)


@_command(
    "hookline predict --config-file digits/mlp.yaml MODEL.WEIGHTS path/to/model.pth",
    *("config_file", "trainer", "resume", *PROCESSES, "opts"),
)
def predict(args: argparse.Namespace) -> None:
    """Write the predictions of weights for a config's test sets."""
    args.predict = True
    train(args)


_FORMATS = ("safetensors", "pth", "torch-export", "onnx")


@_command(
    """hookline export --checkpoint output/digits_mlp --output model.safetensors
  hookline export --checkpoint output/run --output model.pt2 --trust-config""",
    _arg("--checkpoint", required=True, metavar="PATH", help="a file, or a run's folder"),
    _arg("--output", required=True, metavar="FILE", help="file to write"),
    _arg("--max-shard-size", default="", metavar="5GB", help="write a folder of safetensors files of this size"),
    _arg("--weights", choices=("auto", "model", "averaged"), default="auto", metavar="W", help="auto, model, averaged"),
    _arg("--format", choices=_FORMATS, default="", metavar="F", help=f"{', '.join(_FORMATS)} (or by extension)"),
    _arg("--config-file", default="", metavar="FILE", help="for a program: a config of yours"),
    _arg("--trust-config", action="store_true", help="for a program: use the run's config.yaml"),
    _arg("opts", nargs="*", metavar="KEY VALUE", help="for a program: config keys and values"),
)
def export(args: argparse.Namespace) -> None:
    """Export a trained model: its weights, or a whole program.

    A program of torch.export or ONNX is built from the model and data that a
    config names, which runs their code: config.yaml beside the checkpoint needs
    --trust-config.
    """
    from hookline.engine.program.export import export

    print(export(args))


@_command(
    "hookline inspect output/digits_convnet",
    _arg("checkpoint", metavar="PATH", help="a file, or a folder such as a run's"),
    _arg("--json", action="store_true", help="print JSON"),
)
def inspect(args: argparse.Namespace) -> int:
    """Verify a checkpoint, and show its content.

    Exit codes: 0: intact; 1: corrupt; 2: bad input.
    """
    from hookline.engine.program.inspection import report

    whole, text = report(args.checkpoint, as_json=args.json)
    print(text)
    return 0 if whole else 1


@_command(
    'hookline plot output/digits_convnet --metrics loss "*/accuracy"',
    _arg("runs", nargs="*", metavar="RUN", help=_RUNS),
    _arg("--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: all)"),
    _arg("--log", action="store_true", help="logarithmic scale of the values"),
    _arg("--out", default="", metavar="FILE", help="an image, such as FILE.png (default: RUN/curves.png)"),
    torch=False,
)
def plot(args: argparse.Namespace) -> None:
    """Plot the metrics of runs."""
    from hookline.runs import read_runs, write_curves

    print(f"Wrote {write_curves(read_runs(args.runs), args.out, args.metrics, log=args.log)}")


@_command(
    "hookline compare output/sweep --sort digits_test/accuracy",
    _arg("runs", nargs="+", metavar="RUN", help=_RUNS),
    _arg("--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: evaluations, loss)"),
    _arg("--sort", default="", metavar="NAME", help="a metric: the best run comes first"),
    _arg("--group", nargs="+", default=[], metavar="KEY", help="mean and deviation of runs that differ only in these"),
    _arg("--format", choices=("text", "csv"), default="text", help="(default: text)"),
    torch=False,
)
def compare(args: argparse.Namespace) -> None:
    """Compare runs: config differences, final and best metrics."""
    from hookline.runs import compare_runs, read_runs

    table = compare_runs(read_runs(args.runs), args.metrics, args.sort, args.group)
    print(table.csv() if args.format == "csv" else table.text(), end="")


@_command(
    "hookline replay output/digits_convnet --iter 410",
    _RUN,
    _ITER,
    "trainer",
    _arg("--set", nargs="+", default=[], metavar="X", help="what if: KEY VALUE pairs of the config"),
)
def replay(args: argparse.Namespace) -> None:
    """Run a step of a run again, and report what happens in it.

    Starts from the newest checkpoint before it. Writes RUN/replay_N/report.json.
    Runs the code of the parts that RUN/config.yaml names.
    """
    from hookline.engine.program.options import named_trainer
    from hookline.engine.program.repeat import replay_in_ranks

    replay_in_ranks(args.run, args.iter, named_trainer(args.trainer), overrides=args.set)


@_command(
    "hookline samples output/digits_convnet --iter 410",
    _RUN,
    _ITER,
)
def samples(args: argparse.Namespace) -> None:
    """Print the indices of the samples in the batch of a step.

    From the sampler alone: nothing is trained, and the step may be in the future.
    """
    from hookline.engine.program.samples import samples_at

    print(*samples_at(args.run, args.iter), sep="\n")


@_command(
    "hookline diverge output/first output/second",
    _RUN,
    _arg("other", metavar="OTHER", help="the folder of the run to compare with"),
    "trainer",
    _arg("--no-replay", action="store_true", help="only compare the files"),
    _arg("--most", type=int, default=6, metavar="N", help="how many values of the step to show (6)"),
)
def diverge(args: argparse.Namespace) -> int:
    """Say where two runs differ first: the step, and what in it.

    If metrics differ, both runs are replayed. Writes nothing into their folders.
    Exit codes: 0: equal runs; 1: they differ; 2: bad input.
    """
    from hookline.engine.program.diverge import diverge

    equal, text = diverge(args.run, args.other, trainer=args.trainer, replays=not args.no_replay, most=args.most)
    print(text)
    return 0 if equal else 1


@_command(
    "hookline config explain SOLVER.BASE_LR",
    _arg("tool", choices=("explain", "diff", "check"), metavar="TOOL", help="one of these three"),
    _arg("words", nargs="*", metavar="WORD", help="what the tool takes"),
    torch=False,
)
def config(args: argparse.Namespace) -> None:
    """Explain, compare and check configs.

    explain [KEY]                what a key, section or component means; all keys
    diff OLD NEW                 differences of two config files or runs
    check FILE [KEY VALUE ...]   whether a run would accept it; touches nothing
    """
    from hookline.config import ConfigError

    least = {"diff": 2, "check": 1}.get(args.tool, 0)
    if len(args.words) < least or (len(args.words) > max(least, 1) and args.tool != "check"):
        raise ConfigError(f"hookline config {args.tool}: wrong number of words; see hookline config --help")
    word = args.words[0] if args.words else ""
    if args.tool == "diff":
        from hookline.config.defaults import differences, resolved

        print(differences(*map(resolved, args.words)) or "The configs are equal.")
    elif args.tool == "check":
        from hookline.engine.setup.check import check_config

        args.config_file, *args.opts = args.words
        check_config(_config(args))
        print(f"{word}: valid")
    else:
        from hookline.cli.explain import explain

        print(explain(word))


@_command(
    "hookline check-data --config-file digits/mlp.yaml DATALOADER.NUM_WORKERS 8",
    "config_file",
    _arg("--max", type=int, default=20, metavar="N", help="failing samples of a set to list (20)"),
    "opts",
)
def check_data(args: argparse.Namespace) -> int:
    """Read every sample of the data, and list those that fail."""
    from hookline.cli.check_data import check_all
    from hookline.engine.program.options import merge_options

    return check_all(merge_options(args), args.max)


@_command(
    "hookline find-lr --config-file digits/convnet.yaml",
    "config_file",
    _arg("--min-lr", type=float, default=1e-7, metavar="LR", help="the first rate (%(default)s)"),
    _arg("--max-lr", type=float, default=10.0, metavar="LR", help="the last rate (%(default)s)"),
    _arg("--num-iter", type=int, default=100, metavar="N", help="number of steps (%(default)s)"),
    "opts",
)
def find_lr(args: argparse.Namespace) -> None:
    """Suggest a learning rate, after some steps with rising rates.

    Nothing is written.
    """
    from hookline.engine.program.find import find_lr

    cfg = _config(args)
    sweep = find_lr(cfg, args.min_lr, args.max_lr, args.num_iter)
    print(f"{'lr':>10}  {'loss':>10}  {'smoothed':>10}")
    rows = list(zip(sweep.lrs, sweep.losses, sweep.smoothed, strict=True))
    for row in rows[:: max(1, len(rows) // 20)]:
        print("  ".join(f"{value:10.4g}" for value in row))
    if sweep.suggestion is None:
        print("No suggestion: the loss did not fall. Try more steps (--num-iter) or another range")
    elif cfg.SOLVER.OPTIMIZERS:
        factor = sweep.suggestion / cfg.SOLVER.BASE_LR
        print(f"Suggestion: multiply SOLVER.BASE_LR and the BASE_LR of each optimizer by {factor:.3g}")
    else:
        print(f"Suggestion: SOLVER.BASE_LR {sweep.suggestion:.3g}")


@_command(
    "hookline find-batch-size --config-file digits/mlp.yaml MODEL.DEVICE cuda",
    "config_file",
    _arg("--max-size", type=int, metavar="N", help="the largest size to try (number of samples)"),
    "opts",
)
def find_batch_size(args: argparse.Namespace) -> None:
    """Find the largest batch that fits into memory.

    Tries growing batches until the GPU is out of memory.
    """
    from hookline.engine.program.find import find_batch_size

    print(f"DATALOADER.BATCH_SIZE {find_batch_size(_config(args), args.max_size)}")


@_command(
    "hookline new my_project",
    _arg("folder", metavar="FOLDER", help="the folder, which is created if it is missing"),
    torch=False,
)
def new(args: argparse.Namespace) -> None:
    """Write a project to start from.

    Five files: a config, a model, data, a hook and a test. It trains at once.
    """
    from hookline.config import ConfigError

    if not args.folder:
        raise ConfigError("FOLDER: is empty; name the folder of the project, such as my_project")
    folder = Path(args.folder)
    names = sorted(path.name for path in TEMPLATES.iterdir() if path.suffix in (".py", ".yaml"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := [name for name in names if (folder / name).exists()]:
            raise FileExistsError(f"{folder / there[0]} exists, and no file is replaced; choose another folder")
        for name in names:
            shutil.copyfile(TEMPLATES / name, folder / name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.folder!r}: cannot be written: {error}") from error
    print(
        f"Wrote {', '.join(names)} into {folder}. Next:\n\n"
        f"  cd {shlex.quote(str(folder))}\n  hookline train --config-file config.yaml\n  python -m pytest"
    )
