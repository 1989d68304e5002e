"""``replay``: run a step of a run again."""

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from ... import hooks as all_hooks
from ...config import CfgNode, ConfigError
from ...config.literals import spell
from ...config.tree import MISSING
from ...hooks.base import HookBase
from ...runs.reading import Curve, claim_files
from .. import comm
from ..checkpoint import Checkpointer
from ..checkpoint.candidates import check_resumable, config_in, iteration_of, newest_first
from ..data.index_stream import reason_without_indices
from ..defaults import DefaultTrainer
from ..resume.changes import changes_since
from ..setup.logger import console_kept, set_console_level
from ..setup.report import describe_environment
from ..setup.start import default_setup
from .differences import compare_curves, curves_of, environment_of
from .recorder import StepRecorder
from .report import write_report
from .run_config import ranks_of, run_config

__all__ = ["find_checkpoint", "replay", "replay_config", "replay_step"]

logger = logging.getLogger(__name__)

_FILES = ("report.json", "report.html", "trace.json", "step.pth")
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
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Run a step of a run again, from its newest whole checkpoint before the step, and report what happens in it.

    The run may have finished, failed or still be running. Its files are not changed; the report is written to
    ``RUN/replay_<iteration>/``: ``report.json``, and ``report.html`` with the images of the batch. On the way each
    metric is compared with ``metrics.json``. All ranks call this function.

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
        checkpoint: path of the checkpoint to start from; empty: from the beginning. Default: :func:`find_checkpoint`.

    Returns:
        The report: plain data, with the keys of ``report.json``.

    Raises:
        ConfigError: there is no such run; or the step is before its first or after its last one.
    """
    run_config(run, cfg)
    main, folder = comm.is_main_process(), os.path.join(run, f"replay_{iteration}")
    comm.on_main_process(lambda: _check_free(folder))
    curves = comm.on_main_process(lambda: curves_of(run))
    start = comm.on_main_process(lambda: find_checkpoint(run, iteration)) if checkpoint is None else checkpoint
    recorder = StepRecorder(
        iteration,
        debug,
        os.path.join(folder, "trace.json") if profile and main else "",
        os.path.join(folder, "step.pth") if save and main else "",
    )

    def begin() -> None:
        claim_files(run, [f"replay_{iteration}/{name}" for name in _FILES])
        os.makedirs(folder, exist_ok=True)

    try:
        report, own = replay_step(
            run,
            iteration,
            start,
            trainer=trainer,
            cfg=cfg,
            overrides=overrides,
            hooks=[*extra_hooks, recorder],
            begin=begin,
        )
    except BaseException:
        with suppress(OSError):  # it has files if an earlier replay wrote them
            os.rmdir(folder)
        raise
    if main:
        report["compared"] = compare_curves(curves, own, report["first_iteration"], iteration)
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
    begin: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Mapping[str, Curve]]:
    """Run a step again, and write nothing. All ranks call this function.

    Args:
        run, iteration, trainer, cfg, overrides: see :func:`replay`.
        checkpoint: path of the checkpoint to start from; empty: from the beginning.
        hooks: take part in the replay; the last may be a :class:`StepRecorder`, else one is added.
        begin: called on rank 0 when the trainer is built.

    Returns:
        The report of :func:`replay` without ``compared``; and rank 0's metrics of the replay.
    """
    replayed = replay_config(run, cfg, overrides)
    whole = [key for key in ("COMPILE_STEP", "CUDA_GRAPH") if replayed.SOLVER[key]]
    for key in whole:  # the parts of such a step cannot be seen
        replayed.SOLVER[key] = False
    overrides = [*overrides, *chain.from_iterable((f"SOLVER.{key}", False) for key in whole)]
    *others, recorder = hooks or [StepRecorder(iteration)]
    assert isinstance(recorder, StepRecorder)
    curves: Mapping[str, Curve] = {}
    with rebuilt(run, iteration, checkpoint, replayed, trainer) as one:
        recorder.uses_indices = not reason_without_indices(one.data_loader)
        one.register_hooks([*others, recorder])
        if comm.is_main_process():
            begin()
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
            changes = config_changes(run, checkpoint, iteration, one.cfg)
            report["config_changes"] = {key: pair for key, pair in changes.items() if key not in overrides[::2]}
            report["overrides"] = [str(value) for value in overrides]
    return report, curves


@contextmanager
def rebuilt(
    run: str, iteration: int, checkpoint: str, replayed: CfgNode, trainer: type[DefaultTrainer] = DefaultTrainer
) -> Iterator[DefaultTrainer]:
    """Build a run's trainer again, without hooks that save. All ranks call it. Nothing is written in ``run``.

    Args:
        run, iteration, trainer: see :func:`replay`.
        checkpoint: path of the checkpoint to start from; empty: from the beginning.
        replayed: what :func:`replay_config` returned. Its OUTPUT_DIR is a folder that is removed at the end.

    Raises:
        ConfigError: the run does not have the step.
    """
    if iteration < 0:
        raise ConfigError(f"iteration {iteration}: the first step of a run is iteration 0")
    with _scratch_folder() as scratch, console_kept():
        comm.on_main_process(lambda: _prepare(run, checkpoint, scratch))
        replayed.OUTPUT_DIR = scratch
        default_setup(replayed, argparse.Namespace(resume=bool(checkpoint)))
        set_console_level("CRITICAL")  # the report has the error of the step
        one = trainer(replayed)
        one.resume_or_load(resume=bool(checkpoint))
        if one.start_iter > iteration or iteration >= one.max_iter:
            raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {one.max_iter - 1}")
        for saver in _SAVERS:
            one.remove_hook(saver)
        yield one


def replay_config(run: str, cfg: CfgNode | None, overrides: Sequence[Any]) -> CfgNode:
    """Return the config of a replay: that of the run with ``overrides``, and without trackers and messages.

    Args:
        run, cfg, overrides: see :func:`replay`.

    Raises:
        ConfigError: there is no such run, or an override is invalid.
    """
    cfg = run_config(run, cfg)
    cfg.LOG.WRITERS = ("JSONWriter",)  # a tracker would get the metrics twice
    cfg.LOG.PROGRESS_BAR = False
    cfg.LOG.CURVES = False
    cfg.LOG.LEVEL = "ERROR"
    cfg.merge_from_list(list(overrides))
    return cfg


def find_checkpoint(run: str, iteration: int) -> str:
    """Return the path of a run's newest whole checkpoint before a step; empty if there is none."""
    for path in _checkpoints(run):
        if not 0 <= iteration_of(path) < iteration:
            continue
        try:
            check_resumable(path, {"trainer"})
        except ConfigError as error:
            logger.warning("%s; trying the checkpoint before it", error)
            continue
        return path
    return ""


def config_changes(run: str, checkpoint: str, iteration: int, cfg: CfgNode) -> dict[str, list[str]]:
    """Return what a replay's config has changed since a step of the run: a resume may have had another config.

    The config of the step is that in the checkpoint of the replay, or in the run's next one after the step.

    Args:
        run, iteration: see :func:`replay`.
        checkpoint: path of the one that the replay starts from; empty: from the beginning.
        cfg: the config of the replay's trainer.

    Returns:
        The run's value and the replay's, as in ``--set``, by full key. Without those in LOG, which change no step.
    """
    later: list[str] = []
    with suppress(OSError):  # the run goes on, and has removed one
        later = [path for path in _checkpoints(run) if iteration_of(path) >= iteration]
    changes: dict[str, tuple[Any, Any]] = {}
    for saved in (config_in(path) for path in [checkpoint, *later[-1:]] if path):
        changes |= changes_since(saved, cfg) if saved else {}
    return {
        key: ["(not set)" if value is MISSING else spell(value) for value in pair]
        for key, pair in changes.items()
        if not key.startswith("LOG.")
    }


def _checkpoints(run: str) -> list[str]:
    reader = Checkpointer(model=None, save_dir=run)  # type: ignore[arg-type]
    return newest_first(reader.get_all_checkpoint_files())


def _check_free(folder: str) -> None:
    """Raise an error if the folder has files that no replay has written, or is none."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is a file, and the report goes into a folder of this name: move the file away")
    foreign = set(os.listdir(folder)).difference(_FILES) if os.path.isdir(folder) else set()
    if foreign:
        raise ConfigError(f"{folder} has files that no replay has written, such as {min(foreign)}: move them away")


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """The folder of a replay, for all ranks; it is removed at the end of the block."""
    folder = comm.broadcast_object(tempfile.mkdtemp(prefix="hookline-replay-") if comm.is_main_process() else "")
    try:
        yield folder
    finally:
        if comm.is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


def _prepare(run: str, checkpoint: str, scratch: str) -> None:
    """Make a scratch folder one that resumes from a checkpoint; without a checkpoint it stays empty."""
    if not checkpoint:
        return
    name = os.path.basename(checkpoint)
    os.symlink(os.path.abspath(checkpoint), os.path.join(scratch, name))
    with open(os.path.join(scratch, "last_checkpoint"), "w", encoding="utf-8") as file:
        file.write(name)
    for file_name in ("config.yaml", "metrics.json"):
        if os.path.exists(os.path.join(run, file_name)):
            shutil.copy(os.path.join(run, file_name), scratch)
