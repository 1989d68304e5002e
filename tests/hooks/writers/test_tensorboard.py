import copy
import os
import shutil
import time

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, HookBase, PeriodicWriter, TensorboardXWriter


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


def shown(folder):
    """Steps by name, as TensorBoard shows them and as its older reader returns them."""
    plugin = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    older = event_accumulator.EventAccumulator(str(folder), dict.fromkeys(("scalars", "images", "histograms"), 0))
    for events in (plugin, older):
        events.Reload()
    tensors = {tag: [event.step for event in plugin.Tensors(tag)] for tag in plugin.Tags()["tensors"]}
    for kind, read in {"scalars": older.Scalars, "images": older.Images, "histograms": older.Histograms}.items():
        for tag in older.Tags()[kind]:
            assert [event.step for event in read(tag)] == tensors[tag]
    return tensors


def put_media(trainer):
    if trainer.iter % 3 == 0:
        storage = trainer.storage
        storage.put_image("image", torch.full((3, 4, 4), trainer.iter / 100))
        storage.put_histogram("histogram", torch.arange(10.0))
        storage.put_text("text", "hello")


def put_late_media(trainer):
    if trainer.iter == 15:
        put_media(trainer)


class Kill(HookBase):
    """Copies the folder and the last saved state at the end of iterations, as after a kill."""

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


def run(folder, start=0, stop=40, hooks=(), state=None):
    trainer = Losses()
    media = [CallbackHook(after_step=put_media), CallbackHook(on_save=put_late_media)]
    trainer.register_hooks([*media, *hooks, PeriodicWriter([TensorboardXWriter(output_dir=str(folder))], 10)])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(start, stop)
    return shown(folder)


def test_media_not_written_before_a_kill_are_shown_once(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15, 24, 33))
    whole = run(tmp_path / "whole", hooks=[kill])
    assert whole["image"].count(12) == 1
    for folder, state in kill.kills.values():
        assert run(folder, 16, state=state, hooks=[Kill(folder, 0, ())]) == whole


@pytest.mark.parametrize("at", [5, 15, 30])
def test_points_of_a_run_killed_before_its_first_checkpoint_are_shown_once(tmp_path, at):
    kill = Kill(tmp_path / "whole", 100, (at,))
    run(tmp_path / "whole", hooks=[kill])
    again = run(kill.kills[at][0])
    assert again == run(tmp_path / "alone")


def test_files_are_read_in_the_order_of_the_runs_even_if_a_clock_was_ahead(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15,))
    whole = run(tmp_path / "whole", hooks=[kill])
    folder, state = kill.kills[15]
    [name] = os.listdir(folder)
    stamp = name.split(".")[3]
    os.rename(folder / name, folder / name.replace(stamp, f"{int(time.time()) + 3600:010d}"))
    assert run(folder, 16, state=state, hooks=[Kill(folder, 0, ())]) == whole


def test_a_state_saved_before_the_first_write_of_a_resumed_run_includes_the_media(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15,))
    run(tmp_path / "whole", hooks=[kill])
    folder, state = kill.kills[15]
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([TensorboardXWriter(output_dir=str(folder))], 10)])
    trainer.load_state_dict(state)
    trainer.register_hooks([again := Kill(folder, 16, ())])
    before = trainer.state_dict()
    trainer.train(16, 18)
    for state in (before, again.state):
        waiting = state["hooks"]["PeriodicWriter"]["writers"]["TensorboardXWriter"]["waiting"]
        assert [entry[1] for entry in waiting["images"]] == [12, 15, 15]
