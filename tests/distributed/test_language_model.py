"""The GPT in the shape of Llama: shards train like one rank, and their run resumes on other ranks and strategies.

Small models do so in test_parallel.py, test_sharded_saving.py and test_mesh.py.
"""

import shutil

import pytest
from ranks import ROOT, finish, fork, rows, tool

pytestmark = pytest.mark.slow

GPT = [
    "--config-file", ROOT / "configs/language/gpt_1b.yaml", "MODEL.DEVICE", "cpu",
    "MODEL.ARGS", "{'vocab_size': 256, 'block_size': 32, 'width': 16, 'depth': 2, 'heads': 4, 'kv_heads': 2}",
    "DATASETS.TRAIN", "['small_text:train']", "DATASETS.TEST", "['small_text:test']", "DATALOADER.NUM_WORKERS", 0,
    "DATALOADER.BATCH_SIZE", 8, "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.BASE_LR", 0.01, "SOLVER.WARMUP_ITERS", 2,
    "SOLVER.MAX_ITER", 12, "SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 1,
    "TEST.METRICS", "['Loss', 'Accuracy']",
]  # fmt: skip
FSDP = ["PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.param_dtype", "", "PARALLEL.ARGS.reduce_dtype", ""]
COMPILED = ["MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.ARGS.backend", "aot_eager"]
COMPILED += ["MODEL.COMPILE.MODULES", "['TransformerBlock']"]
TENSOR = ["PARALLEL.NAME", "mesh", "PARALLEL.ARGS", "{'shard': 1, 'tensor': 2}"]


def train(folder, ranks, *options, expected=0):
    arguments = tool(*GPT, "--num-gpus", ranks, "OUTPUT_DIR", "run", *options)
    code, out = finish(fork(arguments, folder))
    assert code == expected, out
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 1, "PARALLEL.NAME", "auto")
    return folder / "run"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The first 8 of 12 iterations on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    stop = "[{'NAME': 'mishaps:Mishap', 'ARGS': {'what': 'stop', 'at': 7}}]"
    train(folder, 2, *FSDP, "HOOKS", stop, expected=75)
    return folder / "run"


def assert_same(run, other, end=13):
    ours, theirs = rows(run), [row for row in rows(other) if row["iteration"] < end]
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    assert len({row["num_items"] for row in theirs if "num_items" in row}) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=2e-4), our["iteration"]


def test_a_sharded_model_trains_like_a_whole_one(whole, sharded):
    assert_same(sharded, whole, end=8)


def test_each_rank_writes_its_shard_of_the_checkpoint(sharded):
    folder = sharded / "model_0000007.pth"
    names = {path.name for path in folder.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.pth", "checksums.json"}
    assert (sharded / "last_checkpoint").read_text() == "model_0000007.pth"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["PARALLEL.NAME", "auto"]),
        (2, ["PARALLEL.NAME", "ddp"]),
        (2, TENSOR),
        (2, [*FSDP, *COMPILED]),
    ],
    ids=["one", "ddp", "tensor", "compiled"],
)
def test_a_sharded_run_resumes_with_any_strategy(whole, sharded, tmp_path, ranks, options):
    shutil.copytree(sharded, tmp_path / "run")
    assert "model_0000007.pth" in train(tmp_path, ranks, *options, "--resume")
    assert_same(tmp_path / "run", whole)


def test_a_corrupt_shard_makes_a_resume_use_the_previous_checkpoint(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "run")
    part = tmp_path / "run/model_0000007.pth/__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    out = train(tmp_path, 2, *FSDP, "--resume")
    assert "the checksum of __1_0.distcp is wrong" in out
    assert "Starting training from iteration 4" in out
