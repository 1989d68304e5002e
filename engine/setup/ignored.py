"""Options that a script parses and then ignores: an error, instead of a run that nobody asked for."""

from typing import Any

from ...config import ConfigError
from .. import comm

__all__ = ["check_processes", "check_resumes", "check_trains", "option"]

_REMEDY = "end the script with run(Trainer, args), which handles all options"


def option(args: Any, name: str) -> Any:
    """Return the value of one of hookline's options; None if the script has an option of its own with that name."""
    return getattr(args, name, None) if name in getattr(args, "ours", ()) else None


def check_processes(args: Any) -> None:
    """Check that there are as many processes as the command line asks for.

    Raises:
        ConfigError: there are fewer.
    """
    gpus, machines = (option(args, name) or 1 for name in ("num_gpus", "num_machines"))
    if gpus * machines > comm.get_world_size():
        raise ConfigError(
            f"--num-gpus {gpus} --num-machines {machines}: the processes were not started; {_REMEDY}, or call "
            "launch(main, args.num_gpus, ...)"
        )


def check_trains(args: Any, resume: bool | None, is_trial: bool) -> None:
    """Check that the command line asks for training, before a trainer trains.

    Args:
        args: the parsed command line, or None.
        resume: whether the trainer resumes; None if it loads nothing.
        is_trial: whether FAST_DEV_RUN is set.

    Raises:
        ConfigError: it asks for something else.
    """
    options = ["eval_only", "predict", "replay", "samples", "dry_run", *([] if is_trial else ["fast_dev_run"])]
    for name in options:
        value = option(args, name)
        if value is not None and value is not False:
            raise ConfigError(f"--{name.replace('_', '-')}: this script ignores the option and trains; {_REMEDY}")
    if resume is False:
        check_resumes(args)
    check_processes(args)


def check_resumes(args: Any) -> None:
    """Check that the command line does not ask for a resume, before a trainer starts a new run.

    Raises:
        ConfigError: it does.
    """
    if option(args, "resume"):
        raise ConfigError(
            f"--resume: this script ignores the option and starts a new run; {_REMEDY}, or call "
            "trainer.resume_or_load(resume=args.resume)"
        )
