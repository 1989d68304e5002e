"""The last lines of a run: results, the best checkpoint, and how to go on."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...config import CfgNode, ConfigError, Duration, component
from ...config.errors import shown_path
from ...config.objects import is_object_text
from ..train_loop import TrainResult

__all__ = ["Program", "best_checkpoint", "name_replay", "next_steps", "program_of", "replay_command"]

_WIDTH = 80
_INDENT = len("  train longer: ")
_PORTED = "hookline.detectron2.script"  # the module that is __main__ in "python -m hookline.detectron2 SCRIPT"

Words = tuple[str, ...]
"""A part of a command that stays in one line, such as an option and its value."""


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
        words = (_python(), *program.words[3:]) if program.words[0] == "torchrun" else program.words
        return shlex.join((*words, "--config-file", _path(trainer.cfg, "config.yaml"), "--replay", str(iteration)))
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
        ported: whether it is a script for detectron2: it has no ``--predict``, and no command can import its trainer.
    """

    words: Words
    options: tuple[Words, ...] = ()
    handled: bool = False
    ported: bool = False

    @property
    def is_hookline(self) -> bool:
        """Whether it is the command ``hookline``."""
        return self.words == _hookline() or self.words[-2:] == ("-m", "hookline")

    def command(self, task: str, config: str, *more: Words) -> str:
        """Return a command for the shell: ``task`` is "train", "eval" or "predict"."""
        if self.is_hookline:
            return _text((*self.words, task), ("--config-file", config), *self.options, *more)
        option = {"train": (), "eval": (("--eval-only",),), "predict": (("--predict",),)}[task]
        return _text(self.words, ("--config-file", config), *self.options, *option, *more)


def program_of(args: Any) -> Program | None:
    """Return the program whose parsed command line ``args`` is; None if it is not one of hookline's options."""
    if not all(hasattr(args, name) for name in ("config_file", "resume", "opts")):
        return None
    script, spec = sys.argv[0], getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    name = script.removesuffix(os.path.join(os.sep, "__main__.py"))  # of "python -m hookline", in a process of its own
    ported = module == _PORTED
    if ported:
        words: Words = (_python(), "-m", module.rpartition(".")[0], script)
    elif os.path.basename(name).partition(".")[0] == "hookline" or module == "hookline":
        words = (_python(), "-m", "hookline") if dist.is_torchelastic_launched() else _hookline()
    elif module and module != "__mp_main__":
        words = (_python(), "-m", module)
    elif script.endswith(".py"):
        words = (_python(), script)
    else:
        return None
    if dist.is_torchelastic_launched():
        words = ("torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), *words[1:])
    options: list[Words] = []
    if getattr(args, "num_gpus", 1) not in (None, 1):
        options.append(("--num-gpus", str(args.num_gpus)))
    if getattr(args, "trainer", ""):
        options.append(("--trainer", str(args.trainer)))
    return Program(words, tuple(options), getattr(args, "handled", False), ported)


def _python() -> str:
    """Return how the shell starts this Python: by its name if that finds it, else by its path."""
    found = shutil.which("python")
    return "python" if found and os.path.dirname(found) == os.path.dirname(sys.executable) else sys.executable


def _hookline() -> Words:
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
    """Return commands, or calls in Python, that continue, evaluate and plot a run that has ended; one per line.

    Args:
        trainer: a DefaultTrainer.
        result: how the run ended.
        program: what started it. None: a script or a session that called the trainer.
    """
    cfg = trainer.cfg
    objects = any(is_object_text(str(name)) for name in (cfg.MODEL.NAME, *_names(cfg)))
    steps = _calls(trainer, result) if objects or program is None else _commands(trainer, result, program)
    if any(component(writer)[0] == "JSONWriter" for writer in cfg.LOG.WRITERS):
        steps["plot"] = _text((*_hookline(), "plot", shown_path(cfg.OUTPUT_DIR)))
    return "\n".join(f"  {name + ':':<{_INDENT - 3}} {step}" for name, step in steps.items())


def _commands(trainer: Any, result: TrainResult, program: Program) -> dict[str, str]:
    cfg, config = trainer.cfg, _path(trainer.cfg, "config.yaml")
    steps = {}
    if result.exit_code:
        steps["resume"] = program.command("train", config, ("--resume",))
    elif longer := _longer(_length(trainer), trainer.max_iter, result.iteration):
        steps["train longer"] = program.command("train", config, ("--resume",), ("SOLVER.MAX_ITER", longer))
    files = (_path(cfg, name) for name in ("model_best.pth", "model_final.pth"))
    weights = next(filter(os.path.exists, files), "")
    if cfg.DATASETS.TEST and weights:
        tasks = {"evaluate": "eval"} if program.ported else {"evaluate": "eval", "predict": "predict"}
        for name, task in tasks.items():
            steps[name] = program.command(task, config, ("MODEL.WEIGHTS", weights))
    return steps


def _calls(trainer: Any, result: TrainResult) -> dict[str, str]:
    in_one_call = trainer._length_key == "length"  # a Trainer
    steps = {}
    if result.exit_code:
        later = "trainer.train(resume=True)" if in_one_call else "trainer.resume_or_load(resume=True)"
        steps["resume"] = f"trainer.train(), or in another process {later}"
    else:
        steps["train longer"] = f"trainer.max_iter = {2 * max(trainer.max_iter, result.iteration)}; trainer.train()"
    if trainer.cfg.DATASETS.TEST:
        steps["evaluate"] = "trainer.evaluate()"
    if in_one_call:
        steps["predict"] = "trainer.predict(data)"
    return steps


def _names(cfg: CfgNode) -> list[str]:
    return [component(entry)[0] for key in ("TRAIN", "TEST") for entry in cfg.DATASETS[key]]


def _length(trainer: Any) -> Any:
    """Return SOLVER.MAX_ITER as the config of the run sets it."""
    # A trainer that skips DefaultTrainer.__init__ has no other config than its own.
    return getattr(trainer, "_unresolved", trainer.cfg).SOLVER.MAX_ITER


def _longer(length: Any, max_iter: int, iteration: int) -> str:
    """Return twice the length of a run, as a value of SOLVER.MAX_ITER."""
    duration = Duration.parse(length)
    if duration.unit == "s":
        return ""
    if iteration > max_iter:  # a resume with a shorter length
        return str(2 * iteration)
    value = f"{2 * duration.value:g}" if duration.unit == "ep" else str(int(2 * duration.value))
    return value + ("ep" if duration.unit == "ep" else "")


def _path(cfg: CfgNode, name: str) -> str:
    return shown_path(os.path.join(cfg.OUTPUT_DIR, name))


def _text(*parts: Words) -> str:
    """Return a command for the shell. A long one goes over several lines, each of which ends in a backslash."""
    lines, line = [], ""
    for part in map(shlex.join, parts):
        if line and len(line) + 1 + len(part) > _WIDTH - _INDENT - 2:
            lines.append(line)
            line = ""
        line = f"{line} {part}".strip()
    return f" \\\n{' ' * _INDENT}".join([*lines, line])
