"""Several optimizers that take turns on several ranks train like on one, and resume exactly."""

import pytest
import torch
from ranks import run_ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    code, output, results = run_ranks("several:main", 1, tmp_path_factory.mktemp("alone"), "none")
    assert code == 0, output
    return results[0]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_train_like_one_and_resume_exactly(alone, strategy, tmp_path):
    code, output, results = run_ranks("several:main", 2, tmp_path, strategy)
    assert code == 0, output
    for result in results:
        assert result["start"] == 5
        assert result["resumed"] == result["whole"]
        for own, expected in zip(result["whole"], alone["whole"], strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(expected))
