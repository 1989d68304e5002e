"""Files and folders of the best weights get second names."""

import os

import pytest
import torch
from torch import nn

from hookline.engine.checkpoint import Checkpointer
from hookline.hooks.checkpoints.best_files import BestFiles


@pytest.fixture
def files(tmp_path):
    return BestFiles(Checkpointer(nn.Linear(1, 1), str(tmp_path)), "model_best", "metric")


def write(path, folder, value, iteration):
    state = {"best_metric": {"name": "metric", "value": value}, "iteration": iteration}
    if folder:
        os.mkdir(path)
        path = os.path.join(path, "state.pth")
    torch.save(state, path)


@pytest.mark.parametrize("target", ["nothing", "file", "folder"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_second_name_replaces_whatever_had_it_and_leaves_the_first(files, tmp_path, folder, target):
    write(files.path(), folder, 0.5, 3)
    if target != "nothing":
        write(files.path(3), target == "folder", 0.1, 1)
    for _ in range(2):  # once more changes nothing
        files.name(files.path(), files.path(3))
        assert files.read(files.path(3)) == files.read(files.path()) == (0.5, 3)
    assert sorted(os.listdir(tmp_path)) == ["model_best.pth", "model_best_0000003.pth"]
    files.remove(files.path())
    assert files.read(files.path()) is None
    assert files.read(files.path(3)) == (0.5, 3)


def test_files_are_told_apart_by_their_names(files):
    write(files.path(3), False, 0.5, 3)
    write(files.path(7), True, 0.6, 7)
    write(files.path(7, aside=True), False, 0.9, 7)
    write(os.path.join(os.path.dirname(files.path()), "model_0000009.pth"), False, 0.9, 9)
    assert files.find([3, 4]) == ({3, 7}, {7})
    assert files.owns(files.path(7, aside=True))
    assert not files.owns("model_0000009.pth")


def test_a_file_of_another_metric_is_not_this_ones(files):
    torch.save({"best_metric": {"name": "other", "value": 1.0}, "iteration": 1}, files.path())
    assert files.read(files.path()) is None
    torch.save({"iteration": 1}, files.path())
    assert files.read(files.path(), untold=(0.3, 1)) == (0.3, 1)
