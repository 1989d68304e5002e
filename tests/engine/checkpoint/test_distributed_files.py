"""Reading folders of torch.distributed.checkpoint in one process, without running code in them."""

import io
import json
import os
import pathlib
import pickle
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.tensor import Shard, distribute_tensor

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.distributed_files import read_metadata, read_tensors
from hookline.engine.checkpoint.sharded import write_folder
from hookline.engine.checkpoint.shards import split_shards
from hookline.engine.checkpoint.weights import averaged_weights, check_weights, read_checkpoint
from hookline.engine.export.export import export_weights
from hookline.engine.export.inspection import compare_checkpoints, hash_weights, inspect_checkpoint


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class OfWindows:
    def __reduce__(self):
        return pathlib.WindowsPath, ("x",)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save(folder, content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(folder))
    return str(folder)


AVERAGED = {name: value + 1 for name, value in net().state_dict().items()}


@pytest.fixture
def folder(tmp_path):
    optimizer = torch.optim.AdamW(net().parameters())
    hooks = {"EMA": {"averaged_model": AVERAGED}}
    content = {"model": net().state_dict(), "optimizer": optimizer.state_dict(), "trainer": {"hooks": hooks}}
    return save(tmp_path / "dcp", {**content, "iteration": 3})


def test_a_sharded_checkpoint_is_a_warm_start(folder):
    model = net(1)
    check_weights(folder)
    Checkpointer(model).load(folder, [], strict=True)
    assert same(model.state_dict(), net().state_dict())


@pytest.fixture
def ours(tmp_path):
    """Return a sharded checkpoint, written by one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        weight = net()[0].weight.detach()
        sharded = {"model": dict(net().state_dict()), "trainer": {"iteration": 3, "rng": [1, 2]}}
        sharded["model"]["0.weight"] = distribute_tensor(weight, mesh, [Shard(0)])
        moment = distribute_tensor(weight + 1, mesh, [Shard(0)])
        sharded["trainer"]["optimizer"] = {"state": {0: {"exp_avg": moment}}}
        write_folder(str(tmp_path / "model_1"), *split_shards(sharded), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    return str(tmp_path / "model_1")


def test_a_sharded_run_is_a_warm_start_of_one_process(ours):
    model = net(1)
    check_weights(ours)
    Checkpointer(model).load(ours, [], strict=True)
    assert same(model.state_dict(), net().state_dict())


def test_a_sharded_run_is_inspected_with_all_its_state(ours):
    report = inspect_checkpoint(ours)
    assert report["weights"]["sha256"] == hash_weights(net().state_dict())
    assert report["iteration"] == 3
    assert report["optimizer"]["tensors"] == 1
    assert compare_checkpoints(ours, ours)["equal"]


def test_damage_to_a_sharded_run_is_detected(ours):
    (part,) = (os.path.join(ours, name) for name in os.listdir(ours) if name.endswith(".distcp"))
    with open(part, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    for call in (check_weights, inspect_checkpoint):
        with pytest.raises(ConfigError, match="is damaged: the checksum of"):
            call(ours)


def test_its_averaged_weights_are_found(folder):
    assert same(averaged_weights(read_checkpoint(folder)), AVERAGED)


def test_a_plain_state_dict_is_read(tmp_path):
    folder = save(tmp_path / "dcp", net().state_dict())
    assert same(read_checkpoint(folder)["model"], net().state_dict())


def test_a_folder_without_tensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a checkpoint of a model"):
        read_checkpoint(save(tmp_path / "dcp", {"optimizer": {"state": {"a": torch.ones(1)}}}))


def test_entries_that_are_not_tensors_are_never_read(tmp_path):
    folder = save(tmp_path / "dcp", {"model": net().state_dict(), "evil": Attack(str(tmp_path / "attacked"))})
    assert same(read_checkpoint(folder)["model"], net().state_dict())
    read_tensors(folder, lambda keys: True)
    assert not (tmp_path / "attacked").exists()


def test_metadata_that_would_run_code_is_refused_and_not_run(folder, tmp_path):
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(Attack(str(tmp_path / "attacked")), file)
    for call in (check_weights, read_checkpoint):
        with pytest.raises(ConfigError, match=r"metadata is damaged \(it holds an object of posix\.mkdir"):
            call(folder)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("what", [dcp.FileSystemReader, dcp.metadata.os.getcwd, torch.load, torch.Tensor])
def test_metadata_may_hold_only_records_of_tensors(folder, what):
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(what, file)
    with pytest.raises(ConfigError, match=r"it holds an object of [\w.]+"):
        read_metadata(folder)


@pytest.mark.parametrize("name", ["Metadata", "TensorProperties", "MetadataIndex", "StorageMeta"])
def test_metadata_cannot_change_a_class(folder, name):
    content = pickle.dumps((None, {"alien": 1}), protocol=2)[2:-1]  # new attributes, for the opcode BUILD, "b"
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        file.write(b"ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n" + content + b"b.")
    with pytest.raises(ConfigError, match=r"metadata is damaged"):
        read_metadata(folder)
    assert not hasattr(getattr(dcp_metadata, name), "alien")


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1})])
def test_invalid_metadata_is_refused(folder, content):
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        file.write(content)
    with pytest.raises(ConfigError, match=r"its \.metadata is "):
        read_metadata(folder)


def test_a_folder_with_a_missing_file_is_refused(folder):
    os.remove(os.path.join(folder, "__0_0.distcp"))
    with pytest.raises(ConfigError, match="is damaged"):
        read_checkpoint(folder)


def change_metadata(folder, change, *changed):
    """Rewrite .metadata like an attacker, with matching checksums."""
    path = os.path.join(folder, ".metadata")
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(path, "wb") as file:
        pickle.dump(metadata, file)
    sums = Path(folder, "checksums.json")
    if sums.exists():
        content = json.loads(sums.read_text())
        content |= {name: zlib.crc32(Path(folder, name).read_bytes()) for name in (".metadata", *changed)}
        sums.write_text(json.dumps(content))


READERS = {
    "load": lambda folder: Checkpointer(net(1)).load(folder, []),
    "load of all": lambda folder: Checkpointer(net(1)).load(folder),
    "check": check_weights,
    "inspect": inspect_checkpoint,
    "compare": lambda folder: compare_checkpoints(folder, folder),
    "export": lambda folder: export_weights(folder, os.path.join(folder, "exported.pth")),
}


@pytest.mark.parametrize("kind", ["folder", "ours"])
@pytest.mark.parametrize("way", READERS)
def test_no_reader_unpickles_a_ranks_metadata(request, tmp_path, kind, way):
    folder = request.getfixturevalue(kind)

    # Torch cannot unpickle a WindowsPath here, and falls back to __0.metadata.
    change_metadata(folder, lambda metadata: setattr(metadata.storage_meta, "checkpoint_id", OfWindows()))
    with open(os.path.join(folder, "__0.metadata"), "wb") as file:
        pickle.dump(Attack(str(tmp_path / "attacked")), file)
    READERS[way](folder)
    assert not (tmp_path / "attacked").exists()


def as_bytes_with_properties(metadata):
    """Make DCP unpickle a weight's bytes while the reader expects a tensor."""
    for name, entry in metadata.state_dict_metadata.items():
        if name.endswith("0.weight"):
            metadata.state_dict_metadata[name] = dcp_metadata.BytesStorageMetadata()
            vars(metadata.state_dict_metadata[name]).update(vars(entry))


@pytest.mark.parametrize("way", READERS)
def test_a_weight_that_is_an_object_is_never_unpickled(ours, tmp_path, way):
    (part,) = (os.path.join(ours, name) for name in os.listdir(ours) if name.endswith(".distcp"))
    buffer = io.BytesIO()
    torch.save(Attack(str(tmp_path / "attacked")), buffer)
    with open(part, "ab") as file:
        start = file.tell()
        file.write(buffer.getvalue())

    def change(metadata):
        as_bytes_with_properties(metadata)
        for index, info in metadata.storage_data.items():
            if index.fqn.endswith("0.weight"):
                info.offset, info.length = start, len(buffer.getvalue())

    change_metadata(ours, change, os.path.basename(part))
    with pytest.raises(ConfigError, match="is damaged") if way != "check" else nullcontext():
        READERS[way](ours)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "pipe", "gone"])
def test_metadata_may_name_only_files_of_its_folder(folder, name):
    os.mkfifo(os.path.join(folder, "pipe"))

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change_metadata(folder, change)
    with pytest.raises(ConfigError, match=f"metadata is damaged .there is no file '{name}'"):
        read_metadata(folder)


@pytest.mark.parametrize(("field", "value"), [("offset", -1), ("length", 1 << 50), ("offset", "0")])
def test_metadata_may_name_only_bytes_within_its_files(folder, field, value):
    def change(metadata):
        for info in metadata.storage_data.values():
            setattr(info, field, value)

    change_metadata(folder, change)
    with pytest.raises(ConfigError, match="metadata is damaged"):
        read_metadata(folder)


def test_a_tensor_larger_than_its_files_is_refused_before_allocation(folder):
    def change(metadata):
        metadata.state_dict_metadata["model.0.weight"].size = torch.Size((1 << 40, 1 << 10))

    change_metadata(folder, change)
    with pytest.raises(ConfigError, match="its tensors are larger than all its files"):
        read_checkpoint(folder)


class Got:
    """Pickles as ``getattr(source, name)``."""

    def __init__(self, source, name):
        self.made_by = getattr, (source, name)

    def __reduce__(self):
        return self.made_by


def test_enum_members_of_all_python_versions_are_read(folder):
    kind = dcp_metadata._MEM_FORMAT_ENCODING
    path = os.path.join(folder, ".metadata")
    for value in (kind.TORCH_CONTIGUOUS_FORMAT, Got(kind, "TORCH_CONTIGUOUS_FORMAT")):
        with open(path, "wb") as file:
            pickle.dump(dcp_metadata.Metadata(state_dict_metadata={}, storage_meta=value), file)
        assert read_metadata(folder).state_dict_metadata == {}


def test_getattr_of_other_attributes_is_refused(folder):
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(Got(dcp_metadata.Metadata, "__init__"), file)
    with pytest.raises(ConfigError, match=r"it holds an object of builtins\.getattr"):
        read_metadata(folder)


@pytest.mark.parametrize("chunks", [None, []])
def test_chunks_that_do_not_cover_a_tensor_are_refused(folder, chunks):
    def change(metadata):
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "chunks"):
                entry.chunks = chunks

    change_metadata(folder, change)
    with pytest.raises(ConfigError, match="is damaged"):
        read_checkpoint(folder)
