"""The start of a run, in two parts.

:func:`default_setup` checks and prepares; on the disk it only creates OUTPUT_DIR. The run *begins* when its first step
is done, or with the first file that it writes: only then it takes its folder, moves an earlier run away, writes
``config.yaml`` and opens the log. A start that fails, and an error in the first step, leave the folder as it was.
"""

import logging
import os
import socket
import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hookline

from ...command_line import last_parsed
from ...config import CfgNode, ConfigError, Duration
from ...config.files.run_folder import RECORDS
from ...config.values import without_objects
from ...config.yaml_files import find_config
from ...hooks.common.rng import preserve_rng
from .. import comm
from ..evaluation import build_metrics, check_metrics
from ..ranks.environment import check_alone, check_same_config, restarted
from .check import check_config, unknown_parts
from .lazy_start import folder_of, lazy_run
from .logger import LOGGERS, hold_logs, open_logs, release_logs, set_console_level, setup_logger
from .options import check_processes, check_trains, choose_fast_dev_run, option, shortened
from .output_dir import OutputDir, RunKind
from .report import describe_config, describe_environment
from .seeding import choose_seed, saved_seed, seed_all_rng, set_seed, use_deterministic_algorithms

__all__ = ["RunStart", "begin_inference", "begin_run", "default_setup", "prepared_start", "take_start"]

logger = logging.getLogger(__name__)


def default_setup(cfg: Any, args: Any = None) -> None:
    """Check the config, seed the random number generators, and prepare the log.

    1. Runs :func:`check_config`, except for parts with unknown names, which a script may build itself and a
       DefaultTrainer checks. Compares the configs of all ranks, and checks that no other run writes to OUTPUT_DIR.
       The folder is created if it is missing.
    2. Draws a seed if SEED is negative, puts it into ``cfg``, and seeds all generators.
    3. Logs the environment, the command line, and the config's differences from the defaults.

    A LazyConfig is not checked. Its ``train.output_dir`` and ``train.seed`` are used as OUTPUT_DIR and SEED.

    Nothing else is written yet. The first step of :meth:`DefaultTrainer.train`, :func:`begin_run`, or the first file
    that a writer or checkpointer of hookline writes takes OUTPUT_DIR.

    Every rank calls this function. If torchrun restarts the run, because a process failed or a machine joined,
    ``args.resume`` is set to True.

    Args:
        cfg: the full config, or a config of :class:`~hookline.config.LazyConfig`.
        args: the parsed command line. The attributes ``resume``, ``eval_only``, ``predict``, ``dry_run`` and
            ``num_gpus`` are used, if present. A script that trains without handling them gets an error.

    Raises:
        ConfigError: the config is invalid, OUTPUT_DIR cannot be used, or the processes of ``--num-gpus`` were not
            started.
    """
    options = {name: bool(getattr(args, name, False)) for name in ("resume", "eval_only")}
    options |= {name: bool(option(args, name)) for name in ("predict", "dry_run")}
    inference = options["eval_only"] or options["predict"]
    check_processes(args)
    if again := restarted(folder_of(cfg)) and hasattr(args, "resume") and not inference:
        args.resume = options["resume"] = True
    choose_fast_dev_run(cfg, args)
    given, text, lines = cfg, None, {}
    unknown: dict[str, ConfigError] = {}
    if isinstance(cfg, CfgNode):
        unknown = unknown_parts(cfg)
        check_config(cfg, unknown)
    else:
        cfg, text = lazy_run(cfg, options["resume"])
        lines = {f"config.yaml, line {number}": line for number, line in enumerate(text.splitlines(), start=1)}
    compared = {f"--{name.replace('_', '-')}": options[name] for name in ("resume", "eval_only", "predict")}
    check_same_config(cfg, {**compared, **lines})
    kind: RunKind = "dry" if options["dry_run"] else "inference" if inference else _training_kind(cfg)
    start = RunStart(cfg, kind, options["resume"], text, given)
    start.args, start.unknown = args, unknown
    start.prepare()
    vars(given)[_START] = start
    start.create_folder()
    for builder, error in unknown.items():
        logger.info("Left to the trainer's %s, or to the script: %s", builder, error)
    if again:
        logger.info("torchrun restarts this run: it resumes from its last checkpoint")


def begin_run(cfg: Any) -> None:
    """Begin the run that :func:`default_setup` prepared: take OUTPUT_DIR, write ``config.yaml``, open the log.

    :class:`DefaultTrainer` calls it. A loop of your own calls it on every rank when everything that may fail is built.
    Does nothing if no run is prepared, or if it has begun.

    Raises:
        ConfigError: OUTPUT_DIR cannot be used.
    """
    start = take_start(cfg)
    if start is not None:
        start.begin()


def take_start(cfg: Any) -> "RunStart | None":
    """Return the start that :func:`default_setup` prepared with this config, and that nobody has taken; or None."""
    start: RunStart | None = vars(cfg).get(_START)
    if start is None or start.taken:
        return None
    if cfg is not start.given() and start.path != os.path.abspath(folder_of(cfg)):  # a clone for another run
        return None
    start.taken = True
    return start


def begin_inference(cfg: CfgNode) -> None:
    """Call :func:`begin_run` if an evaluation or prediction is prepared (``--eval-only``, ``--predict``)."""
    start = take_start(cfg)
    if start is not None and start.kind == "inference":
        start.begin()
    elif start is not None:
        start.taken = False


def prepared_start(cfg: CfgNode, overridden: Collection[str] = ()) -> "tuple[CfgNode, RunStart]":
    """Return the start that :func:`default_setup` prepared; prepare one if it was not called.

    Args:
        cfg: the full config.
        overridden: see :func:`check_config`.

    Returns:
        The config with its seed (a copy if the start was prepared here; with FAST_DEV_RUN, that of the trial run), and
        the start.

    Raises:
        ConfigError: as for :func:`default_setup`.
    """
    given, start = cfg, take_start(cfg)
    if start is None or not start.is_for(cfg):
        check_config(cfg, overridden)
        check_same_config(cfg, {})
        cfg = cfg.clone()
        start = RunStart(cfg, _training_kind(cfg), resume=None, given=given)
        start.prepare()
        start.args = last_parsed()
        start.taken = True
    elif start.kind == "inference":  # begins when the weights are loaded, by begin_run() or test()
        start.taken = False
    elif start.unknown:  # the trainer may build these parts itself, or they may be registered by now
        check_config(cfg, overridden)
    if cfg.DATASETS.TEST and start.kind != "inference" and {"build_evaluator", "test"}.isdisjoint(overridden):
        check_metrics(cfg)
        with preserve_rng():
            build_metrics(cfg)  # a constructor may refuse its arguments, also in a dry run
    cfg = cfg.clone()  # the given one keeps its relative path
    cfg.defrost()
    cfg.OUTPUT_DIR = start.path  # the program may change its working directory
    return shortened(cfg) if cfg.FAST_DEV_RUN else cfg, start


def _training_kind(cfg: Any) -> RunKind:
    return "trial" if isinstance(cfg, CfgNode) and cfg.FAST_DEV_RUN else "train"


_START = "_run_start"
"""The attribute of a config that has the :class:`RunStart` that was prepared with it."""


class RunStart:
    """The start of one run.

    Args:
        cfg: the full config. If a seed is drawn, it is put into it.
        kind: see :data:`~hookline.engine.setup.output_dir.RunKind`.
        resume: whether the run in OUTPUT_DIR is resumed; None if that is not known yet.
        text: the content of ``config.yaml``. Default: the config's.
    """

    def __init__(
        self, cfg: CfgNode, kind: RunKind, resume: bool | None, text: str | None = None, given: Any = None
    ) -> None:
        self._cfg = cfg
        self.given = weakref.ref(cfg if given is None else given)
        self.kind = kind
        self._resume = resume
        self.unknown: dict[str, ConfigError] = {}
        """See :func:`~hookline.engine.setup.check.unknown_parts`."""
        self.args: Any = None
        """The parsed command line."""
        self.taken = False  # by a trainer, or begun
        self._begun = False
        self.waits = False  # for the first step
        self._trains = True
        self._drew_seed = False  # without knowing whether the run is resumed
        self._output = OutputDir(cfg.OUTPUT_DIR, kind)
        self.path = self._output.path
        self._text = text or ""

    def __reduce__(self) -> Any:  # a config that is copied to another process leaves it behind
        return type(None), ()

    def __copy__(self, memo: Any = None) -> "RunStart":  # a clone of the config begins the same run
        return self

    __deepcopy__ = __copy__

    def is_for(self, cfg: CfgNode) -> bool:
        """Whether the start was prepared for this config."""
        return cfg is self.given() or cfg.dump(sort_keys=False) == self._text

    def prepare(self) -> None:
        """Check the folder, choose the seed and seed with it, and keep log lines in memory. All ranks call it."""
        cfg, rank = self._cfg, comm.get_rank()
        if comm.get_world_size() == 1:
            check_alone()
        if self.kind != "trial":
            comm.on_main_process(self._output.check)
        if self.kind != "dry" or self._resume:
            self._drew_seed = cfg.SEED < 0 and self._resume is None
            choose_seed(cfg, bool(self._resume))
        self._text = self._text or cfg.dump(sort_keys=False)
        for name in LOGGERS:
            setup_logger(distributed_rank=rank, name=name)
        if rank == 0:
            set_console_level(cfg.LOG.LEVEL)
        if self.kind != "dry":
            if self.kind != "trial":
                hold_logs(self.path)
                if comm.is_main_process():
                    self._output.folder.before_first_claim = self._begin_on_main_process
            logger.info("hookline %s, %s", hookline.__version__, describe_environment())
            logger.debug("Command line: %s", " ".join(sys.argv))
            if config_file := getattr(self.args, "config_file", ""):
                logger.info("Config file: %s", find_config(config_file))
            _compare_timeouts(cfg)
            if comm.is_main_process():
                logger.info("Config, where it differs from the defaults:\n%s", describe_config(cfg))
        seed_all_rng(max(cfg.SEED, 0) + rank)
        # An evaluation runs each shape once or twice: benchmarking algorithms would cost more than it gains.
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and self.kind != "inference"
        use_deterministic_algorithms(cfg.DETERMINISTIC)
        if cfg.FLOAT32_PRECISION:
            torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
        self._cfg = without_objects(cfg)  # this object may outlive the trainer, and must not keep the model alive

    def create_folder(self) -> None:
        """Create OUTPUT_DIR if the run will write to it. All ranks call it."""
        if self.kind in ("train", "inference"):
            comm.on_main_process(self._output.create)

    def take_saved_seed(self) -> int:
        """Record that the run is resumed, and its seed, if this start drew another one before that was known.

        Returns:
            The seed; negative if the seed of this start does not change.
        """
        self._resume = True  # a resume may write a checkpoint from memory before training begins
        if not self._drew_seed:
            return -1
        seed: int = comm.on_main_process(lambda: saved_seed(self.path))
        if seed >= 0:
            set_seed(self._cfg, seed)
            self._text = self._cfg.dump(sort_keys=False)
        return seed

    def begin(self, resume: bool | None = None, trains: bool = True) -> None:
        """Take the folder, write config.yaml and open the log. All ranks call it.

        Args:
            resume: whether the run in OUTPUT_DIR is resumed, if that was not known before.
            trains: False if there is nothing left to train; then config.yaml stays as it is.

        Raises:
            ConfigError: another run uses the folder, or it cannot be written. Nothing in it has changed.
        """
        if resume is not None:
            self._resume = resume
        self._trains, self.waits = trains, False
        comm.on_main_process(self._begin_on_main_process)
        self._check_shared()
        if not comm.is_main_process():
            open_logs(self.path, comm.get_rank())
        self._begun = True

    def begin_after_step(self) -> None:
        """Call :meth:`begin` if the run has waited for its first step. All ranks call it when that step is done."""
        if self.waits:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # kernels of the step may have failed
            comm.synchronize()
            self.begin()

    def _check_shared(self) -> None:
        """Warn if a machine does not see the OUTPUT_DIR that rank 0 has taken. All ranks call it."""
        if comm.get_local_size() == comm.get_world_size():
            return
        sees = os.path.isdir(os.path.join(self.path, RECORDS))
        answers = comm.gather("" if sees else f"rank {comm.get_rank()} (on {socket.gethostname()})")
        if blind := next(filter(None, answers), ""):
            logger.warning(
                "OUTPUT_DIR: %s does not see the folder %s of rank 0. This run will train, but a resume needs its "
                "checkpoints on every machine: use shared storage, or copy the folder to all machines before --resume",
                blind,
                self.path,
            )

    @contextmanager
    def running(self, resume: bool | None, trains: bool) -> Iterator[None]:
        """Begin with the first step; at the end of the block, release the folder for other runs.

        A run that has begun before, or that trains nothing, begins at once. A trial has no folder.
        """
        check_trains(self.args, resume, self.kind == "trial")
        if self.kind == "trial":
            yield
            return
        if resume is not None:
            self._resume = resume
        self.waits = trains and not self._begun
        if not self.waits:
            self.begin(trains=trains)
        try:
            yield
        finally:
            self.waits = False
            release_logs(self.path)
            if comm.is_main_process():
                self._output.folder.release()

    def _begin_on_main_process(self) -> None:
        try:
            if self._begun:
                if self.kind == "train":
                    self._output.folder.continue_here()
                    open_logs(self.path, 0)  # another run may have closed them
            elif self.kind == "dry":
                raise ConfigError("a dry run writes nothing, so it cannot train")
            elif self.kind == "inference":
                self._output.join()
            else:
                self._output.take(bool(self._resume), self._text if self._trains else "")
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR: cannot write to {self.path}: {error.strerror or error}") from error
        self._begun = True


def _compare_timeouts(cfg: CfgNode) -> None:
    """Warn if the ranks were launched with another timeout than the config's."""
    wanted, actual = Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds, comm.timeout().total_seconds()
    if comm.get_world_size() > 1 and wanted != actual:
        logger.warning(
            "PARALLEL.TIMEOUT is %g s, but the ranks were launched with %g s: pass timeout= to launch()", wanted, actual
        )
