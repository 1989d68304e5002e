import os

import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.checkpoint.candidates import check_resumable, newest_first


def test_files_are_tried_from_the_newest_on_by_what_they_hold(tmp_path):
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


def test_behind_a_uri_numbers_tell_which_is_newer():
    names = ["model_9.pth", "model_10.pth", "model_final.pth", "model_best_3.pth", "model_exception.pth"]
    found = newest_first(f"memory://run7/{name}" for name in names)
    assert [os.path.basename(path) for path in found] == ["model_10.pth", "model_9.pth", "model_final.pth"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "is not a checkpoint: it holds a list"),
        ({"model": {}}, "cannot be resumed from: it has no trainer"),
        ({"trainer": {}}, "cannot be resumed from: it has no model"),
    ],
)
def test_a_whole_file_without_the_runs_state_is_not_one_to_resume_from(tmp_path, content, message):
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(ConfigError, match=rf"^memory://model\.pth {message}"):
        check_resumable(str(path), ["trainer"], name="memory://model.pth")


def test_a_whole_checkpoint_is_one_to_resume_from(tmp_path):
    torch.save({"model": {}, "trainer": {}}, tmp_path / "model.pth")
    check_resumable(str(tmp_path / "model.pth"), ["trainer"])
