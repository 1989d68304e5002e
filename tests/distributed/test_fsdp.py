"""Models sharded by FSDP2 train like whole models, and resume on any number of ranks."""

import shutil
import sys

import pytest
from ranks import HOOKLINE, ROOT, checks, finish, fork, rows, tool

GPT = [
    "--config-file", ROOT / "configs/language/gpt.yaml",
    "MODEL.ARGS.width", 32, "MODEL.ARGS.depth", 2, "MODEL.ARGS.heads", 2, "MODEL.ARGS.block_size", 64,
    "MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", 16, "SOLVER.WARMUP_ITERS", 5, "SOLVER.CHECKPOINT_PERIOD", 10,
    "DATASETS.TRAIN", "['small_text:train']", "DATASETS.TEST", "['small_text:test']", "LOG.PERIOD", 5,
    "CHECKPOINT.BEST.METRIC", "small_text:test/loss", "TEST.EVAL_PERIOD", 10,
]  # fmt: skip
FSDP = ["PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.modules", "['TransformerBlock']"]


def train(folder, ranks, *options, output="run"):
    arguments = tool(*GPT, "--num-gpus", ranks, "OUTPUT_DIR", folder / output, *options)
    code, out = finish(fork(arguments, folder))
    assert code == 0, out
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 1, "SOLVER.MAX_ITER", 30)
    return folder / "run"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The first 20 of 30 iterations on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    arguments = tool(*GPT, "--num-gpus", 2, "OUTPUT_DIR", folder / "run", "SOLVER.MAX_ITER", 30, *FSDP)
    code, out = finish(
        fork([*arguments, "HOOKS", "[{'NAME': 'mishaps:Mishap', 'ARGS': {'what': 'stop', 'at': 19}}]"], folder)
    )
    assert code == 75, out
    return folder


def assert_same(run, other, rel=2e-4, end=31):
    ours, theirs = rows(run), [row for row in rows(other) if row["iteration"] < end]
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx({name: their[name] for name in our}, rel=rel), our["iteration"]


def test_a_sharded_model_trains_like_a_whole_one(whole, sharded):
    assert_same(sharded / "run", whole, rel=1e-4, end=20)


def test_each_rank_writes_its_shard_of_the_checkpoint(sharded):
    folder = sharded / "run/model_0000019.pth"
    names = {path.name for path in folder.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.pth", "checksums.json"}
    assert (sharded / "run/last_checkpoint").read_text() == "model_0000019.pth"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, []),
        pytest.param(2, FSDP, marks=pytest.mark.slow),
        pytest.param(2, ["PARALLEL.NAME", "ddp"], marks=pytest.mark.slow),
    ],
)
def test_a_sharded_run_resumes_with_any_strategy(whole, sharded, tmp_path, ranks, options):
    shutil.copytree(sharded / "run", tmp_path / "run")
    out = train(tmp_path, ranks, "SOLVER.MAX_ITER", 30, *options, "--resume")
    assert "model_0000019.pth" in out
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_checkpoint_file_resumes_with_shards_compiled_and_with_activation_checkpointing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/last_checkpoint").write_text("model_0000019.pth")
    options = ["MODEL.COMPILE.ENABLED", "True", "MODEL.COMPILE.ARGS", "{'backend': 'aot_eager'}"]
    options += ["MODEL.ACTIVATION_CHECKPOINTING", "['TransformerBlock']"]
    train(tmp_path, 2, "SOLVER.MAX_ITER", 30, *FSDP, *options, "--resume")
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
def test_an_exported_sharded_checkpoint_evaluates_to_the_same_loss(sharded, tmp_path):
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", sharded / "run/model_0000019.pth"]
    code, out = finish(fork([*export, "--output", tmp_path / "gpt.pth"], tmp_path))
    assert code == 0, out
    trained = next(row for row in rows(sharded / "run") if row["iteration"] == 19)["small_text:test/loss"]
    evaluate = tool(*GPT, "--eval-only", "MODEL.WEIGHTS", tmp_path / "gpt.pth", "OUTPUT_DIR", tmp_path / "eval")
    code, out = finish(fork(evaluate, tmp_path))
    assert code == 0, out
    assert f"{trained:.5g}" in out, (trained, out)


@pytest.mark.slow
def test_a_damaged_shard_makes_a_resume_use_the_previous_checkpoint(sharded, tmp_path):
    shutil.copytree(sharded / "run", tmp_path / "run")
    part = tmp_path / "run/model_0000019.pth/__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    out = train(tmp_path, 2, "SOLVER.MAX_ITER", 20, *FSDP, "--resume")
    assert "the checksum of __1_0.distcp is wrong" in out
    assert "model_0000009" in out


checked, test_two_ranks = checks("fsdp", 2)
