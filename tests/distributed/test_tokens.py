"""A language model on a file of bytes: training on two ranks, a stop, a resume on one."""

import pytest
from ranks import ROOT, finish, fork, rows, tool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MODEL = {"block_size": 32, "width": 16, "depth": 1, "heads": 2, "positions": "rotary"}
DATA = {"NAME": "Tokens", "ARGS": {"path": "text.txt", "block_size": 32, "dtype": "uint8"}}


def train(folder, output, length, *more):
    config = ROOT / "configs" / "language" / "gpt.yaml"
    options = ["MODEL.ARGS", MODEL, "MODEL.LOSS.NAME", "TokenCrossEntropyLoss", "DATASETS.TRAIN", [DATA]]
    options += ["DATASETS.TEST", "[]", "CHECKPOINT.BEST.METRIC", "", "HOOKS", "[]", "DATALOADER.BATCH_SIZE", 4]
    options += ["SOLVER.MAX_ITER", length, "LOG.PERIOD", 1, "MODEL.DEVICE", "cpu", "SEED", 1, "OUTPUT_DIR", output]
    options += ["SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.STEPS", "[]", "SOLVER.WARMUP_ITERS", 0]
    code, printed = finish(fork(tool("--config-file", config, *options, *more), folder))
    assert code == 0, printed
    return [row["total_loss"] for row in rows(folder / output) if "total_loss" in row]


def test_two_ranks_and_a_resume_on_one_read_the_samples_of_an_undisturbed_run(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join("word " * (number % 9 + 1) for number in range(60)))
    whole = train(tmp_path, "whole", 12)
    assert len(whole) == 12
    first = train(tmp_path, "parts", 7, "--num-gpus", "2")
    assert first == pytest.approx(whole[:7], abs=1e-5)
    assert train(tmp_path, "parts", 12, "--resume") == pytest.approx(whole, abs=1e-5)
