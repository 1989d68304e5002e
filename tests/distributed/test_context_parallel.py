"""The strategy for long texts that docs/distributed.md names: ranks that share a text equal one process."""

import pytest
import torch
from ranks import ROOT, complete, rows, tool

from hookline.engine.checkpoint.find_checkpoint import find_checkpoint
from hookline.engine.checkpoint.weights import read_checkpoint

pytestmark = pytest.mark.slow

GPT = [
    "--config-file", ROOT / "configs/language/gpt_1b.yaml", "MODEL.DEVICE", "cpu",
    "MODEL.ARGS", "{'vocab_size': 256, 'block_size': 32, 'width': 16, 'depth': 2, 'heads': 8, 'kv_heads': 4}",
    "DATASETS.TRAIN", "['small_text:train']", "DATASETS.TEST", "['small_text:test']", "DATALOADER.NUM_WORKERS", 0,
    "DATALOADER.BATCH_SIZE", 8, "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.OPTIMIZER.NAME", "SGD",
    "SOLVER.OPTIMIZER.ARGS", "{'momentum': 0.9}", "SOLVER.BASE_LR", 0.1, "SOLVER.WARMUP_ITERS", 2,
    "SOLVER.MAX_ITER", 8, "TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 1, "TEST.METRICS", "['Loss', 'Accuracy']",
    "PARALLEL.ARGS", "{}", "OUTPUT_DIR", "run", "SEED", 1,
]  # fmt: skip


def train(folder, ranks, strategy, *options):
    """Train a small GPT, with activation checkpointing; return its metrics and weights."""
    text = (ROOT / "tests/distributed/strategies/context_parallel.py").read_text()
    folder.mkdir()
    (folder / "context_parallel.py").write_text(text)
    (folder / "context_fsdp.py").write_text(text.replace("import DDP", "import FSDP2 as DDP"))
    complete(tool(*GPT, "--num-gpus", ranks, "PARALLEL.NAME", strategy, *options), folder)
    return rows(folder / "run"), read_checkpoint(find_checkpoint(str(folder / "run")))["model"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return train(tmp_path_factory.mktemp("context") / "one", 1, "auto")


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "context_parallel:ContextParallel"),
        (4, "context_parallel:ContextParallel"),
        (2, "context_fsdp:ContextParallel"),
    ],
)
def test_ranks_that_share_a_text_equal_one_process(one, tmp_path, ranks, strategy):
    kept = ["MODEL.ACTIVATION_CHECKPOINTING_KEEP", "['matmul', 'attention']"]
    metrics, weights = train(tmp_path / "ranks", ranks, strategy, *kept)
    for ours, theirs in zip(metrics, one[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), ours["iteration"]
    for name, value in weights.items():
        torch.testing.assert_close(value, one[1][name], rtol=0, atol=1e-6)
