"""Two ranks train on the same samples in the same order as one process, and end with the same weights.

The rest of what several ranks promise is in ``tests/distributed``.
"""

import pytest
import torch
from ranks import SYNTHETIC, complete, rows, tool

OPTIONS = ("MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", 12, "LOG.PERIOD", 1, "LOG.WRITERS", '["JSONWriter"]', "SEED", 1)


def test_two_ranks_equal_one(tmp_path):
    for ranks in (1, 2):
        command = tool("--config-file", SYNTHETIC, "--num-gpus", ranks, *OPTIONS, "OUTPUT_DIR", f"{ranks}")
        complete(command, tmp_path)
    one, two = ([row["total_loss"] for row in rows(tmp_path / n) if "total_loss" in row] for n in "12")
    assert two == pytest.approx(one, rel=1e-4)
    one, two = (torch.load(tmp_path / n / "model_final.pth", weights_only=True)["model"] for n in "12")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)
