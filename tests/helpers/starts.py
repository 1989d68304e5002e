"""Start runs as scripts do."""

from hookline.command_line import Namespace
from hookline.engine import (
    DefaultTrainer,
    begin_run,
    default_setup,
)


def arguments(**kwargs):
    """Return what default_argument_parser() could have parsed."""
    args = Namespace(**{"resume": False, "eval_only": False, **kwargs})
    args.ours = set(vars(args))
    return args


def set_up(cfg, args=None):
    """Set up and begin a run."""
    default_setup(cfg, args)
    begin_run(cfg)


def train(cfg, resume=False, setup=False):
    """Train, with or without default_setup()."""
    if setup:
        default_setup(cfg, arguments(resume=resume))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
