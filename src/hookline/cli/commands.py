"""The subcommands of ``hookline``: a function each, whose docstring is its help.

They import torch only when they run, since that takes seconds.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

from hookline.command_line import PROCESSES, ArgumentParser, add_options

__all__ = ["COMMANDS", "parser_of"]

TEMPLATES = Path(__file__).parent / "project"

_Add = Callable[[Any], Any]
_Run = Callable[[argparse.Namespace], int | None]


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        help: what it does. The first line is in the overview.
        example: command lines.
        add_arguments: adds its arguments to a parser.
        run: runs it, and may return an exit code.
        torch: whether it needs torch, which takes seconds to import.
    """

    help: str
    example: str
    add_arguments: _Add
    run: _Run
    torch: bool


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
    command.add_arguments(parser)
    forms = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    positional = [action for action in parser._actions if not action.option_strings]
    words = [forms.get(str(action.nargs), "{}").format(action.metavar or action.dest) for action in positional]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])  # short, so that the help fits a screen
    return parser


def _command(example: str, *arguments: str | _Add, torch: bool = True) -> Callable[[_Run], _Run]:
    """Add a function to the commands. ``arguments``: options of every command line by name, and others."""

    def add_arguments(parser: Any) -> None:
        for one in arguments:
            if isinstance(one, str):
                add_options(parser, one)
            else:
                one(parser)

    def add(run: _Run) -> _Run:
        name = run.__name__.replace("_", "-")
        COMMANDS[name] = Command(cleandoc(run.__doc__ or ""), example, add_arguments, run, torch)
        return run

    return add


def _arg(*names: str, **options: Any) -> _Add:
    return lambda parser: parser.add_argument(*names, **options)


def _one_of(*arguments: _Add, required: bool = False) -> _Add:
    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for one in arguments:
            one(group)

    return add


_RUN = _arg("run", metavar="RUN", help="the folder of a run")
_RUNS = "folders of runs, or folders that contain some"


@_command(
    """hookline train --config-file digits/convnet.yaml SOLVER.BASE_LR 0.01
  torchrun --nproc-per-node 2 -m hookline train --config-file digits/mlp.yaml""",
    *("config_file", "trainer", "resume", "dry_run", "fast_dev_run", *PROCESSES, "opts"),
)
def train(args: argparse.Namespace) -> None:
    """Train the model that a config describes."""
    from hookline.engine.program.run import run_trainer

    run_trainer(args)


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


_FORMATS = ("safetensors", "pth", "torch-export")


@_command(
    """hookline export --checkpoint output/digits_mlp --output model.safetensors
  hookline export --checkpoint output/run --output model.pt2 --trust-config""",
    _arg("--checkpoint", required=True, metavar="PATH", help="a file, or a run's folder"),
    _arg("--output", required=True, metavar="FILE", help="file to write"),
    _arg("--weights", choices=("auto", "model", "averaged"), default="auto", metavar="W", help="auto, model, averaged"),
    _arg("--format", choices=_FORMATS, default="", metavar="F", help=f"{', '.join(_FORMATS)} (from the extension)"),
    _arg("--dtype", default="", metavar="DTYPE", help="float16, bfloat16, float32 or float64"),
    _one_of(
        _arg("--config-file", default="", metavar="FILE", help="for torch-export: the run's config"),
        _arg("--trust-config", action="store_true", help="for torch-export: use the run's config.yaml"),
    ),
    _arg("opts", nargs="*", metavar="KEY VALUE", help="for torch-export: config keys and values"),
)
def export(args: argparse.Namespace) -> None:
    """Export a trained model: its weights, or a whole program.

    A torch.export program is built from the model and data that a config names,
    which runs their code: config.yaml beside the checkpoint needs --trust-config.
    """
    from hookline.engine.program.export import describe, export

    print(describe(export(args)))


@_command(
    """hookline inspect output/digits_convnet
  hookline inspect output/first output/second""",
    _arg("checkpoint", metavar="PATH", help="a file, or a folder such as a run's"),
    _arg("other", nargs="?", metavar="OTHER", help="a second checkpoint to compare with"),
    _arg("--weights", choices=("model", "averaged"), default="model", help="which weights to compare"),
    _arg("--json", action="store_true", help="print JSON"),
)
def inspect(args: argparse.Namespace) -> int:
    """Verify a checkpoint and show its content, or compare two.

    Exit codes: 0: undamaged, or equal weights; 1: damaged, or different weights;
    2: bad input.
    """
    from hookline.engine.export.inspection import report

    whole, text = report(args.checkpoint, args.other, weights_from=args.weights, as_json=args.json)
    print(text)
    return 0 if whole else 1


@_command(
    'hookline plot output/digits_convnet --metrics loss "*/accuracy"',
    _arg("runs", nargs="*", metavar="RUN", help=_RUNS),
    _arg("--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: all)"),
    _arg("--x", choices=("iteration", "epoch"), default="iteration", help="the x axis"),
    _arg("--smoothing", type=float, default=0.0, metavar="W", help="weight of a running average, 0 to 1"),
    _arg("--log", action="store_true", help="logarithmic scale of the values"),
    _arg("--out", default="", metavar="FILE", help="an image, such as FILE.png (default: RUN/curves.png)"),
    _arg("--schedule", default="", metavar="CONFIG", help="the learning rate of a config; RUN is then KEY VALUE ..."),
    torch=False,
)
def plot(args: argparse.Namespace) -> None:
    """Plot the metrics of runs, or a learning rate schedule."""
    from hookline.runs import read_runs, write_curves

    out = args.out
    if args.schedule:
        from hookline.engine.program.schedule import schedule_of

        runs, out = [schedule_of(args.schedule, args.runs)], out or "schedule.png"
    else:
        runs = read_runs(args.runs)
    print(f"Wrote {write_curves(runs, out, args.metrics, axis=args.x, smoothing=args.smoothing, log=args.log)}")


@_command(
    "hookline compare output/sweep --sort digits_test/accuracy",
    _arg("runs", nargs="+", metavar="RUN", help=_RUNS),
    _arg("--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: evaluations, loss)"),
    _arg("--sort", default="", metavar="NAME", help="a metric, the best run first, or a key of the config"),
    _arg("--format", choices=("text", "csv", "markdown"), default="text", help="(default: text)"),
    torch=False,
)
def compare(args: argparse.Namespace) -> None:
    """Compare runs: config differences, final and best metrics."""
    from hookline.runs import compare_runs, read_runs

    table = compare_runs(read_runs(args.runs), args.metrics, args.sort)
    print({"text": table.text, "csv": table.csv, "markdown": table.markdown}[args.format](), end="")


@_command(
    "hookline replay output/digits_convnet --iter 410",
    _RUN,
    _arg("--iter", type=int, required=True, metavar="N", help="the step, as in metrics.json"),
    _arg("--trainer", default="", metavar="NAME", help="the run's trainer, as my_trainer:Trainer"),
    _arg("--ranks", type=int, default=0, metavar="R", help="number of processes (as the run had)"),
    _arg("--set", nargs="+", default=[], metavar="X", help="what if: KEY VALUE pairs of the config"),
    _arg("--hook", action="append", default=[], metavar="NAME", help="a hook that takes part, as module:Class"),
    _arg("--pdb", action="store_true", help="start Python's debugger before the step"),
    _arg("--profile", action="store_true", help="write a Chrome trace of the step"),
    _arg("--save", action="store_true", help="write weights, optimizer and batch before the update"),
)
def replay(args: argparse.Namespace) -> None:
    """Run a step of a run again, and report what happens in it.

    Starts from the newest checkpoint before the step, and writes RUN/replay_N/.
    """
    from hookline.engine.options import named_trainer
    from hookline.engine.replay.repeat import replay_in_ranks

    options = {"overrides": args.set, "debug": args.pdb, "profile": args.profile, "save": args.save}
    replay_in_ranks(args.run, args.iter, named_trainer(args.trainer), args.ranks, args.hook, **options)


@_command(
    "hookline samples output/digits_convnet --iter 410",
    _RUN,
    _one_of(
        _arg("--iter", type=int, metavar="N", help="print the indices of the samples in this step's batch"),
        _arg("--sample", type=int, metavar="I", help="print all steps that read this sample"),
        required=True,
    ),
)
def samples(args: argparse.Namespace) -> None:
    """Say which samples a step reads, or which steps read one.

    From the sampler alone: nothing is trained, and the step may be in the future.
    """
    from hookline.engine.replay.samples import each_iteration_of, samples_at

    for number in each_iteration_of(args.run, args.sample) if args.iter is None else samples_at(args.run, args.iter):
        print(number, flush=True)


@_command(
    "hookline diverge output/first output/second",
    _RUN,
    _arg("other", metavar="OTHER", help="the folder of the run to compare with"),
    _arg("--trainer", default="", metavar="NAME", help="the runs' trainer, as my_trainer:Trainer"),
    _arg("--no-replay", action="store_true", help="only compare the files"),
    _arg("--most", type=int, default=6, metavar="N", help="how many values of the step to show (6)"),
)
def diverge(args: argparse.Namespace) -> int:
    """Say where two runs differ first: the step, and what in it.

    If metrics differ, both runs are replayed. Writes nothing into their folders.
    Exit codes: 0: equal runs; 1: they differ; 2: bad input.
    """
    from hookline.engine.replay.diverge import diverge

    equal, text = diverge(args.run, args.other, trainer=args.trainer, replays=not args.no_replay, most=args.most)
    print(text)
    return 0 if equal else 1


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of each of the five tools."""
    tools = parser.add_subparsers(dest="tool", required=True, metavar="explain|diff|check|list|schema")
    explain = tools.add_parser("explain", help="what a key, a section or a component means")
    explain.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="such as SOLVER.BASE_LR, SOLVER, EMA; default: all"
    )
    diff = tools.add_parser("diff", help="the keys in which two configs differ, old → new")
    diff.add_argument("old", metavar="OLD", help="a config file, or the folder of a run")
    diff.add_argument("new", metavar="NEW", help="the other one")
    check = tools.add_parser("check", help="whether a run would accept a config; touches nothing")
    check.add_argument("config_file", metavar="FILE", help="a config file")
    check.add_argument("--full", action="store_true", help="also build data and model, as train --dry-run")
    add_options(check, "trainer")
    check.add_argument("opts", nargs="*", metavar="KEY VALUE", help="overrides, as of train")
    registries = tools.add_parser("list", help="registries, or the components of one")
    registries.add_argument("registry", nargs="?", metavar="REGISTRY", help="such as model or hook; default: all")
    schema = tools.add_parser("schema", help="the JSON schema of config files, for editors")
    schema.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="add the components that this module registers (may be repeated)",
    )


@_command("hookline config explain SOLVER.BASE_LR", _config_arguments, torch=False)
def config(args: argparse.Namespace) -> None:
    """Explain, compare and check configs."""
    width = min(shutil.get_terminal_size().columns, 120)
    if args.tool == "diff":
        from hookline.config.compare import differences, resolved

        print(differences(resolved(args.old), resolved(args.new)) or "The configs are equal.")
    elif args.tool == "check":
        _check_config(args)
    else:
        _describe_config(args, width)


def _describe_config(args: argparse.Namespace, width: int) -> None:
    from hookline.config import locate
    from hookline.engine.setup.schema import explain, list_components, list_registries, schema_of_configs

    if args.tool == "explain":
        print(explain(args.key, width))
    elif args.tool == "list":
        print(list_components(args.registry, width) if args.registry else list_registries(width))
    else:
        for module in args.modules:
            locate(f"{module}:__name__")
        print(json.dumps(schema_of_configs(), indent=1, ensure_ascii=False))


def _check_config(args: argparse.Namespace) -> None:
    from hookline.engine import check_config
    from hookline.engine.options import check_options, merge_options
    from hookline.engine.program.run import run_trainer

    if args.full or args.trainer:
        args.dry_run = True
        run_trainer(args)
        return
    cfg = merge_options(args)
    check_options(args, cfg)
    check_config(cfg)
    print(f"{args.config_file}: valid")


@_command(
    "hookline check-data --config-file digits/mlp.yaml DATALOADER.NUM_WORKERS 8",
    "config_file",
    _arg("--max", type=int, default=20, metavar="N", help="failing samples of a set to list (20)"),
    "opts",
)
def check_data(args: argparse.Namespace) -> int:
    """Read every sample of the data, and list those that fail."""
    from hookline.engine.options import merge_options
    from hookline.engine.program.check_data import check_all

    return check_all(merge_options(args), args.max)


@_command(
    "hookline find-lr --config-file digits/convnet.yaml --plot lr.png",
    "config_file",
    _arg("--min-lr", type=float, default=1e-7, metavar="LR", help="the first rate (%(default)s)"),
    _arg("--max-lr", type=float, default=10.0, metavar="LR", help="the last rate (%(default)s)"),
    _arg("--num-iter", type=int, default=100, metavar="N", help="number of steps (%(default)s)"),
    _arg("--plot", default="", metavar="FILE", help="draw the losses (needs matplotlib)"),
    "opts",
)
def find_lr(args: argparse.Namespace) -> None:
    """Suggest a learning rate, after some steps with rising rates.

    Nothing is written except the plot.
    """
    from hookline.engine.options import check_options, merge_options
    from hookline.engine.program.find import find_lr

    cfg = merge_options(args)
    check_options(args, cfg)
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
    if args.plot:
        sweep.plot(args.plot)


@_command(
    "hookline find-batch-size --config-file digits/mlp.yaml MODEL.DEVICE cuda",
    "config_file",
    _arg("--max-size", type=int, metavar="N", help="the largest size to try (number of samples)"),
    "opts",
)
def find_batch_size(args: argparse.Namespace) -> None:
    """Find the largest batch that fits into memory.

    Tries growing batches until a GPU is out of memory. For the CPU, limit the
    memory of the process first: ulimit -v KILOBYTES
    """
    from hookline.engine.options import check_options, merge_options
    from hookline.engine.program.find import find_batch_size

    cfg = merge_options(args)
    check_options(args, cfg)
    print(f"DATALOADER.BATCH_SIZE {find_batch_size(cfg, args.max_size)}")


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


@_command(
    """eval "$(hookline completion bash)"     # in ~/.bashrc; for zsh in ~/.zshrc""",
    _arg("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh"),
    torch=False,
)
def completion(args: argparse.Namespace) -> None:
    """Print what completes commands, options and keys in a shell."""
    from hookline.config import get_cfg

    options = {word for name in COMMANDS for word in parser_of(name)._option_string_actions if word.startswith("--")}
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(f'complete -o default -W "{" ".join([*COMMANDS, *sorted(options), *get_cfg().flatten()])}" hookline')
