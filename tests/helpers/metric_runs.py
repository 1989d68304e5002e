"""Runs of empty steps that put metrics, for tests of what writers write."""

import json

import torch

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, PeriodicWriter


class Losses(TrainerBase):
    """The loss is the iteration."""

    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


class TotalLosses(TrainerBase):
    """``total_loss`` is a function of the iteration."""

    def __init__(self, function, *hooks):
        super().__init__()
        self.function = function
        self.register_hooks(hooks)

    def run_step(self):
        self.storage.put_scalar("total_loss", self.function(self.iter))


def train_losses(*hooks, start=0, end=50, state=None):
    """Train ``Losses`` with some hooks, from a state if one is given; return the trainer."""
    trainer = Losses()
    trainer.register_hooks(hooks)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(start, end)
    return trainer


def write(writers, period, *hooks, **arguments):
    """Train ``Losses`` with writers; see ``train_losses``."""
    return train_losses(PeriodicWriter(writers, period), *hooks, **arguments)


def at(iteration, action, event="after_step"):
    """A hook that calls ``action(trainer)`` at one iteration."""
    return CallbackHook(**{event: lambda trainer, *_: action(trainer) if trainer.iter == iteration else None})


def put(name, iteration=None, event="after_step"):
    """A hook that puts a metric of value 1, at one iteration or at each."""

    def put_one(trainer):
        if iteration in (None, trainer.iter):
            trainer.storage.put_scalar(name, 1.0, smoothing_hint=False)

    return CallbackHook(**{event: put_one})


def put_media(trainer):
    trainer.storage.put_image("image", torch.rand(3, 4, 6))
    trainer.storage.put_image("gray", torch.zeros(1, 4, 6, dtype=torch.uint8))
    trainer.storage.put_histogram("histogram", torch.arange(1000.0))
    trainer.storage.put_text("text", "a < b")


TRACKED = (
    *("LOG.PERIOD", 4, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 10, "SOLVER.CHECKPOINT_PERIOD", 3),
    *("TEST.EVAL_PERIOD", 5, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy"),
)
"""Settings of a short run with evaluations."""


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations_of(path):
    return [row["iteration"] for row in rows_of(path)]
