import math
import os

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.candidates import check_resumable, newest_first


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
    paths = [str(path) for path in tmp_path.iterdir()]
    assert [os.path.basename(path) for path in newest_first(paths)] == [
        "model_final.pth",
        "model_0000019.pth",
        "model_0000009.pth",
        "model_torn.pth",
    ]


@pytest.mark.parametrize("junk", ["pipe", torch.ones(2), {"trainer": torch.ones(2)}, {"iteration": math.inf}, {}])
def test_files_without_an_iteration_come_last_and_pipes_do_not_block(tmp_path, junk):
    torch.save({"iteration": 3}, tmp_path / "model_0000003.pth")
    if junk == "pipe":
        os.mkfifo(tmp_path / "model_0000009.pth")
    else:
        torch.save(junk, tmp_path / "model_0000009.pth")
    found = newest_first(str(path) for path in tmp_path.iterdir())
    assert [os.path.basename(path) for path in found] == ["model_0000003.pth", "model_0000009.pth"]


def test_files_behind_a_uri_are_sorted_by_the_number_in_their_name():
    names = ["model_9.pth", "model_10.pth", "model_final.pth", "model_best_3.pth", "model_exception.pth"]
    found = newest_first(f"memory://run7/{name}" for name in names)
    assert [os.path.basename(path) for path in found] == ["model_10.pth", "model_9.pth", "model_final.pth"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "is not a checkpoint: it holds a list"),
        ({"model": {}}, "cannot be resumed from: it has no trainer"),
        ({"trainer": {}}, "cannot be resumed from: it has no model"),
        ({"model": {}, "trainer": 7}, "cannot be resumed from: the state of the trainer is a int"),
        ({"model": {}, "trainer": {"iteration": -5}}, "cannot be resumed from: its iteration is -5"),
        ({"model": {}, "trainer": {}, "iteration": math.inf}, "cannot be resumed from: its iteration is a float"),
        ({"model": {}, "trainer": {"iteration": torch.ones(3)}}, "cannot be resumed from: its iteration is a Tensor"),
    ],
)
def test_a_file_without_the_runs_state_is_not_resumable(tmp_path, content, message):
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(ConfigError, match=rf"^memory://model\.pth {message}"):
        check_resumable(str(path), ["trainer"], name="memory://model.pth")


def test_an_undamaged_checkpoint_is_resumable(tmp_path):
    torch.save({"model": {}, "trainer": {}}, tmp_path / "model.pth")
    check_resumable(str(tmp_path / "model.pth"), ["trainer"])


@pytest.mark.parametrize("other", [nn.Linear(3, 4), nn.Linear(2, 4, bias=False), nn.Sequential(nn.Linear(2, 4))])
def test_a_checkpoint_of_another_model_is_not_resumable(tmp_path, other):
    path, own = str(tmp_path / "model.pth"), nn.Linear(2, 4)
    torch.save({"model": other.state_dict(), "trainer": {}}, path)
    with pytest.raises(ConfigError, match=r"model\.pth is a checkpoint of another model"):
        check_resumable(path, ["trainer"], model=own)
    torch.save({"model": own.state_dict(), "trainer": {}}, path)
    check_resumable(path, ["trainer"], model=own)
    check_resumable(path, ["trainer"], model=nn.LazyLinear(4))


def test_a_newer_checkpoint_of_another_model_is_skipped(tmp_path):
    def saved(model, name, iteration):
        Checkpointer(model, str(tmp_path)).save(name, iteration=iteration)

    saved(nn.Linear(2, 4), "model_0000009", 9)
    saved(nn.Linear(5, 5), "model_0000029", 29)
    (tmp_path / "last_checkpoint").unlink()
    checkpointer = Checkpointer(nn.Linear(2, 4), str(tmp_path))
    assert checkpointer.resume_or_load("")["iteration"] == 9
