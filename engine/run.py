"""``Run``: one run in its folder, from the check of its config to the release of OUTPUT_DIR.

``Run.open`` checks and prepares. On the disk it only undoes a move that a killed start has left half done, and
``create_folder`` makes OUTPUT_DIR. ``run.begin()`` takes the folder: it locks it, moves an earlier run to
``previous_NNN`` in it unless that one is resumed, writes ``config.yaml`` and opens the log. ``run.end()`` releases the
folder; when a process is killed, its lock goes with it. :class:`DefaultTrainer` begins and ends the run in
``before_train`` and ``after_train``; a loop of one's own calls :func:`begin_run`.
"""

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from logging.handlers import MemoryHandler
from typing import Any, ClassVar, Literal, TypeVar

import torch

from ..config import CfgNode, ConfigError
from ..config.atomic import check_regular, replace_text, shown_path
from ..config.run_folder import RECORDS, FolderLock, check_writable, move_run, recover, recover_if_idle
from ..hooks.common import preserve_rng
from ..hooks.writers.files import back_up
from . import comm
from .checkpoint.find_checkpoint import named_checkpoint
from .evaluation.build import check_metrics
from .launch import check_alone, check_restarts
from .setup.check import check_command, check_components, check_config, check_same_config, check_values, option, shorten
from .setup.lazy_run import folder_of, lazy_run
from .setup.logger import open_logs, prepare_logs, setup_logger
from .setup.report import log_setup
from .setup.seeds import choose_seed, seed_all_rng, set_seed

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

RunKind = Literal["train", "inference", "dry", "trial"]
"""
"train": a training run. "inference" (``--eval-only``, ``--predict``): adds only its own files and the log, also while
a run trains in the folder. "dry" (``--dry-run``): writes nothing. "trial" (FAST_DEV_RUN): trains, but writes nothing.
"""


def default_setup(cfg: Any, args: Any = None) -> None:
    """Check the config, seed the random number generators, and prepare the log.

    1. Checks values of the config. Names and arguments of components are checked by a DefaultTrainer, since a script
       may build these parts itself; call :func:`check_config` for them. Compares the configs of all ranks.
    2. Draws a seed if SEED is negative, puts it into ``cfg``, and seeds all generators.
    3. Logs the environment, the command line, and the config's differences from the defaults.
    4. Creates OUTPUT_DIR if it is missing.

    A LazyConfig is not checked. Its ``train.output_dir`` and ``train.seed`` are used as OUTPUT_DIR and SEED.

    Nothing else is written until :meth:`DefaultTrainer.train` or :func:`begin_run` takes OUTPUT_DIR.

    Every rank calls this function.

    Args:
        cfg: the full config, or a config of :class:`~hookline.config.LazyConfig`.
        args: the parsed command line. The attributes ``resume``, ``eval_only``, ``predict``, ``dry_run`` and
            ``num_gpus`` are used, if present. A script that trains without handling them gets an error.

    Raises:
        ConfigError: the config is invalid, OUTPUT_DIR cannot be used, or the processes of ``--num-gpus`` were not
            started.
    """
    path = option(args, "resume")
    resume = path if isinstance(path, str) else bool(getattr(args, "resume", False))
    eval_only, predict = bool(getattr(args, "eval_only", False)), bool(option(args, "predict"))
    if args is not None:
        check_command(cfg, args)
    keys, text = cfg, ""
    if isinstance(cfg, CfgNode):
        check_values(cfg)
    else:
        keys, text = lazy_run(cfg, resume)
    kind: RunKind = "trial" if keys.FAST_DEV_RUN else "train"
    if option(args, "dry_run"):
        kind = "dry"
    elif eval_only or predict:
        kind = "inference"
    run = Run(keys, kind, resume, text, args)
    run.user_cfg = cfg
    run.open(keys)
    run.create_folder()
    Run.opened = run


def begin_run(cfg: Any, kind: RunKind | None = None) -> None:
    """Begin the run that :func:`default_setup` opened: take OUTPUT_DIR, write ``config.yaml``, open the log.

    :class:`DefaultTrainer` calls it. A loop of your own calls it on every rank when everything that may fail is built.
    Does nothing if no run is open, or if it has begun.

    Args:
        cfg: the config that the run was opened with.
        kind: begin only a run of this kind.

    Raises:
        ConfigError: OUTPUT_DIR cannot be used.
    """
    run = Run.opened_for(cfg)
    if run is not None and kind in (None, run.kind):
        Run.opened = None
        run.begin()
    elif not logger.hasHandlers():  # DefaultTrainer.test() of a script that has set up nothing
        setup_logger(distributed_rank=comm.get_rank())


class Run:
    """One run in its folder. All ranks call its methods.

    Args:
        cfg: the full config. If a seed is drawn, it is put into it.
        kind: see :data:`RunKind`.
        resume: whether the run in OUTPUT_DIR is resumed, or the path of a checkpoint that is; None if that is not known
            yet.
        text: the content of ``config.yaml``. Default: the config's.
        args: the parsed command line.

    Attributes:
        path: OUTPUT_DIR, absolute.
        moved: where this run has moved an earlier one; empty if there was none.
        user_cfg: the config that the user passed.
        begun: whether the folder was taken.
        drew_seed: whether a seed was drawn without knowing whether the run is resumed.
    """

    opened: ClassVar["Run | None"] = None
    """The run that :func:`default_setup` opened, until a trainer or :func:`begin_run` takes it."""

    def __init__(
        self, cfg: CfgNode, kind: RunKind, resume: bool | str | None = None, text: str = "", args: Any = None
    ) -> None:
        self.kind = kind
        self.args = args
        self.path = os.path.abspath(cfg.OUTPUT_DIR)
        if self.path.encode(errors="ignore").decode() != self.path:  # config.yaml and TensorBoard could not name it
            raise ConfigError(f"OUTPUT_DIR: {self.path!r} is not UTF-8; choose another name")
        self.user_cfg: Any = cfg
        self._resume = resume
        self._text = text
        self.drew_seed = self.begun = False
        self._writes = kind in ("train", "inference")
        self._lock = FolderLock(self.path)
        self._held: MemoryHandler | None = None  # messages until the log may be opened
        self._last_checkpoint = ""
        self.moved = ""

    @classmethod
    def opened_for(cls, cfg: Any) -> "Run | None":
        """Return the run that :func:`default_setup` opened for the folder of a config; None if there is none."""
        if (run := cls.opened) is None:
            return None
        folder = cfg.OUTPUT_DIR if isinstance(cfg, CfgNode) else folder_of(cfg)
        return run if run.path == os.path.abspath(folder) else None

    @classmethod
    def of(cls, cfg: CfgNode, overridden: Collection[str] = ()) -> "tuple[CfgNode, Run]":
        """Return the run that :func:`default_setup` opened; open one if it was not called.

        Args:
            cfg: the full config.
            overridden: see :func:`check_config`.

        Returns:
            The config with its seed (a copy if the run was opened here; with FAST_DEV_RUN, that of the trial run), and
            the run.

        Raises:
            ConfigError: as for :func:`default_setup`.
        """
        run, user_cfg = cls.opened_for(cfg), cfg
        if run is not None and (cfg is run.user_cfg or cfg.dump(sort_keys=False) == run._text):
            check_components(cfg, overridden)
        else:
            check_config(cfg, overridden)
            cfg = cfg.clone()
            run = cls(cfg, "trial" if cfg.FAST_DEV_RUN else "train")
            run.open(cfg)
        run.user_cfg = user_cfg
        if run.kind != "inference":  # begins when the weights are loaded, by begin_run() or test()
            cls.opened = None
        predicts = run.kind == "inference" and option(run.args, "predict")
        if cfg.DATASETS.TEST and not predicts and {"build_evaluator", "test"}.isdisjoint(overridden):
            with preserve_rng():  # a metric may draw
                check_metrics(cfg)
        cfg = cfg.thawed()  # the user's keeps its relative path
        cfg.OUTPUT_DIR = run.path  # the program may change its working directory
        if cfg.FAST_DEV_RUN:
            shorten(cfg)
        return cfg, run

    # ------------------------------------------------------------------ open

    def open(self, cfg: CfgNode) -> None:
        """Check the folder, choose the seed and seed with it, and keep log lines in memory."""
        rank = comm.get_rank()
        if comm.get_world_size() == 1:
            check_alone()
        else:
            check_same_config(cfg, self._resume, self.args, self._text)
        if self.kind != "trial":
            self._writes = self._on_main_process(self._check_folder)
        if self.kind != "dry" or self._resume:
            self.drew_seed = cfg.SEED < 0 and self._resume is None
            choose_seed(cfg, self._resume or False)
        self._text = self._text or cfg.dump(sort_keys=False)
        self._held = prepare_logs(rank, cfg.LOG.LEVEL, self.path if self._writes else "")
        if self.kind != "dry":
            log_setup(cfg, getattr(self.args, "config_file", ""))
        seed_all_rng(max(cfg.SEED, 0) + rank)
        # An evaluation runs each shape once or twice: benchmarking algorithms would cost more than it gains.
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and self.kind != "inference"
        if cfg.DETERMINISTIC:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is used first
            torch.use_deterministic_algorithms(True, warn_only=cfg.DETERMINISTIC == "warn")
        if cfg.FLOAT32_PRECISION:
            torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)

    def _check_folder(self) -> bool:
        """Undo a start that was killed, and return whether the run may write to the folder."""
        if self.kind != "dry":
            try:
                check_writable(self.path)
            except ConfigError as error:
                if self.kind != "inference" or option(self.args, "predict"):
                    raise
                logger.warning("%s. The evaluation writes no log", error)
                return False
        if self.kind == "train" or os.path.lexists(os.path.join(self.path, RECORDS, "moving")):
            recover_if_idle(self.path)
        check_regular(os.path.join(self.path, "log.txt"))
        for rank in range(1, comm.get_world_size()):
            check_regular(os.path.join(self.path, f"log.txt.rank{rank}"))
        self._last_checkpoint = self._read("last_checkpoint")
        return self.kind != "dry"

    def create_folder(self) -> None:
        """Create OUTPUT_DIR if the run will write to it: programs open files in it before they train."""
        if self._writes:
            self._on_main_process(partial(os.makedirs, self.path, exist_ok=True))

    def use_seed(self, seed: int) -> None:
        """Write the seed of the resumed run into ``config.yaml``, in place of the one that was drawn."""
        cfg = CfgNode.load_cfg(self._text)
        set_seed(cfg, seed)
        self._text = cfg.dump(sort_keys=False)

    # ------------------------------------------------------------------ begin and end

    def begin(self, resume: bool | str | None = None) -> None:
        """Take the folder, write config.yaml and open the log.

        Args:
            resume: whether the run in OUTPUT_DIR is resumed, or the path of a checkpoint that is; None if default_setup
                knows.

        Raises:
            ConfigError: another run uses the folder, or it cannot be written. Nothing in it has changed.
        """
        if not self._writes:
            return
        if resume is not None:
            self._resume = resume
        if self.kind == "train" and (not self._resume or isinstance(self._resume, str)):
            check_restarts()
        try:
            self._on_main_process(self._take_folder)
        except BaseException:
            self._lock.release()
            raise
        if not comm.is_main_process():
            open_logs(self.path, comm.get_rank(), self._held)
        self._held, self.begun = None, True

    def end(self) -> None:
        """Release the folder for other runs. The log stays open for what the program does with the trained model."""
        if comm.is_main_process() and self._lock.is_held:
            self._last_checkpoint = self._read("last_checkpoint")
            self._lock.release()

    def _take_folder(self) -> None:
        if self.kind == "inference":
            return open_logs(self.path, 0, self._held)
        self._lock.acquire()
        here, last = bool(self._resume), ""
        if isinstance(self._resume, str) and not self.begun:
            folder, last = os.path.split(os.path.realpath(named_checkpoint(self._resume, self.path)))
            here = folder == os.path.realpath(self.path)
        if (here or self.begun) and self._read("last_checkpoint") != self._last_checkpoint:
            raise ConfigError(
                f"OUTPUT_DIR: another run has saved checkpoints in {self.path} since this one started or stopped; "
                "resume this one from its previous_NNN, or train in another folder"
            )
        if not self.begun:
            recover(self.path)
            self.moved = "" if here else move_run(self.path)
        open_logs(self.path, 0, self._held)
        if self.begun:
            return
        if self.moved:
            logger.info("The earlier run in %s is now in %s", self.path, self.moved)
        if here and last:  # from here on the later ones are of a run that was given up
            replace_text(os.path.join(self.path, "last_checkpoint"), last)
        self._write_config()

    def _write_config(self) -> None:
        path, record = os.path.join(self.path, "config.yaml"), os.path.join(RECORDS, "config.yaml")
        earlier = self._read("config.yaml")
        if os.path.lexists(path) and earlier not in (self._text, self._read(record)):
            logger.info("config.yaml was edited; the earlier one is now %s", back_up(path, earlier.encode()))
        replace_text(path, self._text)
        replace_text(os.path.join(self.path, record), self._text)
        logger.info("Full config: %s", shown_path(path))

    def _read(self, name: str) -> str:
        """Return the text of a file; empty if there is no such file."""
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            return ""
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()

    def _on_main_process(self, use: Callable[[], _Result]) -> _Result:
        """Use the folder on the main process. Errors of the system name it, on all ranks."""
        try:
            return comm.on_main_process(use)
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR: cannot write to {self.path}: {error.strerror or error}") from error
