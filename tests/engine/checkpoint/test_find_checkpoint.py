"""Which checkpoint a run resumes from."""

import os

import pytest
import torch
from small_runs import Counter
from torch import nn

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.find_checkpoint import newest_first


def sorted_names(folder):
    return [os.path.basename(path) for path in newest_first(str(path) for path in folder.iterdir())]


def test_files_are_sorted_by_the_iteration_they_hold(tmp_path):
    contents = {
        "model_0000009.pth": {"iteration": 9},
        "model_final.pth": {"trainer": {"iteration": 29}},
        "model_0000019.pth": {"iteration": 19},
        "model_exception.pth": {"iteration": 40},
        "model_best.pth": {"iteration": 40},
    }
    for seconds, (name, content) in enumerate(contents.items()):  # times, as a copy of the folder may have made them
        torch.save(content, tmp_path / name)
        os.utime(tmp_path / name, (seconds, seconds))
    (tmp_path / "model_torn.pth").write_bytes(b"PK")
    assert sorted_names(tmp_path) == ["model_final.pth", "model_0000019.pth", "model_0000009.pth", "model_torn.pth"]


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of the iterations 1 and 2, and one of a failure at 3."""
    checkpointer = Checkpointer(nn.Linear(2, 2), str(tmp_path), counter=Counter())
    checkpointer.save("model_1", iteration=1)
    checkpointer.save("model_2", iteration=2)
    checkpointer.save("model_exception", tag_last=False, iteration=3)
    return tmp_path


def resumed(folder):
    return Checkpointer(nn.Linear(2, 2), str(folder), counter=Counter()).resume_or_load("").get("iteration")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00garbage", b"model_9.pth", b"a/../b", b"\0", b"x" * 999])
def test_a_missing_or_wrong_last_checkpoint_falls_back_to_the_newest_file(run, log, content):
    (run / "last_checkpoint").unlink()
    if content is not None:
        (run / "last_checkpoint").write_bytes(content)
    assert resumed(run) == 2
    assert any("Resuming from" in message and "model_2.pth" in message for message in log.messages)


def test_an_exception_checkpoint_is_resumed_only_if_last_checkpoint_names_it(run):
    (run / "model_2.pth").write_bytes(b"")
    assert resumed(run) == 1
    (run / "last_checkpoint").write_text("model_exception.pth")
    assert resumed(run) == 3
