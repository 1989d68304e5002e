"""The GPT in the shape of Llama: shards train like one rank, and their run resumes with other strategies.

Small models do so in test_parallel.py and test_mesh.py; test_sharded_saving.py has the files of shards.
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


@pytest.mark.parametrize("options", [["PARALLEL.NAME", "ddp"], [*FSDP, *COMPILED]], ids=["ddp", "compiled"])
def test_a_sharded_run_resumes_with_any_strategy_and_equals_that_of_one_rank(whole, sharded, tmp_path, options):
    shutil.copytree(sharded, tmp_path / "run")
    assert "model_0000007.pth" in train(tmp_path, 2, *options, "--resume")
    ours, theirs = rows(tmp_path / "run"), rows(whole)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    assert len({row["num_items"] for row in theirs if "num_items" in row}) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=2e-4), our["iteration"]
