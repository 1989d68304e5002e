"""The start of a run, in two parts.

:func:`default_setup` checks and prepares; on the disk it only creates OUTPUT_DIR. The run *begins* when its first step
is done, or with the first file that it writes: only then it takes its folder, moves an earlier run away, writes
``config.yaml`` and opens the log. A start that fails, and an error in the first step, leave the folder as it was.
"""

import logging
import os
import random
import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import hookline

from ...config import CfgNode, ConfigError, Duration, get_cfg
from ...config.yaml_files import find_config
from ...hooks.common import preserve_rng
from .. import comm
from ..checkpoint.candidates import named_checkpoint, saved_config, saved_run
from ..evaluation import build_metrics, check_metrics
from ..launch import check_alone, check_restarts, check_same_config
from .check import check_config, unknown_parts
from .logger import LOGGERS, hold_logs, open_logs, release_logs, set_console_level, setup_logger
from .output_dir import OutputDir, RunKind
from .report import describe_config, describe_environment

__all__ = [
    "RunStart",
    "begin_run",
    "choose_seed",
    "default_setup",
    "prepared_start",
    "seed_all_rng",
    "set_seed",
    "take_start",
]

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

    Every rank calls this function.

    Args:
        cfg: the full config, or a config of :class:`~hookline.config.LazyConfig`.
        args: the parsed command line. The attributes ``resume``, ``eval_only``, ``predict``, ``dry_run`` and
            ``num_gpus`` are used, if present. A script that trains without handling them gets an error.

    Raises:
        ConfigError: the config is invalid, OUTPUT_DIR cannot be used, or the processes of ``--num-gpus`` were not
            started.
    """
    options: dict[str, Any] = {name: bool(getattr(args, name, False)) for name in ("resume", "eval_only")}
    if isinstance(path := option(args, "resume"), str):
        options["resume"] = path
    options |= {name: bool(option(args, name)) for name in ("predict", "dry_run")}
    inference = options["eval_only"] or options["predict"]
    check_processes(args)
    check_fast_dev_run(cfg, args)
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
    optional = options["eval_only"] and not options["predict"]
    start = RunStart(cfg, kind, options["resume"], text, given, optional)
    start.args, start.unknown = args, unknown
    start.prepare(cfg)
    vars(given)[_START] = start
    start.create_folder()
    for builder, error in unknown.items():
        logger.info("Left to the trainer's %s, or to the script: %s", builder, error)


def begin_run(cfg: Any, kind: RunKind | None = None) -> None:
    """Begin the run that :func:`default_setup` prepared: take OUTPUT_DIR, write ``config.yaml``, open the log.

    :class:`DefaultTrainer` calls it. A loop of your own calls it on every rank when everything that may fail is built.
    Does nothing if no run is prepared, or if it has begun.

    Args:
        cfg: the config that the run was prepared with.
        kind: begin only a run of this kind.

    Raises:
        ConfigError: OUTPUT_DIR cannot be used.
    """
    start = take_start(cfg, kind)
    if start is not None:
        start.begin()
    elif not logger.hasHandlers():  # DefaultTrainer.test() of a script that has set up nothing
        setup_logger(distributed_rank=comm.get_rank())


def take_start(cfg: Any, kind: RunKind | None = None) -> "RunStart | None":
    """Return the start that :func:`default_setup` prepared with this config, and that nobody has taken; or None."""
    start: RunStart | None = vars(cfg).get(_START)
    if start is None or start.taken or kind not in (None, start.kind):
        return None
    if cfg is not start.given() and start.path != os.path.abspath(folder_of(cfg)):  # a clone for another run
        return None
    start.taken = True
    return start


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
        start.prepare(cfg)
        start.taken = True
    elif start.kind == "inference":  # begins when the weights are loaded, by begin_run() or test()
        start.taken = False
    elif start.unknown:  # the trainer may build these parts itself, or they may be registered by now
        check_config(cfg, overridden)
    if cfg.DATASETS.TEST and start.kind != "inference" and {"build_evaluator", "test"}.isdisjoint(overridden):
        check_metrics(cfg)
        with preserve_rng():
            build_metrics(cfg)  # a constructor may refuse its arguments, also in a dry run
    cfg = cfg.thawed()  # the given one keeps its relative path
    cfg.OUTPUT_DIR = start.path  # the program may change its working directory
    if cfg.FAST_DEV_RUN:
        shorten(cfg)
    return cfg, start


def _training_kind(cfg: Any) -> RunKind:
    return "trial" if isinstance(cfg, CfgNode) and cfg.FAST_DEV_RUN else "train"


_START = "_run_start"
"""The attribute of a config that has the :class:`RunStart` that was prepared with it."""


class RunStart:
    """The start of one run.

    Args:
        cfg: the full config. If a seed is drawn, it is put into it.
        kind: see :data:`~hookline.engine.setup.output_dir.RunKind`.
        resume: whether the run in OUTPUT_DIR is resumed, or the path of a checkpoint that is; None if that is not known
            yet.
        text: the content of ``config.yaml``. Default: the config's.
        optional: see :class:`OutputDir`.
    """

    def __init__(
        self,
        cfg: CfgNode,
        kind: RunKind,
        resume: bool | str | None,
        text: str | None = None,
        given: Any = None,
        optional: bool = False,
    ) -> None:
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
        self._output = OutputDir(cfg.OUTPUT_DIR, kind, optional)
        self._writes = kind != "trial"
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

    def prepare(self, cfg: CfgNode) -> None:
        """Check the folder, choose the seed and seed with it, and keep log lines in memory. All ranks call it."""
        rank = comm.get_rank()
        if comm.get_world_size() == 1:
            check_alone()
        if self._writes:
            self._writes = comm.on_main_process(self._output.check)
        if self.kind != "dry" or self._resume:
            self._drew_seed = cfg.SEED < 0 and self._resume is None
            choose_seed(cfg, self._resume or False)
        self._text = self._text or cfg.dump(sort_keys=False)
        for name in LOGGERS:
            setup_logger(distributed_rank=rank, name=name)
        if rank == 0:
            set_console_level(cfg.LOG.LEVEL)
        if self.kind != "dry":
            if self._writes:
                hold_logs(self.path)
                if comm.is_main_process():
                    self._output.folder.before_first_claim = self._begin_on_main_process
            logger.info("hookline %s, %s", hookline.__version__, describe_environment())
            logger.debug("Command line: %s", " ".join(sys.argv))
            if config_file := getattr(self.args, "config_file", ""):
                logger.info("Config file: %s", find_config(config_file))
            _compare_timeouts(cfg)
            if comm.is_main_process():
                logger.debug("Config, where it differs from the defaults:\n%s", describe_config(cfg))
        seed_all_rng(max(cfg.SEED, 0) + rank)
        # An evaluation runs each shape once or twice: benchmarking algorithms would cost more than it gains.
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and self.kind != "inference"
        if cfg.DETERMINISTIC:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is used first
            torch.use_deterministic_algorithms(True, warn_only=cfg.DETERMINISTIC == "warn")
        if cfg.FLOAT32_PRECISION:
            torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)

    def create_folder(self) -> None:
        """Create OUTPUT_DIR if the run will write to it. All ranks call it."""
        if self.kind in ("train", "inference") and self._writes:
            comm.on_main_process(self._output.create)

    def take_saved_seed(self, resume: bool | str) -> int:
        """Record that the run is resumed, and its seed, if this start drew another one before that was known.

        Args:
            resume: True, or the path of the checkpoint.

        Returns:
            The seed; negative if the seed of this start does not change.
        """
        self._resume = resume  # a resume may write a checkpoint from memory before training begins
        if not self._drew_seed:
            return -1
        seed: int = comm.on_main_process(lambda: saved_seed(self.path, resume))
        if seed >= 0:
            cfg = CfgNode.load_cfg(self._text)
            set_seed(cfg, seed)
            self._text = cfg.dump(sort_keys=False)
        return seed

    def begin(self, resume: bool | str | None = None, trains: bool = True) -> None:
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
        if not self._writes:
            return
        comm.on_main_process(self._begin_on_main_process)
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

    @contextmanager
    def running(self, resume: bool | str | None, trains: bool) -> Iterator[None]:
        """Begin with the first step; at the end of the block, release the folder for other runs.

        A run that has begun before, or that trains nothing, begins at once. A trial has no folder.
        """
        check_ignored(self.args, "eval_only", "predict", "replay", "samples", "dry_run")
        if resume is False or (isinstance(option(self.args, "resume"), str) and not isinstance(resume, str)):
            check_ignored(self.args, "resume")
        check_processes(self.args)
        if self.kind == "trial":
            yield
            return
        if resume is not None:
            self._resume = resume
        if not self._resume or isinstance(self._resume, str):
            check_restarts()
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
                resume, last = bool(self._resume), ""
                if isinstance(self._resume, str):
                    folder, last = os.path.split(os.path.realpath(named_checkpoint(self._resume, self.path)))
                    resume = folder == os.path.realpath(self.path)
                self._output.take(resume, self._text if self._trains else "", last if resume and self._trains else "")
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


# ---------------------------------------------------------------------- options that a script parses and then ignores


def option(args: Any, name: str) -> Any:
    """Return the value of one of hookline's options; None if the script has an option of its own with that name."""
    return getattr(args, name, None) if name in getattr(args, "ours", ()) else None


def check_ignored(args: Any, *names: str) -> None:
    """Raise a ConfigError if the command line has one of these options, which the script does not handle."""
    for name in names:
        value = option(args, name)
        if value is not None and value is not False:  # --replay 0 is one
            raise ConfigError(
                f"--{name.replace('_', '-')}: this script ignores the option; end it with run(Trainer, args), which "
                "handles all, or call launch(main, args.num_gpus, ...) and trainer.resume_or_load(resume=args.resume)"
            )


def check_processes(args: Any) -> None:
    """Raise a ConfigError if there are fewer processes than the command line asks for."""
    asked = {name: option(args, name) or 1 for name in ("num_gpus", "num_machines")}
    if asked["num_gpus"] * asked["num_machines"] > comm.get_world_size():
        check_ignored(args, *(name for name, number in asked.items() if number > 1))


# ---------------------------------------------------------------------- a trial run


def check_fast_dev_run(cfg: Any, args: Any) -> None:
    """Raise a ConfigError if an option contradicts FAST_DEV_RUN."""
    for name in ("resume", "eval_only", "predict"):
        if isinstance(cfg, CfgNode) and cfg.FAST_DEV_RUN and option(args, name):
            raise ConfigError(
                f"FAST_DEV_RUN: tries a new run, so leave out --{name.replace('_', '-')}; to start from "
                "weights, set MODEL.WEIGHTS"
            )


def shorten(cfg: CfgNode) -> None:
    """Make a config that of the trial run: one epoch of FAST_DEV_RUN iterations, then one evaluation.

    Nothing is written: no checkpoints, and metrics go to the console only.
    """
    loader, number = cfg.DATALOADER, cfg.FAST_DEV_RUN
    for section, name in ((loader, "ITERS_PER_EPOCH"), (cfg.TEST.PRECISE_BN, "NUM_ITER")):
        section[name] = min(section[name], number)
    for name in ("LIMIT_TRAIN_BATCHES", "LIMIT_TEST_BATCHES"):
        loader[name] = min(loader[name] or number, number)
    never = ["SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "TEST.SANITY_CHECK_BATCHES"]
    never += ["CHECKPOINT.BEST.PERIOD", "CHECKPOINT.ROLLING.PERIOD"]
    off = ["TEST.EVAL_ON_START", "CHECKPOINT.LOAD_BEST_AT_END", "CHECKPOINT.ON_EXCEPTION"]
    changes = {"SOLVER.MAX_ITER": number, "TEST.EXPECTED_RESULTS": [], "LOG.WRITERS": ["CommonMetricPrinter"]}
    changes |= {"LOG.PERIOD": 1, **dict.fromkeys(never, 0), **dict.fromkeys(off, False)}
    cfg.merge_from_list([part for pair in changes.items() for part in pair])


# ---------------------------------------------------------------------- LazyConfigs

# The key of the defaults, and where LazyConfigs have it.
_KEYS = {
    "OUTPUT_DIR": ("OUTPUT_DIR", "output_dir", "train.output_dir"),
    "SEED": ("SEED", "seed", "train.seed"),
    "CUDNN_BENCHMARK": ("CUDNN_BENCHMARK", "train.cudnn_benchmark"),
    "FLOAT32_PRECISION": ("FLOAT32_PRECISION", "train.float32_precision"),
    "MODEL.WEIGHTS": ("train.init_checkpoint",),
}


def folder_of(cfg: Any) -> str:
    """Return the output folder of a config.

    Raises:
        ConfigError: it is not set.
    """
    if isinstance(cfg, CfgNode):
        return cfg.OUTPUT_DIR
    _, folder = _find(cfg, "OUTPUT_DIR")
    if not folder:
        raise ConfigError("train.output_dir: is not set; it is the folder of the run")
    return folder


def lazy_run(cfg: Any, resume: bool | str) -> tuple[CfgNode, str]:
    """Return the keys that the start of a run uses, and the text of ``config.yaml``.

    A seed that is missing or negative is drawn, the same for all ranks, or taken from the run that is resumed. It is
    put into the config.

    Args:
        cfg: a config of :class:`~hookline.config.LazyConfig`.
        resume: whether the run in the output folder is resumed, or the path of a checkpoint that is.
    """
    from omegaconf import OmegaConf

    from ...config.lazy import as_yaml

    run = get_cfg()
    run.OUTPUT_DIR = folder_of(cfg)
    for name in ("CUDNN_BENCHMARK", "FLOAT32_PRECISION", "MODEL.WEIGHTS"):
        _, value = _find(cfg, name)
        if value is not None:
            run.merge_from_list([name, value])
    key, seed = _find(cfg, "SEED")
    if seed is None or seed < 0:
        seed = comm.broadcast_object(_draw(run.OUTPUT_DIR, resume))
        OmegaConf.update(cfg, key, seed, force_add=True)
    run.SEED = seed
    return run, as_yaml(cfg)[0]


def _find(cfg: Any, name: str) -> tuple[str, Any]:
    """Return the key under which a config has a value, and the value; the last key, and None, if it has none."""
    from omegaconf import OmegaConf

    for key in _KEYS[name]:
        value = OmegaConf.select(cfg, key)
        if value is not None:
            return key, value
    return _KEYS[name][-1], None


def _draw(folder: str, resume: bool | str) -> int:
    """Draw a seed, or read the resumed run's."""
    from ...config import LazyConfig

    if isinstance(resume, str):
        folder = os.path.dirname(os.path.realpath(named_checkpoint(resume, folder)))
    path = os.path.join(folder, "config.yaml")
    seed = _find(LazyConfig.load(path), "SEED")[1] if resume and os.path.isfile(path) else None
    return int.from_bytes(os.urandom(4), "little") % 2**31 if seed is None else seed


# ---------------------------------------------------------------------------- seeds


def choose_seed(cfg: CfgNode, resume: bool | str) -> None:
    """Set SEED to a random seed if it is negative. All ranks get the same one.

    Args:
        cfg: the full config; it is changed.
        resume: reuse the seed of the run that is resumed: see :func:`saved_seed`.
    """
    if cfg.SEED >= 0:
        return

    def choose() -> int:
        seed = saved_seed(cfg.OUTPUT_DIR, resume) if resume else -1
        return seed if seed >= 0 else int.from_bytes(os.urandom(4), "little") % 2**31

    set_seed(cfg, comm.on_main_process(choose))


def saved_seed(folder: str, resume: bool | str = True) -> int:
    """Return the seed of a run; negative if there is none.

    Args:
        folder: its folder. The seed is in its ``config.yaml``, or else in its last readable checkpoint.
        resume: the path of a checkpoint whose seed is returned instead, if it has one.
    """
    path = os.path.join(folder, "config.yaml")
    text = saved_run(named_checkpoint(resume, folder)).get("config", "") if isinstance(resume, str) else ""
    if os.path.isfile(path) and not text:
        saved: Any = CfgNode.load_yaml_with_base(path)
    else:
        saved = CfgNode.load_cfg(text or saved_config(folder) or "{}")
    return int(saved.get("SEED", -1))


def set_seed(cfg: CfgNode, seed: int) -> None:
    """Set SEED, also in a frozen config."""
    frozen = cfg.is_frozen()
    cfg.defrost()
    cfg.SEED = seed
    if frozen:
        cfg.freeze()


def seed_all_rng(seed: int | None = None) -> None:
    """Seed the random number generators of python, numpy and torch.

    Args:
        seed: not negative. None: a random seed, which is logged.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        logger.info("Random seed: %d", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
