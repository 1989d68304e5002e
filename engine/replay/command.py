"""``hookline replay``: the processes of a replay."""

import argparse
import logging
from typing import Any

from ...config import CfgNode, ConfigError, locate
from ...config.merging import pairs_of
from ...config.slots import errors_at
from ...hooks.base import HookBase
from .. import comm
from ..defaults import DefaultTrainer
from ..launch import launch
from ..options import named_trainer
from .repeat import find_checkpoint, replay, replay_config
from .report import report_text
from .run_config import ranks_of
from .samples import samples_at

__all__ = ["look_again", "replay_in_processes"]

logger = logging.getLogger(__name__)


def look_again(trainer: type[DefaultTrainer], args: argparse.Namespace, run: str, cfg: CfgNode | None) -> None:
    """Handle ``--replay`` and ``--samples`` of a script's command line.

    Args:
        trainer: the script's trainer.
        args: the parsed command line. Its KEY VALUE pairs are for the replay.
        run: the folder of the run.
        cfg: see :func:`~hookline.engine.replay.replay`.
    """
    if args.samples is not None:
        for number in samples_at(run, args.samples, cfg, trainer.build_train_loader):
            print(number)
        return
    pairs = [part for pair in pairs_of(args.opts) for part in pair]
    options = {"run": run, "iter": args.replay, "set": pairs, "ranks": 0, "hook": [], "trainer": ""}
    options |= dict.fromkeys(("pdb", "profile", "save"), False)
    replay_in_processes(argparse.Namespace(**options), trainer, cfg)


def replay_in_processes(
    args: argparse.Namespace, trainer: type[DefaultTrainer] | None = None, cfg: CfgNode | None = None
) -> None:
    """Replay a step in as many processes as the run had, and print the report.

    Args:
        args: the command line of ``hookline replay``.
        trainer: the run's trainer. Default: ``args.trainer``.
        cfg: see :func:`~hookline.engine.replay.replay`.

    Raises:
        ConfigError: as for :func:`~hookline.engine.replay.replay`, or an option is wrong.
    """
    if len(args.set) % 2:
        raise ConfigError(f"--set takes pairs of KEY VALUE; {args.set[-1]!r} has no value")
    if args.ranks < 0:
        raise ConfigError(f"--ranks must be positive, not {args.ranks}")
    trainer = trainer or named_trainer(args.trainer)
    device = replay_config(args.run, cfg, args.set).MODEL.DEVICE
    checkpoint = find_checkpoint(args.run, args.iter)
    had = ranks_of(args.run, checkpoint)
    ranks = args.ranks or had
    if args.pdb and ranks > 1:
        raise ConfigError("--pdb needs one process: add --ranks 1")
    if ranks != had:
        logger.warning("The run had %d ranks, and the replay has %d: it is equal up to rounding", had, ranks)
    launch(_replay_rank, ranks, args=(args, trainer, checkpoint, cfg), device=device)


def _replay_rank(args: argparse.Namespace, trainer: type[DefaultTrainer], checkpoint: str, cfg: CfgNode | None) -> None:
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
        cfg=cfg,
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
