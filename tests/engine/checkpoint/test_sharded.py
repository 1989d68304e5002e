"""Folders of sharded checkpoints in a group of one process: content, damage, and files made to attack."""

import io
import json
import os
import pathlib
import pickle
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
from small_runs import Attack, same, seeded_net
from starts import group_of_one
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.dcp_reader import read_metadata, read_tensors
from hookline.engine.checkpoint.sharded import split_shards, verify_folder, write_folder
from hookline.engine.checkpoint.weights import find_averaged, read_checkpoint
from hookline.engine.program.inspection import inspect_checkpoint


@pytest.fixture(scope="module")
def mesh():
    with group_of_one():
        yield init_device_mesh("cpu", (1,))


STATE = dict(seeded_net().state_dict())
AVERAGED = {name: value + 1 for name, value in STATE.items()}


@pytest.fixture
def state(mesh):
    def sharded(value):
        return distribute_tensor(value, mesh, [Shard(0)])

    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": sharded(STATE["0.weight"] + 1)}}}
    model = {**STATE, "0.weight": sharded(STATE["0.weight"])}
    return {"model": model, "trainer": {"iteration": 3, "list": [7, "text"], "optimizer": optimizer}}


@pytest.fixture
def ours(state, tmp_path):
    """A sharded checkpoint of a run."""
    write_folder(str(tmp_path / "model_1.pth"), *split_shards(state), dist.group.WORLD)
    return tmp_path / "model_1.pth"


def save(folder, content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder that another program wrote with torch.distributed.checkpoint."""
    return save(tmp_path / "dcp", {"model": STATE, "trainer": {"hooks": {"EMA": {"averaged_model": AVERAGED}}}})


@pytest.mark.parametrize("kind", ["ours", "folder"])
def test_a_sharded_checkpoint_is_a_warm_start_of_one_process(request, kind):
    path, model = str(request.getfixturevalue(kind)), seeded_net(1)
    Checkpointer(model).load(path, [], strict=True)
    assert same(model.state_dict(), STATE)


def test_folders_of_other_programs(folder, tmp_path):
    assert same(find_averaged(read_checkpoint(str(folder)))[1], AVERAGED)
    assert same(read_checkpoint(str(save(tmp_path / "plain", STATE)))["model"], STATE)
    with pytest.raises(ConfigError, match="is not a checkpoint of a model"):
        read_checkpoint(str(save(tmp_path / "other", {"optimizer": {"state": {"a": torch.ones(1)}}})))


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.pth", "checksums.json", ".metadata"])
@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_damage_is_detected_and_the_file_is_named(ours, name, damage):
    path = ours / name
    content = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    # Without one of its files, a folder may be of another program.
    for call in (verify_folder,) if damage == "lost" else (verify_folder, inspect_checkpoint):
        with pytest.raises(ConfigError) as caught:
            call(str(ours))
        # If the checksums are corrupt, the error names their file.
        assert name in str(caught.value) or name == "checksums.json", caught.value


class OfWindows:
    def __reduce__(self):
        return pathlib.WindowsPath, ("x",)


def change_metadata(folder, change, *changed):
    """Rewrite .metadata like an attacker, with matching checksums."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sums = folder / "checksums.json"
    if sums.exists():
        found = {name: zlib.crc32((folder / name).read_bytes()) for name in (".metadata", *changed)}
        sums.write_text(json.dumps(json.loads(sums.read_text()) | found))


def test_entries_that_are_not_tensors_are_never_read(tmp_path):
    folder = save(tmp_path / "dcp", {"model": STATE, "evil": Attack(tmp_path / "attacked")})
    assert same(read_checkpoint(str(folder))["model"], STATE)
    read_tensors(str(folder), lambda keys: True)
    assert not (tmp_path / "attacked").exists()


def test_no_reader_unpickles_a_ranks_metadata(folder, tmp_path):
    # Torch cannot unpickle a WindowsPath here, and falls back to __0.metadata.
    change_metadata(folder, lambda metadata: setattr(metadata.storage_meta, "checkpoint_id", OfWindows()))
    (folder / "__0.metadata").write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    for read in (Checkpointer(seeded_net(1)).load, inspect_checkpoint):
        read(str(folder))
    assert not (tmp_path / "attacked").exists()


def test_a_weight_that_is_an_object_is_never_unpickled(ours, tmp_path):
    """DCP would unpickle a weight's bytes where the reader expects a tensor."""
    buffer = io.BytesIO()
    torch.save(Attack(tmp_path / "attacked"), buffer)
    with open(ours / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(buffer.getvalue())

    def change(metadata):
        for name, entry in metadata.state_dict_metadata.items():
            if name.endswith("0.weight"):
                metadata.state_dict_metadata[name] = dcp_metadata.BytesStorageMetadata()
                vars(metadata.state_dict_metadata[name]).update(vars(entry))
        for index, info in metadata.storage_data.items():
            if index.fqn.endswith("0.weight"):
                info.offset, info.length = start, len(buffer.getvalue())

    change_metadata(ours, change, "__0_0.distcp")
    for read in (Checkpointer(seeded_net(1)).load, inspect_checkpoint):
        with pytest.raises(ConfigError, match="is corrupt"):
            read(str(ours))
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "content",
    [
        *map(pickle.dumps, (dcp.FileSystemReader, os.getcwd, torch.load, torch.Tensor, {"a": 1})),
        b"",
        b"garbage",
        pickle.dumps(Attack("attacked")),
    ],
)
def test_metadata_of_anything_but_records_of_tensors_is_refused_and_not_run(folder, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(content)
    for call in (read_metadata, read_checkpoint):
        with pytest.raises(ConfigError, match="metadata is "):
            call(str(folder))
    assert os.listdir(tmp_path) == ["dcp"]


def storage(**values):
    def change(metadata):
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return change


WRONG = {
    **{f"file {name}": storage(relative_path=name) for name in ("../secret", "/etc/passwd", "pipe", "gone")},
    **{f"offset {value}": storage(offset=value) for value in (-1, 1 << 50)},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_metadata_may_name_only_bytes_of_its_own_files(folder, change):
    os.mkfifo(folder / "pipe")
    change_metadata(folder, change)
    with pytest.raises(ConfigError, match="is corrupt"):
        read_checkpoint(str(folder))
