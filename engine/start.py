"""The first second of a run: arguments, checks, folder, log, seed."""

import argparse
import logging
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch

import hookline

from ..config import CfgNode, ConfigError, Duration, suggest
from ..config.files import replace_file, replace_text
from ..hooks import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from ..hooks.guards import EXIT_AGAIN, EXIT_INTERRUPTED
from . import comm
from .agreement import refuse_other_configs
from .check import check_config
from .checkpoint.candidates import saved_config
from .launch import launched_by_torchrun, restarted
from .logger import close_logs, setup_logger
from .rank import tell_log_file
from .report import describe_config

__all__ = [
    "check_config",
    "choose_seed",
    "config_errors_exit",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "seed_all_rng",
    "unchanged_if_refused",
]

logger = logging.getLogger(__name__)

# What a run leaves in its folder, see set_aside.
_RUN_FILES = ("config.yaml", "log.txt", "metrics.json", "last_checkpoint", "events.out.tfevents", "inference")


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """The command line of the tools, with detectron2's options.

    Args:
        epilog: shown at the end of ``--help``; by default some examples.
    """
    parser = _ArgumentParser(
        epilog=epilog or _EXAMPLES.format(prog=sys.argv[0]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT_DIR")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS on DATASETS.TEST and stop")
    parser.add_argument("--predict", action="store_true", help="write what MODEL.WEIGHTS predicts for DATASETS.TEST")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be done, write nothing, and stop; runs the code that the config names",
    )
    parser.add_argument("--num-gpus", type=int, default=1, help="processes on each machine (one a GPU; or CPU cores)")
    parser.add_argument("--num-machines", type=int, default=1, help="machines that train together")
    parser.add_argument("--machine-rank", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--dist-url", default="auto", help="tcp://host:port of machine 0, for several machines")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    return parser


class _ArgumentParser(argparse.ArgumentParser):
    """Takes options between and after the pairs of keys and values, too, and suggests the one that was meant."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")]
        hint = suggest(unknown[0], self._option_string_actions) if "unrecognized" in message and unknown else ""
        self.exit(2, f"error: {message}{hint}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


_EXAMPLES = """examples:
  train:            {prog} --config-file configs/digits/convnet.yaml
  change some keys: {prog} --config-file configs/digits/convnet.yaml SOLVER.BASE_LR 0.01 SEED 7
  go on:            {prog} --config-file configs/digits/convnet.yaml --resume
  two processes:    {prog} --config-file configs/digits/convnet.yaml --num-gpus 2
                    torchrun --nproc-per-node 2 {prog} --config-file configs/digits/convnet.yaml
  evaluate:         {prog} --config-file configs/digits/convnet.yaml --eval-only MODEL.WEIGHTS path/to/model.pth
  predict:          {prog} --config-file configs/digits/convnet.yaml --predict MODEL.WEIGHTS path/to/model.pth
"""


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Within it a :class:`ConfigError` ends the program with its message and exit code 2, Ctrl-C with 130.

    SIGTERM and SIGUSR1 end it with 75 (start it again), wherever :class:`~hookline.hooks.SignalHandler` does not look
    after them: before training and after it. Handlers that a program has for the time of its imports, as
    ``tools/train_net.py`` does, are back in place after it.
    """
    try:
        with _signals_exit():
            yield
    except ConfigError as error:
        if not launched_by_torchrun() or os.environ["LOCAL_RANK"] == "0":  # the others of this machine say the same
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


@contextmanager
def _signals_exit() -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        os.write(2, f"{name}: what was saved is whole; run again, with --resume if training had begun\n".encode())
        raise SystemExit(EXIT_AGAIN)

    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers: dict[str, Any] = {"SIGTERM": leave, "SIGUSR1": leave, "SIGINT": signal.default_int_handler}
        for name, handler in handlers.items():
            number = getattr(signal, name, None)  # not all systems have all
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as nohup and "&" have it
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def default_setup(cfg: CfgNode, args: Any = None) -> None:
    """Check the config, make the run's folder, start its log, and seed the random number generators.

    1. :func:`check_config`, and the configs of all ranks are compared; nothing is written if that fails.
    2. What an earlier run left in OUTPUT_DIR is set aside, unless this one resumes it, only evaluates or predicts.
    3. The log begins, with the environment, the command line, and what the config changes of the defaults.
    4. The full config is saved as ``OUTPUT_DIR/config.yaml``.
    5. Everything random is seeded with SEED; one is drawn if it is negative, and put into ``cfg``.

    What only turns out later, such as weights that do not fit the model, is undone by :func:`unchanged_if_refused`.
    Every process of the run calls it. When torchrun starts a run again, because a process failed or a machine joined,
    it sets ``args.resume``: the run resumes from its last checkpoint.

    Args:
        cfg: the full config.
        args: the parsed command line; anything without ``resume`` or ``eval_only`` is fine.

    Raises:
        ConfigError: the config is not sound.
    """
    check_config(cfg)
    options = ("resume", "eval_only", "predict")
    refuse_other_configs(cfg, {f"--{name}".replace("_", "-"): bool(getattr(args, name, False)) for name in options})
    eval_only = bool(getattr(args, "eval_only", False) or getattr(args, "predict", False))
    again = restarted(cfg.OUTPUT_DIR) and hasattr(args, "resume") and not eval_only
    if again:
        args.resume = True
    output_dir, rank = cfg.OUTPUT_DIR, comm.get_rank()
    resume = bool(getattr(args, "resume", False))
    choose_seed(cfg, resume)
    if comm.is_main_process():
        moved = "" if resume or eval_only else set_aside(output_dir, keep=cfg.MODEL.WEIGHTS)
        _make_folder(output_dir)
    comm.barrier("output folder")
    setup_logger(output_dir, distributed_rank=rank, name="fvcore")
    setup_logger(output_dir, distributed_rank=rank)
    tell_log_file(os.path.join(output_dir, "log.txt"))
    logger.info("hookline %s, %s", hookline.__version__, describe_environment())
    logger.debug("Command line: %s", " ".join(sys.argv))
    _compare_timeouts(cfg)
    if again:
        logger.info("torchrun starts this run again: it resumes from its last checkpoint")
    if comm.is_main_process():
        if moved:
            logger.info("What an earlier run left in %s is now in %s", output_dir, moved)
        logger.info("Config, where it differs from the defaults:\n%s", describe_config(cfg))
        if not eval_only:
            path = os.path.join(output_dir, "config.yaml")
            replace_text(path, cfg.dump(sort_keys=False))
            logger.info("Full config: %s", path)
    seed_all_rng(cfg.SEED + rank)
    # Evaluation only runs each shape once or twice: timing algorithms would cost more than it gains.
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if cfg.FLOAT32_PRECISION:
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)


def _compare_timeouts(cfg: CfgNode) -> None:
    """Warn if the ranks were launched with another timeout than the config's."""
    wanted, actual = Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds, comm.timeout().total_seconds()
    if comm.get_world_size() > 1 and wanted != actual:
        logger.warning(
            "PARALLEL.TIMEOUT is %g s, but the ranks were launched with %g s: pass timeout= to launch()", wanted, actual
        )


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"OUTPUT_DIR: cannot make {path}: {error.strerror}") from error


def choose_seed(cfg: CfgNode, resume: bool) -> None:
    """Draw a seed if SEED is negative, and put it into ``cfg``.

    Args:
        cfg: the full config.
        resume: go on with the seed that was drawn for the run in OUTPUT_DIR: that of its ``config.yaml``, or else of
            the config in its last checkpoint that can be read.
    """
    if cfg.SEED >= 0:
        return
    seed = -1
    if resume and comm.is_main_process():  # the others get it from there
        path = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
        if os.path.isfile(path):
            seed = CfgNode.load_yaml_with_base(path).get("SEED", -1)
        elif saved := saved_config(cfg.OUTPUT_DIR):
            seed = CfgNode.load_cfg(saved).get("SEED", -1)
    if seed < 0:
        seed = int.from_bytes(os.urandom(4), "little") % 2**31
    seed = comm.broadcast_object(seed)
    frozen = cfg.is_frozen()
    cfg.defrost()
    cfg.SEED = seed
    if frozen:
        cfg.freeze()


def set_aside(output_dir: str, keep: str = "") -> str:
    """Move what an earlier run left in ``output_dir`` to ``output_dir/previous_001`` (002, ...).

    Args:
        output_dir: a run's folder.
        keep: a file that stays where it is: the weights this run starts from.

    Returns:
        Where it was moved; empty if there was nothing.

    Raises:
        ConfigError: ``keep`` is the folder itself.
    """
    if not os.path.isdir(output_dir):
        return ""
    found = [name for name in sorted(os.listdir(output_dir)) if name.startswith(_RUN_FILES) or name.endswith(".pth")]
    found = [name for name in found if not (keep and _same_file(os.path.join(output_dir, name), keep))]
    if not found:
        return ""
    if keep and _same_file(output_dir, keep):
        raise ConfigError(
            f"MODEL.WEIGHTS: {keep} is the folder that this run writes to; give it another OUTPUT_DIR, --resume what "
            "is there, or name a file of weights in it"
        )
    number = 1
    while os.path.exists(target := os.path.join(output_dir, f"previous_{number:03d}")):
        number += 1
    os.makedirs(target)
    for name in found:
        os.rename(os.path.join(output_dir, name), os.path.join(target, name))
    return target


@contextmanager
def unchanged_if_refused(output_dir: str) -> Iterator[None]:
    """Within it a :class:`ConfigError` leaves a run's folder as it was; the log of a run that is there notes it.

    For all that comes between :func:`default_setup` and the first step. What default_setup() does to the folder is
    undone by the main process: an earlier run is moved back, its ``config.yaml`` too, and a new folder goes.

    Args:
        output_dir: the run's folder; it need not exist.
    """
    if not comm.is_main_process():
        yield
        return
    existed, before, config = os.path.isdir(output_dir), set[str](), b""
    if existed:
        before = set(os.listdir(output_dir))
    if "config.yaml" in before:
        config = _content(os.path.join(output_dir, "config.yaml"))
    try:
        yield
    except ConfigError as error:
        if os.path.isdir(output_dir):
            close_logs(output_dir)
            _put_back(output_dir, before, config)
            _note_refusal(output_dir, error)
            if not existed:
                with suppress(OSError):  # another process's log may be in it
                    os.rmdir(output_dir)
        raise


def _put_back(folder: str, before: set[str], config: bytes) -> None:
    """Undo what default_setup() did to a folder that held the files ``before``, and ``config`` as config.yaml."""
    for name in sorted(set(os.listdir(folder)) - before):
        if name.startswith("previous_"):
            _move_back(os.path.join(folder, name), folder)
    for name in set(os.listdir(folder)) - before:
        if name == "config.yaml" or name.startswith("log.txt"):
            os.remove(os.path.join(folder, name))
    path = os.path.join(folder, "config.yaml")
    if "config.yaml" in before and _content(path) != config:
        replace_file(path, lambda file: file.write(config))


def _move_back(source: str, folder: str) -> None:
    """Undo :func:`set_aside`; logs that were begun since are joined to those that come back."""
    for name in os.listdir(source):
        there, here = os.path.join(source, name), os.path.join(folder, name)
        if name.startswith("log.txt") and os.path.isfile(here):
            with open(there, "ab") as file:
                file.write(_content(here))
        os.replace(there, here)
    os.rmdir(source)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _note_refusal(folder: str, error: ConfigError) -> None:
    """Say in the log, if there is one, what came of the attempt that it tells of."""
    path = os.path.join(folder, "log.txt")
    if os.path.isfile(path):
        with open(path, "a", encoding="utf-8") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"[{now},000 rank0] {__name__} ERROR: Refused, and the folder left as it was: {error}\n")


def _same_file(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def seed_all_rng(seed: int) -> None:
    """Seed python's, numpy's and torch's random number generators.

    Args:
        seed: not negative.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def describe_environment() -> str:
    """Versions and devices, in a line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.node()}"


def default_writers(output_dir: str, max_iter: int | None = None) -> Sequence[EventWriter]:
    """The console, ``metrics.json`` and TensorBoard.

    Args:
        output_dir: folder of the files.
        max_iter: the total number of iterations, for the ETA.
    """
    return [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json")),
        TensorboardXWriter(output_dir=output_dir),
    ]
