"""Weights exported as a folder of safetensors files: their content, their sizes, and the memory that it takes."""

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from small_runs import same
from starts import group_of_one
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from hookline.engine import export_weights
from hookline.engine.checkpoint.find_checkpoint import find_checkpoint
from hookline.engine.checkpoint.sharded import split_shards, write_folder
from hookline.engine.checkpoint.weights import read_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def mesh():
    with group_of_one():
        yield init_device_mesh("cpu", (1,))


def checkpoint(mesh, path, weights):
    """Write a sharded checkpoint of a run that has averaged weights."""
    model = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights.items()}
    averaged = {name: distribute_tensor(value + 1, mesh, [Shard(0)]) for name, value in weights.items()}
    # A buffer is not sharded.
    state = {"model": {**model, "seen": torch.tensor(3)}, "iteration": 7}
    state["trainer"] = {"hooks": {"EMA": {"averaged_model": averaged, "evaluate": False}}}
    write_folder(str(path), *split_shards(state), dist.group.WORLD)


@pytest.fixture(params=["ours", "dcp", "plain dcp", "file"])
def source(request, mesh, tmp_path):
    """A checkpoint of one kind, and its weights: five of 4 kB."""
    weights = {f"layers.{index}.weight": torch.randn(100, 10) for index in range(5)}
    path = tmp_path / "source"
    if request.param == "ours":
        checkpoint(mesh, path, weights)
        weights["seen"] = torch.tensor(3)
    elif request.param == "file":
        path = path.with_suffix(".pth")
        torch.save({"model": weights}, path)
    else:
        dcp.save({"model": weights} if request.param == "dcp" else weights, checkpoint_id=str(path))
    return path, weights


def test_each_file_has_at_most_the_size_and_the_index_names_it(source, tmp_path):
    path, weights = source
    done = export_weights(path, tmp_path / "shards", max_shard_size="9KB")
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(file.name for file in (tmp_path / "shards").iterdir()) == sorted([*names, INDEX])
    index = json.loads((tmp_path / "shards" / INDEX).read_text())
    assert index["metadata"]["total_size"] == done.bytes == sum(one.nbytes for one in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    for name in names:
        with safe_open(tmp_path / "shards" / name, framework="pt") as file:
            assert set(file.keys()) == {key for key, where in index["weight_map"].items() if where == name}
            assert sum(file.get_tensor(key).nbytes for key in file.keys()) <= 9000  # noqa: SIM118
            assert file.metadata() == done.metadata
    assert same(read_checkpoint(find_checkpoint(str(tmp_path / "shards")))["model"], weights)


def test_averaged_weights_larger_weights_and_shared_weights(mesh, tmp_path):
    weights = {"a": torch.randn(100, 10), "b": torch.randn(1)}
    checkpoint(mesh, tmp_path / "run", weights)
    export_weights(tmp_path / "run", tmp_path / "averaged", weights="averaged", max_shard_size="1kb")
    found = read_checkpoint(find_checkpoint(str(tmp_path / "averaged")))["model"]
    assert same(found, {name: value + 1 for name, value in weights.items()})
    assert len(list((tmp_path / "averaged").glob("*.safetensors"))) == 2

    torch.save({**weights, "tied": weights["a"]}, tmp_path / "tied.pth")
    (tmp_path / "tied").mkdir()
    export_weights(tmp_path / "tied.pth", tmp_path / "tied", max_shard_size="1MB")
    assert json.loads((tmp_path / "tied" / INDEX).read_text())["metadata"]["total_size"] == 4004
    assert same(read_checkpoint(find_checkpoint(str(tmp_path / "tied")))["model"], {**weights, "tied": weights["a"]})


@pytest.mark.slow
def test_transformers_reads_the_folder(mesh, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    checkpoint(mesh, tmp_path / "run", dict(model.state_dict()))  # with tied weights
    export_weights(tmp_path / "run", tmp_path / "out", max_shard_size="50KB")
    config.save_pretrained(tmp_path / "out")
    read, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert same(read.state_dict(), model.state_dict())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
def test_a_sharded_checkpoint_is_never_whole_in_memory(mesh, tmp_path):
    checkpoint(mesh, tmp_path / "run", {f"layers.{index}.weight": torch.randn(1000, 1000) for index in range(25)})

    def memory(name):
        return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1000

    export_weights(tmp_path / "run", tmp_path / "first", max_shard_size="10MB")  # imports packages
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    export_weights(tmp_path / "run", tmp_path / "second", max_shard_size="10MB")
    assert memory("VmHWM") - before < 40e6  # of 100 MB


def test_an_export_that_fails_leaves_no_files(tmp_path):
    torch.save({"a": torch.ones(100), "b": torch.ones(10_000)}, tmp_path / "in.pth")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # the second file cannot be written
    try:
        with pytest.raises(OSError, match=r"model-00002-of-00002.safetensors cannot be written"):
            export_weights(tmp_path / "in.pth", tmp_path / "shards", max_shard_size="1KB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("shards/*")) == []
    export_weights(tmp_path / "in.pth", tmp_path / "shards", max_shard_size="1KB")
    assert len(list(tmp_path.glob("shards/*"))) == 3
