"""Runs of empty steps that put metrics, for tests of what writers write."""

import copy
import json
import shutil

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, HookBase, PeriodicWriter


class Losses(TrainerBase):
    """The loss is the iteration."""

    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


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
    return CallbackHook(**{event: lambda trainer: action(trainer) if trainer.iter == iteration else None})


def put(name, iteration=None, event="after_step"):
    """A hook that puts a metric of value 1, at one iteration or at each."""

    def put_one(trainer):
        if iteration in (None, trainer.iter):
            trainer.storage.put_scalar(name, 1.0, smoothing_hint=False)

    return CallbackHook(**{event: put_one})


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations_of(path):
    return [row["iteration"] for row in rows_of(path)]


class Kill(HookBase):
    """Saves the state at one iteration. Copies the folder at others, as a kill leaves it.

    Attributes:
        kills: by iteration: the copy, and the last saved state.
    """

    def __init__(self, folder, saved_at, at):
        self.folder, self.saved_at, self.at = folder, saved_at, at
        self.kills, self.state = {}, None

    def after_step(self):
        if self.trainer.iter in (self.saved_at, *self.at):
            self.trainer.request_save()

    def on_save(self):
        self.trainer.emit("before_save", "checkpoint")
        iteration = self.trainer.iter
        if iteration == self.saved_at:
            self.state = copy.deepcopy(self.trainer.state_dict())
        if iteration in self.at:
            folder = self.folder.parent / f"killed{iteration}"
            shutil.copytree(self.folder, folder)
            self.kills[iteration] = (folder, self.state)
