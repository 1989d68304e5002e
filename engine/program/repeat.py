"""``replay``: run a step of a run again."""

import argparse
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch.utils._pytree import tree_map_only

from ... import hooks as all_hooks
from ...config import CfgNode, ConfigError
from ...config.atomic import check_no_link, replace_text
from ...config.errors import printable
from ...hooks.base import HookBase
from ...runs.reading import Curve, is_measured, read_run
from .. import comm
from ..checkpoint.find_checkpoint import checkpoints_in, first_resumable, iteration_of, newest_first
from ..defaults import DefaultTrainer
from ..launch import launch
from ..run import default_setup
from ..setup.report import describe_environment
from .recorder import Report, StepRecorder
from .samples import ranks_of, run_config

logger = logging.getLogger(__name__)

Curves = Mapping[str, Curve]
"""Metrics of a run by name."""

_REPORT = "report.json"
_SHOWN = 12  # rows of a table on the console


def replay(
    run: str,
    iteration: int,
    *,
    trainer: type[DefaultTrainer] = DefaultTrainer,
    cfg: CfgNode | None = None,
    overrides: Sequence[object] = (),
    extra_hooks: Iterable[HookBase] = (),
) -> Report:
    """Run a step of a run again, from its newest whole checkpoint before the step, and report what happens in it.

    The run may have finished, failed or still be running. Its files are not changed; the report is written to
    ``RUN/replay_<iteration>/report.json``. On the way each metric is compared with ``metrics.json``. All ranks
    call this function.

    Args:
        run: the folder of the run.
        iteration: the step, counted as in ``metrics.json``.
        trainer: the class of the run's trainer.
        cfg: the config that ``config.yaml`` of the run is merged into, with the project's own keys. Default:
            ``get_cfg()``.
        overrides: keys and values in turns, to see what the step does with another config.
        extra_hooks: take part in the replay.

    Returns:
        The report: plain data, with the keys of ``report.json``.

    Raises:
        ConfigError: there is no such run; or the step is before its first or after its last one.
    """
    folder = os.path.join(run, f"replay_{iteration}")
    check_no_link(folder)
    if os.path.exists(folder) and not (os.path.isdir(folder) and set(os.listdir(folder)) <= {_REPORT}):
        raise ConfigError(f"{folder}: has files that no replay has written; move them away, the report goes there")
    curves = comm.on_main_process(lambda: curves_of(run))
    start = checkpoint_before(run, iteration)
    report, replayed = replay_step(run, iteration, start, trainer, cfg, overrides, extra_hooks)
    if comm.is_main_process():
        report["compared"] = compare_curves(curves, replayed, report["first_iteration"], iteration)
        os.makedirs(folder, exist_ok=True)
        finite = tree_map_only(float, lambda one: one if math.isfinite(one) else None, report)
        replace_text(os.path.join(folder, _REPORT), json.dumps(finite, indent=1, allow_nan=False) + "\n")
    return report


def replay_step(
    run: str,
    iteration: int,
    checkpoint: str,
    trainer: type[DefaultTrainer],
    cfg: CfgNode | None,
    overrides: Sequence[object],
    extra_hooks: Iterable[HookBase] = (),
) -> tuple[Report, Curves]:
    """Run a step again in a scratch folder, without hooks that save. All ranks call this function.

    Args:
        run, iteration, trainer, cfg, overrides, extra_hooks: see :func:`replay`.
        checkpoint: path of the checkpoint to start from; empty: from the beginning.

    Returns:
        The report of :func:`replay` without ``compared``; and rank 0's metrics of the replay.
    """
    replayed = _replay_config(run, cfg, overrides)
    recorder = StepRecorder(iteration)
    report = recorder.report
    curves: Curves = {}
    folder = replayed.OUTPUT_DIR = comm.on_main_process(lambda: tempfile.mkdtemp(prefix="hookline-replay-"))
    logging.disable(logging.CRITICAL)  # the report has the error of the step
    try:
        default_setup(replayed, argparse.Namespace(resume=checkpoint or False))
        one = trainer(replayed)
        one.resume_or_load(resume=checkpoint or False)
        _train_to(one, recorder, iteration, extra_hooks)
        if comm.is_main_process():
            curves = curves_of(one.cfg.OUTPUT_DIR)
    finally:
        logging.disable(logging.NOTSET)
        if comm.is_main_process():
            shutil.rmtree(folder, ignore_errors=True)
    report["run"], report["checkpoint"] = os.path.abspath(run), os.path.basename(checkpoint)
    report["first_iteration"], report["ranks"] = one.start_iter, comm.get_world_size()
    if comm.is_main_process():
        then = f"{environment_of(run) or 'versions not known'}, ranks: {ranks_of(run, checkpoint)}"
        now = f"{describe_environment()}, ranks: {comm.get_world_size()}"
        report["environment"] = {"then": then, "now": now}
        report["overrides"] = [str(value) for value in overrides]
    return report, curves


def _train_to(trainer: DefaultTrainer, recorder: StepRecorder, iteration: int, extra_hooks: Iterable[HookBase]) -> None:
    """Train up to a step, and record it. An error in the step is recorded, too."""
    if trainer.start_iter > iteration or iteration >= trainer.max_iter:
        raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {trainer.max_iter - 1}")
    for saver in (all_hooks.PeriodicCheckpointer, all_hooks.BestCheckpointer, all_hooks.ExceptionCheckpointer):
        trainer.remove_hook(saver)
    join = all_hooks.CallbackHook(before_step=lambda t: t.iter == iteration and t.register_hooks([recorder]))
    join.uses_indices = trainer.batches.has_indices
    trainer.register_hooks([*extra_hooks, join])
    try:
        end = trainer.train()
    except Exception as error:
        if "error" not in recorder.report:
            error.add_note(f"the replay did not reach iteration {iteration}")
            raise
        logger.debug("The replayed step failed", exc_info=error)
    else:
        if end is not None and end.iteration <= iteration:  # a train() of its own may return nothing
            raise ConfigError(f"iteration {iteration}: the run ended at iteration {end.iteration}: {end.reason}")


def _replay_config(run: str, cfg: CfgNode | None, overrides: Sequence[object]) -> CfgNode:
    """Return the config of a run with ``overrides``, and without trackers, which would get the metrics twice."""
    cfg = run_config(run, cfg)
    cfg.LOG.WRITERS = ("JSONWriter",)
    cfg.LOG.PROGRESS_BAR = False
    cfg.merge_from_list(list(overrides))
    return cfg


def checkpoint_before(run: str, iteration: int) -> str:
    """Return the path of a run's newest whole checkpoint before a step; empty if there is none. All ranks call it."""

    def earlier() -> list[str]:
        return [path for path in newest_first(checkpoints_in(run)) if 0 <= iteration_of(path) < iteration]

    return first_resumable(comm.on_main_process(earlier), {"trainer"})


# ---------------------------------------------------------------------- compared with the run


def curves_of(folder: str) -> Curves:
    """Return the metrics of a run; none if it has no ``metrics.json``.

    Raises:
        ConfigError: the file is corrupt.
    """
    return read_run(folder).curves if os.path.isfile(os.path.join(folder, "metrics.json")) else {}


def compare_curves(run: Curves, replay: Curves, start: int, end: int) -> Report:
    """Compare metrics from iteration ``start`` to ``end``, to the bit. Measured ones, such as times, are left out.

    ``metrics.json`` has null for NaN and for infinite values, so these are equal here.

    Returns:
        ``values``: how many were compared; ``first_difference``: None, or iteration, metric and both values.
    """
    count, found = 0, []
    for name in run.keys() & replay.keys():
        if is_measured(name):
            continue
        shared, ours, theirs = np.intersect1d(run[name].iterations, replay[name].iterations, return_indices=True)
        within = (shared >= start) & (shared <= end)
        before, now = run[name].values[ours][within], replay[name].values[theirs][within]
        count += len(now)
        for index in np.flatnonzero((before != now) & ~(np.isnan(before) & np.isnan(now)))[:1]:
            found.append((int(shared[within][index]), name, float(before[index]), float(now[index])))
    keys = ("iteration", "metric", "run", "replay")
    return {"values": count, "first_difference": dict(zip(keys, min(found), strict=True)) if found else None}


def environment_of(run: str) -> str:
    """Return the versions and device that the run's ``log.txt`` names last; empty if there are none."""
    path = os.path.join(run, "log.txt")
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        found = [match[1] for line in file if (match := re.search(r"hookline \S+, (torch .*)$", line))]
    return printable(found[-1].strip()) if found else ""


# ---------------------------------------------------------------------- the report


def report_text(report: Report) -> str:
    """Return the report as text for the console."""
    origin = f"checkpoint {report['checkpoint']}" if report["checkpoint"] else "the beginning"
    run = min(report["run"], os.path.relpath(report["run"]), key=len)
    lines = [f"Replayed iteration {report['iteration']} of {run}, from {origin}."]
    lines.append(_verdict(report))
    if "error" in report:
        error = [line for line in report["error"].splitlines() if line]
        lines.append(f"The step fails as in the run: {error[0]}")
        lines += [f"  {line}" for line in (*error[1:][-2:], *report["notes"])]  # in between is a worker's traceback
    for name, values in report["losses"].items():
        lines.append(f"{name}: {', '.join(f'{value:.9g}' for value in values)}")
    samples = report["samples"]
    if samples:
        lines.append(f"Samples of this rank ({len(samples)}):")
        for sample in sorted(samples, key=lambda sample: -sample.get("nonfinite", 0))[:_SHOWN]:
            described = f"  {sample['is']}" if "is" in sample else ""
            if "nonfinite" in sample:
                described += f"  {sample['nonfinite']} values of its input are NaN or infinite"
            lines.append(f"  {sample['index']}{described}")
    elif "samples_unknown" in report:
        lines.append(f"Samples: not known ({report['samples_unknown']})")
    if report["first_nonfinite"]:
        where = report["first_nonfinite"]
        lines.append(f"First NaN or infinity: the {where['what']} of {where['module']} ({where['type']})")
    updates = report.get("updates", [])
    if updates:
        lines.append("Largest updates, relative to their weights:")
        lines += [f"  {row['ratio']:.3g}  {row['parameter']}" for row in updates[:_SHOWN]]
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    values, difference = report["compared"]["values"], report["compared"]["first_difference"]
    if difference is None:
        equal = f"All {values} values on the way equal metrics.json to the bit."
        return equal if values else "metrics.json has no rows on the way to compare with."
    there, config = report["environment"], " ".join(report["overrides"]) or "as config.yaml is now (--set changes it)"
    return (
        f"The replay differs from the run: at iteration {difference['iteration']} {difference['metric']} is "
        f"{difference['replay']!r}, and metrics.json has {difference['run']!r}.\n"
        f"  config: {config}\n  the run: {there['then']}\n  now: {there['now']}"
    )


# ---------------------------------------------------------------------- the command


def replay_in_ranks(
    run: str,
    iteration: int,
    trainer: type[DefaultTrainer],
    cfg: CfgNode | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Replay a step in as many processes as the run had, and print the report.

    Args:
        run, iteration, trainer, cfg, overrides: see :func:`replay`.

    Raises:
        ConfigError: as for :func:`replay`, or an option is wrong.
    """
    if len(overrides) % 2:
        raise ConfigError(f"--set takes pairs of KEY VALUE; {overrides[-1]!r} has no value")
    device = _replay_config(run, cfg, overrides).MODEL.DEVICE
    ranks = ranks_of(run, checkpoint_before(run, iteration))
    launch(_replay_rank, ranks, args=(run, iteration, trainer, cfg, overrides), device=device)


def _replay_rank(
    run: str, iteration: int, trainer: type[DefaultTrainer], cfg: CfgNode | None, overrides: Sequence[str]
) -> None:
    report = replay(run, iteration, trainer=trainer, cfg=cfg, overrides=overrides)
    if comm.is_main_process():
        print(report_text(report))
        print(f"Wrote {report['run']}/replay_{iteration}/{_REPORT}")
