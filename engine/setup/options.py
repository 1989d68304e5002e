"""What the options of a command line do to a run, and how a program ends."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ...command_line import handling_signals
from ...config import CfgNode, ConfigError
from ...hooks.control.interruption import EXIT_AGAIN, EXIT_INTERRUPTED, INTERRUPTED_BY, is_session
from .. import comm
from ..ranks.environment import launched_by_torchrun
from ..train_loop import TrainResult

__all__ = [
    "check_processes",
    "check_resumes",
    "check_trains",
    "choose_fast_dev_run",
    "config_errors_exit",
    "exit_after_signal",
    "option",
    "shortened",
]


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Turn a :class:`ConfigError` into its message and exit code 2, and Ctrl-C into exit code 130.

    Before and after training, SIGTERM and SIGUSR1 exit with 75 ("start it again"); during training
    :class:`~hookline.hooks.SignalHandler` handles them. Earlier handlers are restored at the end.
    """
    try:
        with handling_signals(SIGTERM=_start_again, SIGUSR1=_start_again, SIGINT=signal.default_int_handler):
            yield
    except ConfigError as error:
        if not launched_by_torchrun() or os.environ["LOCAL_RANK"] == "0":  # other ranks have the same error
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            # That of a loader's worker has the worker's traceback before the message.
            message = str(error).rpartition("MismatchError: ")[2].rstrip()
            sys.stderr.write(f"error: {message}{notes}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


def exit_after_signal(result: TrainResult) -> None:
    """End the program if a signal ended training, as the signal would have done. A session goes on."""
    if result.exit_code and result.reason.startswith(INTERRUPTED_BY) and not is_session():
        raise SystemExit(result.exit_code)


def _start_again(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    os.write(2, f"{name}: saved checkpoints are intact; start again, with --resume if training had begun\n".encode())
    raise SystemExit(EXIT_AGAIN)


# ---------------------------------------------------------------------- options that a script parses and then ignores

_REMEDY = "end the script with run(Trainer, args), which handles all options"


def option(args: Any, name: str) -> Any:
    """Return the value of one of hookline's options; None if the script has an option of its own with that name."""
    return getattr(args, name, None) if name in getattr(args, "ours", ()) else None


def check_processes(args: Any) -> None:
    """Raise a ConfigError if there are fewer processes than the command line asks for."""
    gpus, machines = (option(args, name) or 1 for name in ("num_gpus", "num_machines"))
    if gpus * machines > comm.get_world_size():
        raise ConfigError(
            f"--num-gpus {gpus} --num-machines {machines}: the processes were not started; {_REMEDY}, or call "
            "launch(main, args.num_gpus, ...)"
        )


def check_trains(args: Any, resume: bool | None, is_trial: bool) -> None:
    """Raise a ConfigError if the command line does not ask for training, before a trainer trains.

    Args:
        args: the parsed command line, or None.
        resume: whether the trainer resumes; None if it loads nothing.
        is_trial: whether FAST_DEV_RUN is set.
    """
    for name in ("eval_only", "predict", "replay", "samples", "dry_run", *([] if is_trial else ["fast_dev_run"])):
        value = option(args, name)
        if value is not None and value is not False:  # --replay 0 is one
            raise ConfigError(f"--{name.replace('_', '-')}: this script ignores the option and trains; {_REMEDY}")
    if resume is False:
        check_resumes(args)
    check_processes(args)


def check_resumes(args: Any) -> None:
    """Raise a ConfigError if the command line asks for a resume, before a trainer starts a new run."""
    if option(args, "resume"):
        raise ConfigError(
            f"--resume: this script ignores the option and starts a new run; {_REMEDY}, or call "
            "trainer.resume_or_load(resume=args.resume)"
        )


# ---------------------------------------------------------------------- a trial run


def choose_fast_dev_run(cfg: Any, args: Any) -> None:
    """Set FAST_DEV_RUN to 1 if the command line has ``--fast-dev-run`` and the key is 0.

    Raises:
        ConfigError: another option contradicts it.
    """
    chosen = option(args, "fast_dev_run")
    if not isinstance(cfg, CfgNode):
        if chosen:
            raise ConfigError("--fast-dev-run: is for YAML configs; set train.max_iter of a LazyConfig")
        return
    if chosen and not cfg.FAST_DEV_RUN:
        frozen = cfg.is_frozen()
        cfg.defrost()
        cfg.FAST_DEV_RUN = 1
        if frozen:
            cfg.freeze()
    for name in ("resume", "eval_only", "predict"):
        if cfg.FAST_DEV_RUN and option(args, name):
            raise ConfigError(
                f"FAST_DEV_RUN: tries a new run, so leave out --{name.replace('_', '-')}; to start from "
                "weights, set MODEL.WEIGHTS"
            )


def shortened(cfg: CfgNode) -> CfgNode:
    """Return the config of the trial run: one epoch of FAST_DEV_RUN iterations, then one evaluation.

    Nothing is written: no checkpoints, and metrics go to the console only.
    """
    cfg, frozen, number = cfg.clone(), cfg.is_frozen(), cfg.FAST_DEV_RUN
    cfg.defrost()
    loader = cfg.DATALOADER
    for key in ("LIMIT_TRAIN_BATCHES", "LIMIT_TEST_BATCHES"):
        loader[key] = min(loader[key] or number, number)
    loader.ITERS_PER_EPOCH = min(loader.ITERS_PER_EPOCH, number)
    cfg.TEST.PRECISE_BN.NUM_ITER = min(cfg.TEST.PRECISE_BN.NUM_ITER, number)
    never = ["SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "TEST.SANITY_CHECK_BATCHES"]
    never += ["CHECKPOINT.BEST.PERIOD", "CHECKPOINT.ROLLING.PERIOD"]
    off = ["TEST.EVAL_ON_START", "CHECKPOINT.LOAD_BEST_AT_END", "CHECKPOINT.ON_EXCEPTION"]
    changes = {"SOLVER.MAX_ITER": number, "TEST.EXPECTED_RESULTS": [], "LOG.WRITERS": ["CommonMetricPrinter"]}
    changes |= {"LOG.PERIOD": 1, **dict.fromkeys(never, 0), **dict.fromkeys(off, False)}
    cfg.merge_from_list([part for pair in changes.items() for part in pair])
    if frozen:
        cfg.freeze()
    return cfg
