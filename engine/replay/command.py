"""``hookline replay``: the processes of a replay."""

import argparse
import logging
from typing import Any

from ...config import ConfigError, locate
from ...config.slots import errors_at
from ...hooks.base import HookBase
from .. import comm
from ..defaults import DefaultTrainer
from ..launch import launch
from ..program.options import named_trainer
from .repeat import find_checkpoint, replay, replay_config
from .report import report_text
from .run_config import ranks_of

__all__ = ["replay_in_processes"]

logger = logging.getLogger(__name__)


def replay_in_processes(args: argparse.Namespace) -> None:
    """Replay a step in as many processes as the run had, and print the report.

    Args:
        args: the command line of ``hookline replay``.

    Raises:
        ConfigError: as for :func:`~hookline.engine.replay.replay`, or an option is wrong.
    """
    if len(args.set) % 2:
        raise ConfigError(f"--set takes pairs of KEY VALUE; {args.set[-1]!r} has no value")
    if args.ranks < 0:
        raise ConfigError(f"--ranks must be positive, not {args.ranks}")
    trainer = named_trainer(args.trainer)
    cfg = replay_config(args.run, None, args.set)
    checkpoint = find_checkpoint(args.run, args.iter)
    had = ranks_of(args.run, checkpoint)
    ranks = args.ranks or had
    if args.pdb and ranks > 1:
        raise ConfigError("--pdb needs one process: add --ranks 1")
    if ranks != had:
        logger.warning("The run had %d ranks, and the replay has %d: it is equal up to rounding", had, ranks)
    launch(_replay_rank, ranks, args=(args, trainer, checkpoint), device=cfg.MODEL.DEVICE)


def _replay_rank(args: argparse.Namespace, trainer: type[DefaultTrainer], checkpoint: str) -> None:
    hooks: list[HookBase] = []
    for name in args.hook:
        with errors_at("--hook"):
            hook: Any = locate(name)
            if not (isinstance(hook, type) and issubclass(hook, HookBase)):
                raise ConfigError(f"{name} is no subclass of HookBase")
            hooks.append(hook())
    report = replay(
        args.run,
        args.iter,
        trainer=trainer,
        overrides=args.set,
        extra_hooks=hooks,
        debug=args.pdb,
        profile=args.profile,
        save=args.save,
        checkpoint=checkpoint,
    )
    if comm.is_main_process():
        print(report_text(report))
        print(f"Wrote {report['run']}/replay_{args.iter}/report.html")
