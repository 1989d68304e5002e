"""``replay``: run a step of a run again."""

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from ... import hooks
from ...config import CfgNode, ConfigError, get_cfg
from ...hooks.base import HookBase
from ...runs.output import claim_files
from .. import comm
from ..checkpoint import Checkpointer
from ..checkpoint.candidates import check_resumable, iteration_of, newest_first
from ..data.index_stream import reason_without_indices
from ..defaults import DefaultTrainer
from ..setup.logger import set_console_level
from ..setup.report import describe_environment
from ..setup.start import default_setup
from .differences import compare_rows, environment_of
from .recorder import StepRecorder
from .report import write_report

__all__ = ["replay"]

logger = logging.getLogger(__name__)

_FILES = ("report.json", "report.html", "trace.json", "step.pth")
# Hooks that only save. The replay saves nothing.
_SAVERS = (
    hooks.PeriodicCheckpointer,
    hooks.BestCheckpointer,
    hooks.ExceptionCheckpointer,
    hooks.InMemoryCheckpointer,
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

    Returns:
        The report: plain data, with the keys of ``report.json``.

    Raises:
        ConfigError: there is no such run; or the step is before its first or after its last one.
    """
    comm.on_main_process(lambda: find_checkpoint(run, iteration))
    replayed = replay_config(run, cfg, overrides)
    folder = os.path.join(run, f"replay_{iteration}")
    if iteration < 0:
        raise ConfigError(f"iteration {iteration}: the first step of a run is iteration 0")
    scratch = comm.broadcast_object(tempfile.mkdtemp(prefix="hookline-replay-") if comm.is_main_process() else "")
    try:
        comm.on_main_process(lambda: _check_free(folder))
        checkpoint = comm.on_main_process(lambda: _provide_checkpoint(run, iteration, scratch))
        replayed.OUTPUT_DIR = scratch
        default_setup(replayed, argparse.Namespace(resume=bool(checkpoint)))
        set_console_level("CRITICAL")  # the report has the error of the step
        one = trainer(replayed)
        one.resume_or_load(resume=bool(checkpoint))
        if one.start_iter > iteration or iteration >= one.max_iter:
            raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {one.max_iter - 1}")
        main = comm.is_main_process()
        recorder = StepRecorder(
            iteration,
            debug,
            os.path.join(folder, "trace.json") if profile and main else "",
            os.path.join(folder, "step.pth") if save and main else "",
        )
        recorder.uses_indices = not reason_without_indices(one.data_loader)
        for saver in _SAVERS:
            one.remove_hook(saver)
        one.register_hooks([*extra_hooks, recorder])
        if main:
            claim_files(run, [f"replay_{iteration}/{name}" for name in _FILES])
            os.makedirs(folder, exist_ok=True)
        start, failure = one.start_iter, None
        try:
            one.train()
        except Exception as error:
            if "error" not in recorder.report:
                raise
            failure = error
        report = recorder.report
        report["run"], report["checkpoint"] = os.path.abspath(run), checkpoint
        report["first_iteration"], report["ranks"] = start, comm.get_world_size()
        if comm.is_main_process():
            report["compared"] = compare_rows(run, scratch, start, iteration)
            then, now = environment_of(run), describe_environment()
            report["environment"] = {"then": then, "now": now}
            report["overrides"] = [str(value) for value in overrides]
            write_report(report, recorder.images, folder)
        if failure is not None:
            logger.debug("The replayed step failed", exc_info=failure)
        return report
    finally:
        if comm.is_main_process():
            shutil.rmtree(scratch, ignore_errors=True)


def replay_config(run: str, cfg: CfgNode | None, overrides: Sequence[Any]) -> CfgNode:
    cfg = get_cfg() if cfg is None else cfg.clone()
    cfg.merge_from_file(os.path.join(run, "config.yaml"))
    cfg.LOG.WRITERS = ("JSONWriter",)  # a tracker would get the metrics twice
    cfg.LOG.PROGRESS_BAR = False
    cfg.LOG.CURVES = False
    cfg.LOG.LEVEL = "ERROR"
    cfg.merge_from_list(list(overrides))
    return cfg


def _check_free(folder: str) -> None:
    """Raise an error if the folder has files that no replay has written."""
    foreign = set(os.listdir(folder)).difference(_FILES) if os.path.isdir(folder) else set()
    if foreign:
        raise ConfigError(f"{folder} has files that no replay has written, such as {min(foreign)}: move them away")


def find_checkpoint(run: str, iteration: int) -> str:
    """Return the newest whole checkpoint of a run before a step; empty if there is none.

    Raises:
        ConfigError: there is no such run.
    """
    if not os.path.isfile(os.path.join(run, "config.yaml")):
        raise ConfigError(f"{run}: no run of hookline is here (it has no config.yaml)")
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


def _provide_checkpoint(run: str, iteration: int, scratch: str) -> str:
    """Link the checkpoint to start from into the scratch folder. Return its name; empty: there is none."""
    path = find_checkpoint(run, iteration)
    if not path:
        return ""
    name = os.path.basename(path)
    os.symlink(os.path.abspath(path), os.path.join(scratch, name))
    with open(os.path.join(scratch, "last_checkpoint"), "w", encoding="utf-8") as file:
        file.write(name)
    for file_name in ("config.yaml", "metrics.json"):
        if os.path.exists(os.path.join(run, file_name)):
            shutil.copy(os.path.join(run, file_name), scratch)
    return name
