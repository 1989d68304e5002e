"""``replay``: run a step of a run again."""

import argparse
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ... import hooks as all_hooks
from ...config import CfgNode, ConfigError, locate
from ...config.components import errors_at
from ...config.values import MISSING, spell
from ...hooks.base import HookBase
from ...runs.reading import Curve, claim_files, is_measured, read_run
from .. import comm
from ..checkpoint import Checkpointer
from ..checkpoint.candidates import check_resumable, config_in, iteration_of, newest_first
from ..data.epoch_iterator import reason_without_indices
from ..defaults import DefaultTrainer
from ..launch import launch
from ..resume.changes import changes_since
from ..setup.report import describe_environment
from ..setup.start import default_setup
from .recorder import StepRecorder
from .report import report_text, write_report
from .samples import ranks_of, run_config

__all__ = ["compare_curves", "curves_of", "environment_of", "find_checkpoint", "replay", "replay_in_ranks"]
__all__ += ["replay_step"]

logger = logging.getLogger(__name__)

_FILES = ("report.json", "samples.png", "trace.json", "step.pth")
# Hooks that only save. The replay saves nothing.
_SAVERS = (
    all_hooks.PeriodicCheckpointer,  # and the rolling one
    all_hooks.BestCheckpointer,
    all_hooks.ExceptionCheckpointer,
)


def replay(
    run: str,
    iteration: int,
    *,
    trainer: type[DefaultTrainer] = DefaultTrainer,
    cfg: CfgNode | None = None,
    overrides: Sequence[Any] = (),
    extra_hooks: Iterable[HookBase] = (),
    debug: bool = False,
    profile: bool = False,
    save: bool = False,
) -> dict[str, Any]:
    """Run a step of a run again, from its newest whole checkpoint before the step, and report what happens in it.

    The run may have finished, failed or still be running. Its files are not changed; the report is written to
    ``RUN/replay_<iteration>/``: ``report.json``, and the images of the batch as ``samples.png``. On the way each metric
    is compared with ``metrics.json``. All ranks call this function.

    Args:
        run: the folder of the run.
        iteration: the step, counted as in ``metrics.json``.
        trainer: the class of the run's trainer.
        cfg: the config that ``config.yaml`` of the run is merged into, with the project's own keys. Default:
            ``get_cfg()``.
        overrides: keys and values in turns, to see what the step does with another config.
        extra_hooks: take part in the replay.
        debug: start Python's debugger before the step.
        profile: write a Chrome trace of the step, ``trace.json``.
        save: write weights, optimizer and batch before the update, ``step.pth``. ``torch.load`` reads it.

    Returns:
        The report: plain data, with the keys of ``report.json``.

    Raises:
        ConfigError: there is no such run; or the step is before its first or after its last one.
    """
    main, folder = comm.is_main_process(), os.path.join(run, f"replay_{iteration}")
    run_config(run, cfg)  # raises an error if there is no such run
    if os.path.exists(folder) and not (os.path.isdir(folder) and set(os.listdir(folder)) <= {*_FILES}):
        raise ConfigError(f"{folder}: has files that no replay has written; move them away, the report goes there")
    curves = comm.on_main_process(lambda: curves_of(run))
    start = comm.on_main_process(lambda: find_checkpoint(run, iteration))
    with tempfile.TemporaryDirectory() as files:
        recorder = StepRecorder(
            iteration,
            debug,
            os.path.join(files, "trace.json") if profile and main else "",
            os.path.join(files, "step.pth") if save and main else "",
        )
        hooks = [*extra_hooks, recorder]
        report, own = replay_step(run, iteration, start, trainer=trainer, cfg=cfg, overrides=overrides, hooks=hooks)
        if main:
            report["compared"] = compare_curves(curves, own, report["first_iteration"], iteration)
            claim_files(run, [f"replay_{iteration}/{name}" for name in _FILES])
            os.makedirs(folder, exist_ok=True)
            for name in os.listdir(files):
                shutil.move(os.path.join(files, name), os.path.join(folder, name))
            write_report(report, recorder.images, folder)
    return report


def replay_step(
    run: str,
    iteration: int,
    checkpoint: str,
    *,
    trainer: type[DefaultTrainer] = DefaultTrainer,
    cfg: CfgNode | None = None,
    overrides: Sequence[Any] = (),
    hooks: Sequence[HookBase] = (),
) -> tuple[dict[str, Any], Mapping[str, Curve]]:
    """Run a step again in a scratch folder, without hooks that save. All ranks call this function.

    Args:
        run, iteration, trainer, cfg, overrides: see :func:`replay`.
        checkpoint: path of the checkpoint to start from; empty: from the beginning.
        hooks: take part in the replay; the last may be a :class:`StepRecorder`, else one is added.

    Returns:
        The report of :func:`replay` without ``compared``; and rank 0's metrics of the replay.
    """
    if iteration < 0:
        raise ConfigError(f"iteration {iteration}: the first step of a run is iteration 0")
    replayed = _replay_config(run, cfg, overrides)
    for key in ("COMPILE_STEP", "CUDA_GRAPH"):  # the parts of such a step cannot be seen
        if replayed.SOLVER[key]:
            replayed.SOLVER[key], overrides = False, [*overrides, f"SOLVER.{key}", False]
    *others, recorder = hooks or [StepRecorder(iteration)]
    assert isinstance(recorder, StepRecorder)
    curves: Mapping[str, Curve] = {}
    with _scratch_folder(run, checkpoint) as folder, _quiet():
        replayed.OUTPUT_DIR = folder
        default_setup(replayed, argparse.Namespace(resume=bool(checkpoint)))
        one = trainer(replayed)
        one.resume_or_load(resume=bool(checkpoint))
        if one.start_iter > iteration or iteration >= one.max_iter:
            raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {one.max_iter - 1}")
        for saver in _SAVERS:
            one.remove_hook(saver)
        recorder.uses_indices = not reason_without_indices(one.data_loader)
        one.register_hooks([*others, recorder])
        report, end = recorder.report, None
        try:
            end = one.train()
        except Exception as error:
            if "error" not in report:
                error.add_note(f"the replay did not reach iteration {iteration}")
                raise
            logger.debug("The replayed step failed", exc_info=error)
        if end is not None and end.iteration <= iteration:
            raise ConfigError(f"iteration {iteration}: the run ended at iteration {end.iteration}: {end.reason}")
        report["run"], report["checkpoint"] = os.path.abspath(run), os.path.basename(checkpoint)
        report["first_iteration"], report["ranks"] = one.start_iter, comm.get_world_size()
        if comm.is_main_process():
            curves = curves_of(one.cfg.OUTPUT_DIR)
            then = f"{environment_of(run) or 'versions not known'}, ranks: {ranks_of(run, checkpoint)}"
            now = f"{describe_environment()}, ranks: {comm.get_world_size()}"
            report["environment"] = {"then": then, "now": now}
            report["overrides"] = [str(value) for value in overrides]
            saved = config_in(checkpoint) if checkpoint else ""  # a resume may have had another config
            report["config_changes"] = {
                key: ["(not set)" if value is MISSING else spell(value) for value in pair]
                for key, pair in (changes_since(saved, one.cfg) if saved else {}).items()
                if key not in overrides[::2] and not key.startswith("LOG.")
            }
    return report, curves


def _replay_config(run: str, cfg: CfgNode | None, overrides: Sequence[Any]) -> CfgNode:
    """Return the config of a run with ``overrides``, and without trackers, which would get the metrics twice."""
    cfg = run_config(run, cfg)
    cfg.LOG.WRITERS = ("JSONWriter",)
    cfg.LOG.PROGRESS_BAR = cfg.LOG.CURVES = False
    cfg.merge_from_list(list(overrides))
    return cfg


@contextmanager
def _scratch_folder(run: str, checkpoint: str) -> Iterator[str]:
    """Yield a folder for all ranks that resumes the run from a checkpoint; remove it at the end of the block."""

    def prepare() -> None:
        name = os.path.basename(checkpoint)
        os.symlink(os.path.abspath(checkpoint), os.path.join(folder, name))
        with open(os.path.join(folder, "last_checkpoint"), "w", encoding="utf-8") as file:
            file.write(name)
        for file_name in ("config.yaml", "metrics.json"):
            if os.path.exists(os.path.join(run, file_name)):
                shutil.copy(os.path.join(run, file_name), folder)

    folder = comm.broadcast_object(tempfile.mkdtemp(prefix="hookline-replay-") if comm.is_main_process() else "")
    try:
        if checkpoint:
            comm.on_main_process(prepare)
        yield folder
    finally:
        if comm.is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing in the block: the report has the error of the step. Afterwards the console is as before."""
    ours = logging.getLogger("hookline")
    levels = {handler: handler.level for handler in ours.handlers}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for handler, level in levels.items():
            handler.setLevel(level)


def find_checkpoint(run: str, iteration: int) -> str:
    """Return the path of a run's newest whole checkpoint before a step; empty if there is none."""
    reader = Checkpointer(model=None, save_dir=run)  # type: ignore[arg-type]
    for path in newest_first(reader.get_all_checkpoint_files()):
        if not 0 <= iteration_of(path) < iteration:
            continue
        try:
            check_resumable(path, {"trainer"})
        except ConfigError as error:
            logger.warning("%s; trying the checkpoint before it", error)
            continue
        return path
    return ""


# ---------------------------------------------------------------------- compared with the run


def curves_of(folder: str) -> Mapping[str, Curve]:
    """Return the metrics of a run by name; none if it has no ``metrics.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    return read_run(folder).curves if os.path.isfile(os.path.join(folder, "metrics.json")) else {}


def compare_curves(run: Mapping[str, Curve], replay: Mapping[str, Curve], start: int, end: int) -> dict[str, Any]:
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
        for place in np.flatnonzero((before != now) & ~(np.isnan(before) & np.isnan(now)))[:1]:
            found.append((int(shared[within][place]), name, float(before[place]), float(now[place])))
    keys = ("iteration", "metric", "run", "replay")
    return {"values": count, "first_difference": dict(zip(keys, min(found), strict=True)) if found else None}


def environment_of(run: str) -> str:
    """Return the versions and device that the run's ``log.txt`` names last; empty if there are none."""
    path = os.path.join(run, "log.txt")
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        found = [match[1] for line in file if (match := re.search(r"hookline \S+, (torch .*)$", line))]
    return found[-1].strip() if found else ""


# ---------------------------------------------------------------------- the command


def replay_in_ranks(
    run: str, iteration: int, trainer: type[DefaultTrainer], ranks: int = 0, hooks: Sequence[str] = (), **options: Any
) -> None:
    """Replay a step in as many processes as the run had, and print the report.

    Args:
        run, iteration, trainer: see :func:`replay`.
        ranks: another number of processes; 0: as the run had.
        hooks: names of hooks that take part, such as "my_hooks:Hook".
        **options: other arguments of :func:`replay`.

    Raises:
        ConfigError: as for :func:`replay`, or an option is wrong.
    """
    overrides = options.get("overrides", ())
    if len(overrides) % 2:
        raise ConfigError(f"--set takes pairs of KEY VALUE; {overrides[-1]!r} has no value")
    device = _replay_config(run, options.get("cfg"), overrides).MODEL.DEVICE
    had = ranks_of(run, find_checkpoint(run, iteration))
    if ranks < 0 or (options.get("debug") and (ranks or had) > 1):
        raise ConfigError("--ranks: must be positive, and 1 with --pdb")
    if ranks not in (0, had):
        logger.warning("The run had %d ranks, and the replay has %d: it is equal up to rounding", had, ranks)
    launch(_replay_rank, ranks or had, args=(run, iteration, trainer, hooks, options), device=device)


def _replay_rank(
    run: str, iteration: int, trainer: type[DefaultTrainer], names: Sequence[str], options: Mapping[str, Any]
) -> None:
    hooks: list[HookBase] = []
    for name in names:
        with errors_at("--hook"):
            hook: Any = locate(name)
            if not (isinstance(hook, type) and issubclass(hook, HookBase)):
                raise ConfigError(f"{name} is no subclass of HookBase")
            hooks.append(hook())
    report = replay(run, iteration, trainer=trainer, extra_hooks=hooks, **options)
    if comm.is_main_process():
        print(report_text(report))
        print(f"Wrote {report['run']}/replay_{iteration}/report.json")
