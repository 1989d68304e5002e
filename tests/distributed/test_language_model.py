"""The GPT in the shape of Llama on texts of different lengths: the same losses on one rank, and split over two."""

import pytest
from ranks import ROOT, finish, fork, rows, tool

pytestmark = pytest.mark.slow

TEXTS = """
import torch
from hookline.engine.data import Tokens


class Texts(Tokens):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs, targets.where(torch.arange(len(targets)) < 8 + index * 5 % 25, -100)
"""
CONFIG = """
_BASE_: "language/gpt_1b.yaml"
MODEL:
  DEVICE: "cpu"
  ARGS: {vocab_size: 256, block_size: 32, width: 16, depth: 2, heads: 4, kv_heads: 2, mlp_width: 24}
DATASETS:
  TRAIN: [{NAME: "texts:Texts", ARGS: {path: "text.txt", block_size: 32, dtype: "uint8"}}]
  TEST: [{NAME: "texts:Texts", ARGS: {path: "text.txt", block_size: 32, dtype: "uint8"}, AS: "test"}]
DATALOADER: {BATCH_SIZE: 8, NUM_WORKERS: 0}
SOLVER: {ACCUMULATION_STEPS: 2, MAX_ITER: 4, WARMUP_ITERS: 2, BASE_LR: 0.01}
TEST: {METRICS: ["Loss", "Accuracy"]}
LOG: {PERIOD: 1}
PARALLEL: {NAME: "auto", ARGS: {}}
OUTPUT_DIR: "run"
"""
TENSOR = ["PARALLEL.NAME", "mesh", "PARALLEL.ARGS.shard", 1, "PARALLEL.ARGS.tensor", 2]
KINDS = {
    "ddp": [2],
    "fsdp2": [2, "PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.modules", "['TransformerBlock']"],
    "tensor": [2, *TENSOR],
    "compiled": [
        *(1, "MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.MODULES", "['TransformerBlock']"),
        *("MODEL.COMPILE.ARGS.backend", "aot_eager"),
    ],
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train in a folder with a text, and return the rows of metrics."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "text.txt").write_text("\n".join((ROOT / "README.md").read_text().splitlines()[:80]))
    (folder / "texts.py").write_text(TEXTS)  # of different lengths: ranks and micro-batches differ in targets
    (folder / "my.yaml").write_text(CONFIG)

    def call(ranks, *options):
        output = folder / f"run{len(list(folder.iterdir()))}"
        arguments = tool("--config-file", "my.yaml", "--num-gpus", ranks, "OUTPUT_DIR", output, *options)
        code, out = finish(fork(arguments, folder))
        assert code == 0, out
        return rows(output)

    return call


@pytest.fixture(scope="module")
def alone(train):
    return train(1)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_rank(train, alone, kind):
    found = train(*KINDS[kind])
    assert len({row["num_items"] for row in alone if "num_items" in row}) > 1
    for ours, theirs in zip(found, alone, strict=True):
        for name in {"total_loss", "num_items", "grad_norm", "test/loss", "test/accuracy"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4), (name, theirs["iteration"])
