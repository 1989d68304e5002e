"""The last lines of a run: results, the best checkpoint, and how to go on."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from ...config import CfgNode, ConfigError
from ...config.errors import shown_path
from ..train_loop import TrainResult

__all__ = ["Program", "best_checkpoint", "name_replay", "next_steps", "program_of", "replay_command"]

_PORTED = "hookline.detectron2.script"  # the module that is __main__ in "python -m hookline.detectron2 SCRIPT"


def name_replay(trainer: Any, error: BaseException) -> None:
    """Add to an error of a step the command that repeats the step, if there is one."""
    iteration = getattr(error, "found_in_step", trainer.iter)  # an error may be found after its step
    of_a_step = isinstance(error, Exception) and not isinstance(error, ConfigError)
    if of_a_step and (command := trainer.replay_command(iteration)):
        error.add_note(f"look at this step: {command}")


def replay_command(trainer: Any, iteration: int) -> str:
    """Return the command that repeats a step; empty if the run was not started by a command, or has no such step."""
    start = trainer._start
    program = None if start is None else start.program
    if program is None or program.ported or iteration >= trainer.max_iter or trainer.cfg.FAST_DEV_RUN:
        return ""
    if program.handled and not program.is_hookline:
        return shlex.join(
            (*program.words, "--config-file", _path(trainer.cfg, "config.yaml"), "--replay", str(iteration))
        )
    cls, name = type(trainer), ""
    own = vars(cls).keys() - {"__module__", "__doc__", "__parameters__"}
    if own and not cls.__module__.startswith("hookline."):
        module = cls.__module__
        if module in ("__main__", "__mp_main__"):
            module = os.path.relpath(sys.argv[0]).removesuffix(".py").replace(os.sep, ".")
        name = f" --trainer {module}:{cls.__qualname__}"
    command = " ".join((*_hookline(), "replay", shlex.quote(shown_path(trainer.cfg.OUTPUT_DIR))))
    return f"{command} --iter {iteration}{name}"


@dataclass(frozen=True)
class Program:
    """The command that started a run.

    Attributes:
        words: the program, such as ``("python", "tools/train_net.py")``.
        options: more options that every command needs.
        handled: whether it handles all options, since it ends with ``run()``.
        is_hookline: whether it is the command ``hookline``.
        ported: whether it is a script for detectron2: no command can import its trainer.
    """

    words: tuple[str, ...]
    options: tuple[str, ...] = ()
    handled: bool = False
    is_hookline: bool = False
    ported: bool = False

    def command(self, task: str, config: str, *more: str) -> str:
        """Return a command for the shell, in three lines: ``task`` is "train" or "eval"."""
        words = (*self.words, task) if self.is_hookline else self.words
        option = ("--eval-only",) if task == "eval" and not self.is_hookline else ()
        parts = words, ("--config-file", config), (*self.options, *option, *more)
        return f" \\\n{' ' * 16}".join(map(shlex.join, parts))


def program_of(args: Any) -> Program | None:
    """Return the program whose parsed command line ``args`` is; None if it is not one of hookline's options."""
    if not all(hasattr(args, name) for name in ("config_file", "resume", "opts")):
        return None
    script, spec = sys.argv[0], getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    name = script.removesuffix(os.path.join(os.sep, "__main__.py"))  # of "python -m hookline", in a process of its own
    is_hookline = module == "hookline" or os.path.basename(name).partition(".")[0] == "hookline"
    if module == _PORTED:
        words: tuple[str, ...] = (_python(), "-m", module.rpartition(".")[0], script)
    elif is_hookline:
        words = _hookline()
    elif module and module != "__mp_main__":
        words = (_python(), "-m", module)
    elif script.endswith(".py"):
        words = (_python(), script)
    else:
        return None
    processes = max(getattr(args, "num_gpus", 1) or 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # of torchrun
    options: tuple[str, ...] = ("--num-gpus", str(processes)) if processes > 1 else ()
    if getattr(args, "trainer", ""):
        options += ("--trainer", str(args.trainer))
    return Program(words, options, getattr(args, "handled", False), is_hookline, module == _PORTED)


def _python() -> str:
    """Return how the shell starts this Python: by its name if that finds it, else by its path."""
    found = shutil.which("python")
    return "python" if found and os.path.dirname(found) == os.path.dirname(sys.executable) else sys.executable


def _hookline() -> tuple[str, ...]:
    found = shutil.which("hookline")
    here = os.path.dirname(sys.executable)
    return ("hookline",) if found and os.path.dirname(found) == here else (_python(), "-m", "hookline")


def best_checkpoint(trainer: Any) -> str:
    """Return a line about the best checkpoint; empty if there is none."""
    for hook in trainer.find_hooks("BestCheckpointer"):
        if hook.best:
            path = _path(trainer.cfg, "model_best.pth")
            return f"Best {hook._val_metric}: {hook.best_metric:.5g} at iteration {hook.best_iter}, in {path}"
    return ""


def next_steps(trainer: Any, result: TrainResult, program: Program | None) -> str:
    """Return commands, or calls in Python, that continue and evaluate a run that has ended.

    Args:
        trainer: a DefaultTrainer.
        result: how the run ended.
        program: what started it. None: a script or a session that called the trainer.
    """
    cfg, longer = trainer.cfg, str(2 * max(trainer.max_iter, result.iteration))
    if program is None:
        on = "trainer.train()" if result.exit_code else f"trainer.max_iter = {longer}; trainer.train()"
        evaluate = "trainer.evaluate()"
    else:
        config = _path(cfg, "config.yaml")
        on = program.command("train", config, "--resume", *(() if result.exit_code else ("SOLVER.MAX_ITER", longer)))
        files = [_path(cfg, name) for name in ("model_best.pth", "model_final.pth")]
        weights = next(filter(os.path.exists, files), "")
        evaluate = program.command("eval", config, "MODEL.WEIGHTS", weights) if weights else ""
    steps = f"  {'resume:' if result.exit_code else 'train longer:':13} {on}"
    return f"{steps}\n  evaluate:     {evaluate}" if cfg.DATASETS.TEST and evaluate else steps


def _path(cfg: CfgNode, name: str) -> str:
    return shown_path(os.path.join(cfg.OUTPUT_DIR, name))
