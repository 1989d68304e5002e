"""Start runs as scripts do."""

import contextlib

import torch.distributed as dist

from hookline.command_line import Namespace
from hookline.engine import DefaultTrainer, begin_run, default_setup


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


def contents(folder, *without):
    """The content of each file of a folder, by its path; without paths that have one of some words."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not any(word in name for word in without)}


# Kept, since a DDP model that is the last to hold a group may hang when it is freed: it joins threads of the group
# while it holds the GIL, for which they may wait.
_groups = []


@contextlib.contextmanager
def group_of_one():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _groups.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
