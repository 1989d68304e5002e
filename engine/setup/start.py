"""The start of a run: arguments, checks, seed, folder and log.

A start has two parts. :func:`default_setup` checks and prepares; it changes nothing on the disk. The run *begins* when
everything is built: only then is its folder taken, an earlier run moved away, ``config.yaml`` written and the log
opened. So a start that fails leaves everything as it was.
"""

import argparse
import logging
import os
import platform
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch

import hookline

from ...config import CfgNode, ConfigError, Duration, component, suggest
from ...config.files.atomic import replace_text
from ...config.files.run_folder import run_folder
from ...hooks import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from ...hooks.control.interruption import EXIT_AGAIN, EXIT_INTERRUPTED
from .. import comm
from ..checkpoint.candidates import saved_config
from ..launch import launched_by_torchrun, restarted
from ..ranks.agreement import refuse_other_configs
from ..ranks.process import tell_log_file
from .check import check_config
from .logger import close_logs, hold_logs, open_logs, setup_logger
from .report import describe_config

__all__ = [
    "RunStart",
    "begin_run",
    "check_config",
    "choose_seed",
    "config_errors_exit",
    "default_argument_parser",
    "default_setup",
    "default_writers",
    "prepared_start",
    "seed_all_rng",
]

logger = logging.getLogger(__name__)

# The files that every run writes, and those of writers that may be left out.
_RUN_FILE = re.compile(
    r"config\.yaml|log\.txt(\.rank\d+)?|last_checkpoint|model_(\d{7,}|final|exception|best(_\d{7,}(_\w+)?)?)\.pth"
)
_WRITER_FILES = {"JSONWriter": "metrics.json", "CSVWriter": "metrics.csv"}


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
    """Check the config, seed the random number generators, and prepare the run's folder and log.

    1. :func:`check_config`, and the configs of all ranks are compared. OUTPUT_DIR must be free: no other run is
       writing there, and no file of the user has the name of one that the run writes.
    2. If SEED is negative, a seed is drawn and put into ``cfg``. Everything random is seeded with it.
    3. The log begins, with the environment, the command line, and what the config changes of the defaults.

    Nothing is written yet. The run begins, and creates or takes OUTPUT_DIR, with :meth:`DefaultTrainer.train`, with
    :func:`begin_run`, or with the first file that a writer or checkpointer of hookline writes there.

    Every process of the run calls it. When torchrun starts a run again, because a process failed or a machine joined,
    it sets ``args.resume``: the run resumes from its last checkpoint.

    Args:
        cfg: the full config.
        args: the parsed command line. Of it ``resume``, ``eval_only``, ``predict`` and ``dry_run`` are used, if there.

    Raises:
        ConfigError: the config is not sound, or OUTPUT_DIR cannot be used.
    """
    check_config(cfg)
    options = ("resume", "eval_only", "predict")
    refuse_other_configs(cfg, {f"--{name}".replace("_", "-"): bool(getattr(args, name, False)) for name in options})
    look = bool(getattr(args, "eval_only", False) or getattr(args, "predict", False))
    again = restarted(cfg.OUTPUT_DIR) and hasattr(args, "resume") and not look
    if again:
        args.resume = True
    kind = "dry" if getattr(args, "dry_run", False) else "look" if look else "train"
    start = RunStart(cfg, kind, resume=bool(getattr(args, "resume", False)))
    start.prepare()
    if again:
        logger.info("torchrun starts this run again: it resumes from its last checkpoint")


def begin_run(cfg: CfgNode) -> None:
    """Begin the run that :func:`default_setup` prepared: take OUTPUT_DIR, write ``config.yaml``, open the log.

    :class:`DefaultTrainer` does it itself; a loop of your own calls it on every rank, when everything is built that
    may fail. If nothing is prepared, or the run has begun, nothing is done.

    Raises:
        ConfigError: OUTPUT_DIR cannot be used.
    """
    start = _starts.pop(os.path.abspath(cfg.OUTPUT_DIR), None)
    if start is not None:
        start.begin()


def begin_look(cfg: CfgNode) -> None:
    """:func:`begin_run`, if what was prepared is an evaluation or prediction (``--eval-only``, ``--predict``)."""
    start = _starts.get(os.path.abspath(cfg.OUTPUT_DIR))
    if start is not None and start.kind == "look":
        begin_run(cfg)


def prepared_start(cfg: CfgNode, overridden: Collection[str] = ()) -> "tuple[CfgNode, RunStart]":
    """What :func:`default_setup` prepared for a trainer; if it was not called, that is done now.

    Args:
        cfg: the full config.
        overridden: see :func:`check_config`.

    Returns:
        The config with its seed, a copy if one was drawn here; and the start.

    Raises:
        ConfigError: as for :func:`default_setup`.
    """
    start = _starts.pop(os.path.abspath(cfg.OUTPUT_DIR), None)
    if start is None or not start.is_of(cfg):
        check_config(cfg, overridden)
        refuse_other_configs(cfg, {})
        cfg = cfg.clone()
        start = RunStart(cfg, "train", resume=None)
        start.prepare()
        _starts.pop(os.path.abspath(cfg.OUTPUT_DIR), None)
    return cfg, start


_starts: dict[str, "RunStart"] = {}
"""The starts that were prepared and that no trainer has taken, by folder."""


class RunStart:
    """The start of one run.

    Args:
        cfg: the full config; a seed that is drawn is put into it.
        kind: "train"; "look" for programs that only add files of their own to the folder, as ``--eval-only`` and
            ``--predict`` do, also while a run trains there; "dry" if nothing at all is written.
        resume: whether the run in OUTPUT_DIR is continued; None if that is known later.
    """

    def __init__(self, cfg: CfgNode, kind: str, resume: bool | None) -> None:
        self._cfg = cfg
        self.kind = kind
        self._resume = resume
        self._begun = False
        self._last = b""
        self._folder = run_folder(cfg.OUTPUT_DIR)
        self._text = ""

    def is_of(self, cfg: CfgNode) -> bool:
        """Whether it was prepared for this config."""
        return cfg is self._cfg or cfg.dump(sort_keys=False) == self._text

    # ------------------------------------------------------------------ first part

    def prepare(self) -> None:
        """Check the folder, choose the seed, seed, and keep the log in memory. All ranks call it."""
        cfg, rank = self._cfg, comm.get_rank()
        _on_main_process(self._check_folder)
        if self.kind != "dry" or self._resume:
            choose_seed(cfg, bool(self._resume))
        self._text = cfg.dump(sort_keys=False)
        _starts[self._folder.path] = self
        for name in ("fvcore", "hookline"):
            setup_logger(distributed_rank=rank, name=name)
        if self.kind != "dry":
            hold_logs(cfg.OUTPUT_DIR)
            if comm.is_main_process():
                self._folder.before_first_claim = self._begin_here
            logger.info("hookline %s, %s", hookline.__version__, describe_environment())
            logger.debug("Command line: %s", " ".join(sys.argv))
            _compare_timeouts(cfg)
            if comm.is_main_process():
                logger.info("Config, where it differs from the defaults:\n%s", describe_config(cfg))
        seed_all_rng(max(cfg.SEED, 0) + rank)
        # Evaluation only runs each shape once or twice: timing algorithms would cost more than it gains.
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and self.kind != "look"
        if cfg.FLOAT32_PRECISION:
            torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)

    def _check_folder(self) -> None:
        folder = self._folder
        if self.kind == "dry":
            if folder.needs_recovery:
                raise ConfigError(
                    f"OUTPUT_DIR: a start was killed while it moved files of {folder.path}; start once without "
                    "--dry-run, which moves them back"
                )
        else:
            _check_writable(folder.path)
            if self.kind == "train" or folder.needs_recovery:
                folder.recover()
        folder.read_claims()
        if self.kind == "look":
            self._check_log()
        elif self._resume is not None:
            self._check_names(self._resume)
        self._last = _content(os.path.join(folder.path, "last_checkpoint"))

    def _check_names(self, resume: bool) -> None:
        self._folder.check_names(resume=resume, writes=self._writes)
        if not resume:
            _refuse_weights_of_earlier_run(self._cfg.MODEL.WEIGHTS, self._folder.path, self._folder.existing())

    def _writes(self, name: str) -> bool:
        writers = {component(entry)[0] for entry in self._cfg.LOG.WRITERS}
        return bool(_RUN_FILE.fullmatch(name)) or any(name == _WRITER_FILES.get(writer) for writer in writers)

    def _check_log(self) -> None:
        """Refuse to add to a log.txt that hookline did not write."""
        head = _content(os.path.join(self._folder.path, "log.txt"), 200)
        if head and "log.txt" not in self._folder and not re.match(rb"\[[-\d]{10} [:,\d]+ rank\d+\] ", head):
            self._folder.check_names(resume=False, writes=lambda name: name == "log.txt")

    # ------------------------------------------------------------------ second part

    def begin(self, resume: bool | None = None) -> None:
        """Take the folder, write config.yaml and open the log. All ranks call it, before training.

        Args:
            resume: whether the run in OUTPUT_DIR is continued, if that was not known before.

        Raises:
            ConfigError: another run has the folder, or it cannot be written. Nothing was changed there.
        """
        if resume is not None:
            self._resume = resume
        _on_main_process(self._begin_here)
        if not comm.is_main_process():
            open_logs(self._cfg.OUTPUT_DIR, comm.get_rank())
        self._begun = True

    def end(self) -> None:
        """Let other runs have the folder."""
        if comm.is_main_process():
            self._folder.release()

    def _begin_here(self) -> None:
        """What the main process does of it."""
        path = self._folder.path
        try:
            if self._begun:
                if self.kind == "train":
                    self._folder.continue_here()
                return
            if self.kind == "dry":
                raise ConfigError("a dry run writes nothing, so it cannot train")
            if self.kind == "look":
                self._folder.join()
                for name in self._log_names():
                    if not os.path.lexists(os.path.join(path, name)):
                        self._folder.claim(name)
                open_logs(self._cfg.OUTPUT_DIR, 0)
            else:
                self._take()
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR: cannot write to {path}: {error.strerror or error}") from error
        self._begun = True

    def _log_names(self) -> list[str]:
        return ["log.txt", *(f"log.txt.rank{rank}" for rank in range(1, comm.get_world_size()))]

    def _take(self) -> None:
        path, cfg, resume = self._folder.path, self._cfg, bool(self._resume)
        self._folder.read_claims()
        self._check_names(resume)
        moved = self._folder.take(resume=resume, writes=self._writes)
        try:
            if resume and _content(os.path.join(path, "last_checkpoint")) != self._last:
                raise ConfigError(f"OUTPUT_DIR: another run has saved checkpoints in {path} since this one started")
            for name in ("config.yaml", *self._log_names()):
                self._folder.claim(name)
            open_logs(cfg.OUTPUT_DIR, 0)
            tell_log_file(os.path.join(path, "log.txt"))
            if moved:
                logger.info("The earlier run in %s is now in %s", cfg.OUTPUT_DIR, moved)
            replace_text(os.path.join(path, "config.yaml"), self._text)
            logger.info("Full config: %s", os.path.join(cfg.OUTPUT_DIR, "config.yaml"))
        except BaseException:
            close_logs(cfg.OUTPUT_DIR)
            self._folder.release()
            raise


def _compare_timeouts(cfg: CfgNode) -> None:
    """Warn if the ranks were launched with another timeout than the config's."""
    wanted, actual = Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds, comm.timeout().total_seconds()
    if comm.get_world_size() > 1 and wanted != actual:
        logger.warning(
            "PARALLEL.TIMEOUT is %g s, but the ranks were launched with %g s: pass timeout= to launch()", wanted, actual
        )


def _on_main_process(do: Callable[[], Any]) -> None:
    """Call a function on the main process; a ConfigError there is raised on all ranks."""
    message: str | None = None
    if comm.is_main_process():
        try:
            do()
        except ConfigError as error:
            message = str(error)
    message = comm.broadcast_object(message)
    if message is not None:
        raise ConfigError(message)


def _check_writable(path: str) -> None:
    """Raise a ConfigError if a folder, or the one that it would be created in, cannot be written."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"OUTPUT_DIR: cannot create {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_DIR: {there} cannot be written; allow writing there, or choose another OUTPUT_DIR")


def _refuse_weights_of_earlier_run(weights: str, folder: str, names: Sequence[str]) -> None:
    """Raise a ConfigError if a run starts from weights that it is going to move away."""
    paths = [folder, *(os.path.join(folder, name) for name in names)]
    if weights and names and any(_same_file(path, weights) for path in paths):
        raise ConfigError(
            f"MODEL.WEIGHTS: {weights} is of the earlier run in OUTPUT_DIR, which a new run moves away; give this one "
            "another OUTPUT_DIR, or --resume what is there"
        )


def _content(path: str, size: int = 10_000) -> bytes:
    """The beginning of a plain file; empty if there is none."""
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read(size)


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
