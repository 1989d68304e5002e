"""Folders of sharded checkpoints in a group of one process: content and damage."""

import errno
import json
import resource

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from hookline.config import ConfigError
from hookline.engine.checkpoint.sharded import (
    fail_together,
    is_sharded_folder,
    read_folder,
    verify_folder,
    write_folder,
)
from hookline.engine.checkpoint.shards import like_model, shard, split_shards


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, *shape):
    torch.manual_seed(sum(shape))
    return DTensor.from_local(torch.randn(*shape), mesh, [Shard(0)])


@pytest.fixture
def state(mesh):
    weight = sharded(mesh, 4, 3)
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": sharded(mesh, 4, 3)}}}
    return {"model": {"a.weight": weight, "plain": torch.arange(3)}, "trainer": [{"optimizer": optimizer}, 7, "text"]}


@pytest.fixture
def folder(state, tmp_path):
    path = tmp_path / "model_0000007.pth"
    rest, shards = split_shards(state)
    write_folder(str(path), rest, shards, dist.group.WORLD)
    return path


def test_sharded_tensors_are_separated_by_place(state):
    rest, shards = split_shards(state)
    assert set(shards) == {("model", "a.weight"), ("trainer", "0", "optimizer", "state", "0", "exp_avg")}
    assert torch.equal(rest["model"]["plain"], torch.arange(3))
    assert rest["trainer"][1:] == [7, "text"]
    assert not any(isinstance(value, DTensor) for value in rest["model"].values())
    assert isinstance(state["model"]["a.weight"], DTensor)  # as it was


def test_a_folder_is_read_whole_without_a_model(folder, state):
    assert is_sharded_folder(str(folder))
    verify_folder(str(folder))
    read = read_folder(str(folder))
    assert torch.equal(read["model"]["a.weight"], state["model"]["a.weight"].to_local())
    entry = read["trainer"][0]["optimizer"]["state"][0]
    assert entry["step"] == 3.0
    assert torch.equal(entry["exp_avg"], state["trainer"][0]["optimizer"]["state"][0]["exp_avg"].to_local())
    assert read["trainer"][1:] == [7, "text"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_unwanted_tensors_are_not_read(folder):
    read = read_folder(str(folder), wanted=lambda keys: keys[0] == "model")
    assert read["trainer"][0]["optimizer"]["state"][0]["exp_avg"] is None
    assert read["model"]["a.weight"] is not None


def test_a_whole_state_is_sharded_as_the_model_and_its_optimizer_are(mesh):
    model = torch.nn.Linear(3, 4, bias=False)
    model.weight = torch.nn.Parameter(sharded(mesh, 4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    like = like_model(model, [optimizer])
    whole = {"weight": torch.ones(4, 3), "other": torch.ones(2), "state": {0: {"exp_avg": torch.ones(4, 3)}}}
    parts = shard(whole, like)
    assert isinstance(parts["weight"], DTensor)
    assert isinstance(parts["state"][0]["exp_avg"], DTensor)
    assert type(parts["other"]) is torch.Tensor
    assert like(("model", "weight"), torch.Size((3, 4))) is None  # another shape


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.pth", "checksums.json", ".metadata"])
@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_damage_is_detected_and_the_file_is_named(folder, name, damage):
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        verify_folder(str(folder))
    # If the checksums are damaged, the error names their file.
    assert name in str(caught.value) or name == "checksums.json", caught.value
    assert str(folder) in str(caught.value)


def test_a_folder_of_the_same_name_is_replaced_and_a_file_too(folder, mesh):
    for _ in range(2):
        rest, shards = split_shards({"model": {"a.weight": sharded(mesh, 2, 2)}})
        write_folder(str(folder), rest, shards, dist.group.WORLD)
        assert read_folder(str(folder))["model"]["a.weight"].shape == (2, 2)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_bytes(b"a file")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_write_keeps_the_earlier_folder(folder, mesh):
    class Unwritable:
        pass

    before = json.loads((folder / "checksums.json").read_text())
    with pytest.raises(OSError, match="Unwritable"):
        write_folder(str(folder), {"model": Unwritable()}, {}, dist.group.WORLD)
    assert json.loads((folder / "checksums.json").read_text()) == before
    verify_folder(str(folder))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_disk_error_in_a_shard_is_reported_as_one(folder, mesh):
    before = sorted(path.name for path in folder.parent.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    shards = {("model", str(i)): sharded(mesh, 64, 100) for i in range(8)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as if the disk were full in the middle of a file
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_folder(str(folder), {}, shards, dist.group.WORLD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename.endswith("__0_0.distcp")
    assert sorted(path.name for path in folder.parent.iterdir()) == before
    verify_folder(str(folder))


def test_os_errors_are_kept_and_others_become_os_errors(mesh):
    with pytest.raises(FileNotFoundError), fail_together(dist.group.WORLD), open("/nowhere/at/all"):
        pass
    with pytest.raises(OSError, match="on rank 0: ValueError: no"), fail_together(dist.group.WORLD):
        raise ValueError("no")
