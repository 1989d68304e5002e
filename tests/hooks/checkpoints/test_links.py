"""Files and folders get second names."""

import os

import pytest
from fvcore.common.file_io import PathManager

from hookline.hooks.checkpoints.links import link


def write(path, folder, text):
    if folder:
        path.mkdir()
        (path / "checksums.json").write_text("{}")
        path /= "state.pth"
    path.write_text(text)


@pytest.mark.parametrize("existing", ["nothing", "file", "folder"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_link_replaces_its_target_and_does_not_depend_on_its_source(tmp_path, folder, existing):
    source, target = tmp_path / "model_0000003.pth", tmp_path / "model_best.pth"
    write(source, folder, "new")
    if existing != "nothing":
        write(target, existing == "folder", "old")
    for _ in range(2):  # the second call changes nothing
        link(str(source), str(target), PathManager)
        assert sorted(os.listdir(tmp_path)) == ["model_0000003.pth", "model_best.pth"]
    (source / "state.pth" if folder else source).unlink()
    assert (target / "state.pth" if folder else target).read_text() == "new"


def test_a_missing_source_is_ignored(tmp_path):
    link(str(tmp_path / "missing.pth"), str(tmp_path / "target.pth"), PathManager)
    assert os.listdir(tmp_path) == []
